"""An index file gives back what was written, and says so when it is not whole."""

from pathlib import Path

import numpy as np
import pytest

from indexes import file
from indexes.base import IndexCorrupt

HEADER = {"tokens": 7, "dtype": "bfloat16", "nested": [1, {"a": 2.5}]}
ARRAYS = {
    "codes": np.arange(60, dtype=np.uint8).reshape(3, 4, 5),
    "norms": np.linspace(-1, 1, 9, dtype=np.float32),
    "nothing": np.empty((0, 4), np.int64),
    "one": np.array(3, np.uint64),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file.write(tmp_path / "index", "flat", HEADER, ARRAYS)
    return tmp_path / "index"


def test_gives_back_what_was_written(path: Path) -> None:
    header, arrays = file.read(path, "flat")
    assert header == HEADER
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].flags.writeable


def test_takes_arrays_that_do_not_lie_together(tmp_path: Path) -> None:
    strided = np.arange(40, dtype=np.int32).reshape(5, 8)[:, ::2]
    file.write(tmp_path / "index", "flat", {}, {"a": strided})
    np.testing.assert_array_equal(file.read(tmp_path / "index", "flat")[1]["a"], strided)


def test_replaces_and_leaves_nothing_else(path: Path) -> None:
    file.write(path, "flat", {"tokens": 8}, {})
    assert file.read(path, "flat") == ({"tokens": 8}, {})
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(path: Path) -> None:
    with pytest.raises(ValueError, match="complex"):
        file.write(path, "flat", {}, {"a": np.zeros(3, np.complex64)})
    with pytest.raises(TypeError):
        file.write(path, "flat", {"a": object()}, {})
    assert file.read(path, "flat")[0] == HEADER
    assert list(path.parent.iterdir()) == [path]


def test_refuses_another_kind(path: Path) -> None:
    with pytest.raises(IndexCorrupt, match="'flat'.*'coarse'"):
        file.read(path, "coarse")


def test_refuses_every_shorter_file_and_every_changed_byte(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(IndexCorrupt):
            file.read(path, "flat")
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(IndexCorrupt):
            file.read(path, "flat")


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file.read(tmp_path / "index", "flat")
