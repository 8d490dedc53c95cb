"""Settings come from one frozen tree, a TOML file and one environment variable."""

import pytest

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
        ("[storage]\ndisk_bytes_max = 0", "expected a positive number of bytes"),
        ("[storage]\ngpu_bytes_max = -1", "storage.gpu_bytes_max is -1; expected 0 or more bytes"),
        ("[storage]\ngpu_slab_bytes = -5", "storage.gpu_slab_bytes is -5; expected 0 or more bytes"),
        ('[storage]\ngpu_device = "cuda:"', "storage.gpu_device is 'cuda:'; expected cuda, cuda:0 and so on, or interpreter"),
        ('[storage]\ngpu_format = "fp8"', "storage.gpu_format is 'fp8'; expected float8, int8, or"),
        ("[indexes]\nopened_often = 0", "indexes.opened_often must be at least 1"),
        ("[indexes]\nbytes_max = -1", "indexes.bytes_max not negative"),
        ("[server]\nreflection = 1", "server.reflection is 1"),
        ("[server]\nport = true", "server.port is True"),
        ("[server]\nport = 70000", "0 to 65535"),
        ("storage = 1", "expected a table"),
        ("no toml", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_name_of_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path / "none.toml")
