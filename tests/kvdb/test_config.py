"""Settings come from one frozen tree, a TOML file and one environment variable."""

import os
import subprocess
import sys

import pytest

import kvdb
from kvdb import config
from kvdb.errors import ConfigError


def load(tmp_path, text):
    path = tmp_path / "kvdb.toml"
    path.write_text(text)
    return config.load(path)


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path):
    loaded = load(
        tmp_path, '[storage]\nblock_size = 16\n[optimizer]\nrules_off = ["short_context"]\n[server]\nsession_idle_seconds = 5'
    )
    assert loaded.storage.block_size == 16
    assert loaded.optimizer.rules_off == ("short_context",)
    assert loaded.server.session_idle_seconds == 5
    assert loaded.server.port == config.Config().server.port


def test_the_token_comes_from_the_environment_and_is_not_printed(monkeypatch):
    monkeypatch.setenv("KVDB_TOKEN", "sesame")
    assert config.load().server.token == "sesame"
    assert "sesame" not in repr(config.load())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[storage]\nblock_sise = 16", "storage.block_sise is no setting; expected one of .*block_size"),
        ("[stroage]\n", "stroage is no setting"),
        ('[storage]\nblock_size = "big"', "storage.block_size is 'big'"),
        ("[storage]\nblock_size = 0", "expected 1 to 1024"),
        ("[storage]\ndisk_path = 1", "storage.disk_path is 1"),
        ("[storage]\ndisk_bytes_max = 0", "storage.disk_bytes_max is 0; expected at least 1 bytes"),
        ("[storage]\ngpu_bytes_max = -1", "storage.gpu_bytes_max is -1; expected at least 0 bytes"),
        ("[storage]\ngpu_slab_bytes = -5", "storage.gpu_slab_bytes is -5; expected at least 0 bytes"),
        ('[storage]\ngpu_device = "cuda:"', "storage.gpu_device is 'cuda:'; expected cuda, cuda:0 and so on, or interpreter"),
        ('[storage]\ngpu_format = "fp8"', "storage.gpu_format is 'fp8'; expected float8, int8, or"),
        ("[indexes]\nopened_often = 0", "indexes.opened_often is 0; expected at least 1"),
        ("[indexes]\nbytes_max = -1", "indexes.bytes_max is -1; expected at least 0"),
        ("[server]\nreflection = 1", "server.reflection is 1"),
        ("[server]\nport = true", "server.port is True"),
        ("[server]\nport = 70000", "0 to 65535"),
        ("storage = 1", "expected a table"),
        ("[cpu]\nthreads = 0", "cpu.threads is 0; expected 1 to 1024"),
        ("[cpu]\nthreads = 1025", "cpu.threads is 1025; expected 1 to 1024"),
        ("[optimizer]\nrules_off = [1]", "optimizer.rules_off is .1,.; expected a tuple of text"),
        ("[optimizer]\nerror_max = 1.5", "optimizer.error_max is 1.5; expected a relative error from 0, which is exact, to 1"),
        ("[optimizer]\nerror_max = nan", "optimizer.error_max is nan; expected a number"),
        ("no toml", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_name_of_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path / "none.toml")


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "kvdb.toml"
    path.write_bytes('[server]\ntoken = "schlüssel"\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match="kvdb.toml is not UTF-8: byte 0xfc at offset 22; TOML is always UTF-8"):
        config.load(path)


def test_a_file_is_read_as_utf8_whatever_the_locale(tmp_path):
    path = tmp_path / "kvdb.toml"
    path.write_bytes('[server]\ntoken = "schlüssel"\n'.encode())
    script = "import sys, kvdb.config; print(ascii(kvdb.config.load(sys.argv[1]).server.token))"
    command = [sys.executable, "-X", "utf8=0", "-c", script, str(path)]
    done = subprocess.run(command, env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True, check=True)
    assert done.stdout == "'schl\\xfcssel'\n"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config.StorageConfig(block_size="64"), "storage.block_size is '64'; expected an integer"),
        (lambda: config.StorageConfig(block_size=64.0), "storage.block_size is 64.0; expected an integer"),
        (lambda: config.StorageConfig(cpu_bytes_max="1 GiB"), "storage.cpu_bytes_max is '1 GiB'; expected an integer, or None"),
        (lambda: config.StorageConfig(gpu_device=None), "storage.gpu_device is None; expected text"),
        (lambda: config.StorageConfig(disk_path=b"x"), "storage.disk_path is b'x'; expected text"),
        (lambda: config.OptimizerConfig(rules_off="hinted"), "optimizer.rules_off is 'hinted'; expected a tuple of text"),
        (lambda: config.OptimizerConfig(rules_off=(1,)), "optimizer.rules_off is .*; expected a tuple of text"),
        (lambda: config.OptimizerConfig(calibrate_at_start=1), "optimizer.calibrate_at_start is 1; expected True or False"),
        (lambda: config.WindowConfig(sink_tokens=None), "window.sink_tokens is None; expected an integer"),
        (lambda: config.IndexConfig(at_store=["flat"]), "indexes.at_store is .*; expected a tuple of text"),
        (lambda: config.IndexConfig(threads=True), "indexes.threads is True; expected an integer"),
        (lambda: config.ServerConfig(drain_seconds="10"), "server.drain_seconds is '10'; expected a number"),
        (lambda: config.ServerConfig(drain_seconds=float("nan")), "server.drain_seconds is nan; expected a number"),
        (lambda: config.Config(storage={"block_size": 16}), "storage is .*; expected a StorageConfig"),
        (lambda: config.Config(server=config.StorageConfig()), "server is .*; expected a ServerConfig"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_name_of_its_field(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("wrong", [{}, {"storage": {}}, config.StorageConfig(), "kvdb.toml"], ids=repr)
def test_a_database_takes_a_config_and_nothing_else(wrong):
    with pytest.raises(ConfigError, match="config is .*; expected a kvdb.Config, or None for the defaults"):
        kvdb.connect(config=wrong)


def test_a_whole_number_of_seconds_is_a_number():
    assert config.ServerConfig(drain_seconds=2).drain_seconds == 2
