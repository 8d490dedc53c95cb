"""Layouts of blocks whose values are not as keys are."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from kvdb.errors import InvalidArgument
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.segment_head import Contents

EQUAL = BlockLayout("bfloat16", 2, 64, 16)
SHAPES = [(192, 128, False), (64, 128, False), (576, 512, True), (128, 0, False)]


def layout_of(of, dtype="bfloat16"):
    return BlockLayout(dtype, 2, of[0], 16, "", *of[1:])


def test_values_are_as_long_as_keys_where_nothing_is_said():
    assert EQUAL.value_dim == 64
    assert EQUAL.is_symmetric
    same = BlockLayout("bfloat16", 2, 64, 16, "", 64, values_in_keys=False)
    assert same == EQUAL
    assert hash(same) == hash(EQUAL)
    assert replace(EQUAL, format="int8").value_dim == 64
    assert EQUAL.nbytes == 2 * 2 * 16 * 64 * 2


@pytest.mark.parametrize("of", SHAPES)
def test_tokens_are_read_as_they_were_written(of):
    layout = layout_of(of)
    memory = np.zeros((3, layout.nbytes), np.uint8)
    table = (memory.ctypes.data + np.arange(3) * layout.nbytes).astype(np.uint64)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 40, dim)).astype(ml_dtypes.bfloat16) for dim in of[:2])
    v = k[..., : of[1]] if of[2] else v
    assert layout.write(table, 3, k, v if layout.has_own_values else None) is None
    read = layout.read(table, 3, 40)
    picked = layout.read_at(table, np.arange(42, 2, -1))
    for came, left, back in zip((k, v), read, picked, strict=True):
        assert np.array_equal(came, left)
        assert np.array_equal(came[:, ::-1], back)
    assert np.shares_memory(*read) == of[2]
    assert layout.nbytes == 2 * 16 * (of[0] + (0 if of[2] else of[1])) * 2
    assert layout.token_nbytes == layout.nbytes // 16
    assert layout.value_nbytes == 2 * of[1] * 2
    k[1, 7, 5] = np.inf
    assert layout.write(table, 0, k, None if of[2] or not of[1] else v) == ("k", 1, 7)


def test_codecs_refuse_other_values():
    for of in SHAPES:
        with pytest.raises(InvalidArgument, match="the codec 'int8' cannot hold keys of"):
            replace(layout_of(of), format="int8")


def test_heads_of_files_say_of_values_what_is_unlike_keys():
    assert b"value" not in Contents("key", "spec", (EQUAL, EQUAL), 100).text
    assert b'"value_dim": 512, "values_in_keys": true' in Contents("key", "spec", 2 * (layout_of((576, 512, True)),), 100).text
