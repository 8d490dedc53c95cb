"""`kvdb config` shows every setting with where it comes from: the default, a file, the environment, a flag, in this order."""

import dataclasses
import json

import pytest

import kvdb.config as configuration
from kvdb.__main__ import main
from kvdb.config import Config, ServerConfig

FILE = """
[storage]
block_size = 16
cpu_bytes_max = "8GiB"

[indexes]
at_store = [
    "flat",
]
[server]
drain_seconds = "1m"
port = 1
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kvdb.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def run(capsys):
    def run(*arguments):
        status = main(["config", *arguments])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def shown(said):
    return {name: (setting["value"], setting["from"]) for name, setting in json.loads(said).items()}


def test_each_source_counts_before_those_that_come_earlier(run, file, monkeypatch):
    monkeypatch.setenv("KVDB_SERVER__PORT", "2")
    monkeypatch.setenv("KVDB_STORAGE__BLOCK_SIZE", "32")
    status, said = run("--json", "--config", str(file), "--server.port", "3")
    found = shown(said)
    assert status == 0
    assert found["server.port"] == (3, "--server.port")
    assert found["storage.block_size"] == (32, "KVDB_STORAGE__BLOCK_SIZE")
    assert found["storage.cpu_bytes_max"] == (8 << 30, f"{file}:4")
    assert found["indexes.at_store"] == (["flat"], f"{file}:7")
    assert found["server.drain_seconds"] == (60.0, f"{file}:11")
    assert found["storage.eviction"] == ("reuse", "default")
    assert found.keys() == configuration.settings().keys()


def test_its_output_is_a_file_of_the_same_settings(run, file, tmp_path):
    copy = tmp_path / "copy.toml"
    copy.write_text(run("--config", str(file))[1])
    assert configuration.load(copy) == configuration.load(file) != Config()


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=str)
def test_secrets_are_hidden(run, monkeypatch, flags):
    monkeypatch.setenv("KVDB_TOKEN", "sesame")
    status, said = run(*flags)
    assert status == 0
    assert "sesame" not in said
    assert "hidden" in said
    assert "KVDB_TOKEN" in said


def test_what_is_not_printed_is_a_secret():
    assert "server.token" in configuration.secrets()
    assert {f"server.{field.name}" for field in dataclasses.fields(ServerConfig) if not field.repr} <= configuration.secrets()


def test_a_variable_names_the_file(run, file, monkeypatch):
    monkeypatch.setenv("KVDB_CONFIG", str(file))
    assert shown(run("--json")[1])["storage.block_size"] == (16, f"{file}:3")


def test_the_long_name_of_the_token_counts_before_the_short_one(monkeypatch):
    monkeypatch.setenv("KVDB_TOKEN", "short")
    monkeypatch.setenv("KVDB_SERVER__TOKEN", "long")
    loaded = configuration.trace()
    assert (loaded.config.server.token, loaded.origins["server.token"]) == ("long", "KVDB_SERVER__TOKEN")


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("STORAGE__CPU_BYTES_MAX", "1.5 GiB", 3 << 29),
        ("STORAGE__CPU_BYTES_MAX", "2MB", 2_000_000),
        ("STORAGE__CPU_BYTES_MAX", "1_000", 1000),
        ("STORAGE__CPU_BYTES_MAX", "none", None),
        ("SERVER__DRAIN_SECONDS", "500ms", 0.5),
        ("SERVER__DRAIN_SECONDS", "12", 12.0),
        ("STORAGE__COLD_AFTER_SECONDS", "7d", 604_800.0),
        ("SERVER__REFLECTION", "TRUE", True),
        ("INDEXES__AT_STORE", "flat, hnsw", ("flat", "hnsw")),
        ("INDEXES__AT_STORE", "", ()),
        ("OPTIMIZER__ERROR_MAX", "0.5", 0.5),
        ("METRICS__PORT", "9464", 9464),
    ],
)
def test_a_text_is_read_as_what_its_setting_holds(monkeypatch, variable, text, value):
    monkeypatch.setenv(f"KVDB_{variable}", text)
    table, _, name = variable.lower().partition("__")
    assert getattr(getattr(configuration.load(), table), name) == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[storage]\ncpu_bytes_max = "8 gibi"', "storage.cpu_bytes_max is '8 gibi'; expected bytes, such as .* by .*:2"),
        ('[storage]\narena_bytes = "0.3B"', "no whole number of bytes"),
        ('[server]\ndrain_seconds = "soon"', "server.drain_seconds is 'soon'; expected seconds, such as 30, 500ms"),
        ('[server]\nport = "7700"', "server.port is '7700'; expected an integer .server.port by .*:2"),
        ("[storage]\n\nblock_sise = 1", "did you mean storage.block_size. .*:3"),
        ("[server]\n[stroage]\n", "stroage is no setting; expected one of .*; did you mean storage. .*:2"),
    ],
)
def test_a_wrong_file_is_told_with_the_line(run, file, text, told):
    import re

    file.write_text(text)
    status, said = run("--config", str(file))
    assert status == 2
    assert said.count("\n") == 1
    assert re.search(told, said), said


def test_a_wrong_variable_and_a_wrong_flag_are_named(run, monkeypatch):
    assert run("--storage.block-size", "big") == (
        2,
        "kvdb: storage.block_size is 'big'; expected an integer (storage.block_size by --storage.block-size)\n",
    )
    monkeypatch.setenv("KVDB_STORAGE__CPU_BYTE_MAX", "1")
    status, said = run()
    assert status == 2
    assert "did you mean storage.cpu_bytes_max? (KVDB_STORAGE__CPU_BYTE_MAX)" in said


def test_the_short_flags_of_serve_are_settings(monkeypatch, tmp_path):
    served = []
    monkeypatch.setattr("kvdb.server.serve.run", lambda config: served.append(config) or 0)
    monkeypatch.setenv("KVDB_STORAGE__PATH", "elsewhere")
    short = ["--port", "0", "--store", str(tmp_path), "--metrics-port", "0", "--error-max", "0", "--threads", "1"]
    assert main(["serve", *short, "--host", "::1", "--storage.cpu-bytes-max", "1GiB"]) == 0
    (config,) = served
    assert (config.server.host, config.server.port, config.metrics.port) == ("::1", 0, 0)
    assert (config.storage.path, config.storage.cpu_bytes_max) == (str(tmp_path), 1 << 30)
    assert (config.optimizer.error_max, config.cpu.threads) == (0.0, 1)
