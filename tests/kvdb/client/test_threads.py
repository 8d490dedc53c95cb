"""How many threads a call may use is a setting, of the whole process."""

import pytest

import kvdb
from kvdb import _native
from kvdb.config import Config, CpuConfig
from kvdb.errors import ConfigError, InvalidArgument


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    before = _native.threads()
    yield
    _native.set_threads(before)


def test_the_last_database_that_names_threads_sets_them():
    with kvdb.connect(threads=3):
        assert _native.threads() == 3
        with kvdb.connect(config=Config(cpu=CpuConfig(5))):
            assert _native.threads() == 5
        with kvdb.connect(config=Config(cpu=CpuConfig(5)), threads=2):
            assert _native.threads() == 2
        with kvdb.connect():
            assert _native.threads() == 2


@pytest.mark.parametrize("threads", [0, -1, 1025, True, "2", 1.5])
def test_a_wrong_number_is_refused_and_changes_nothing(threads):
    before = _native.threads()
    with pytest.raises(ConfigError, match="cpu.threads is"):
        kvdb.connect(threads=threads)
    assert _native.threads() == before


def test_a_server_has_threads_of_its_own():
    with pytest.raises(InvalidArgument, match="a remote database has its own configuration, threads and rules"):
        kvdb.connect("kvdb://localhost:1", threads=2)
