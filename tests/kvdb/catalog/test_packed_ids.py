"""Packed token ids are the ids, and are compared as these are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.catalog.contexts.prefix_tree import common_prefix
from kvdb.catalog.segments.packed_ids import PackedIds, Prompt

LARGEST = [1, 1 << 16, (1 << 16) + 3, 1 << 20, (1 << 31) - 1]


def ids(seed, n, largest):
    return np.random.default_rng(seed).integers(0, largest, n).astype(np.int32)


@given(st.integers(0, 99), st.integers(0, 900), st.sampled_from(LARGEST), st.data())
def test_what_was_packed_is_unpacked(seed, n, largest, data):
    tokens = ids(seed, n, largest)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    packed = PackedIds(tokens)
    assert len(packed) == n
    assert (packed.unpack() == tokens).all()
    assert packed.unpack(start, stop).dtype == np.int32
    assert (packed.unpack(start, stop) == tokens[start:stop]).all()


@given(st.integers(0, 99), st.integers(1, 900), st.sampled_from(LARGEST))
def test_bytes_become_the_ids_again(seed, n, largest):
    tokens = ids(seed, n, largest)
    content = PackedIds(tokens).to_bytes()
    assert (PackedIds.from_bytes(content).unpack() == tokens).all()
    assert PackedIds.from_bytes(content).to_bytes() == content
    assert len(content) == 4 + PackedIds(tokens).nbytes


@pytest.mark.parametrize("content", [b"", bytes(4), b"\3\0\0\0" + bytes(7), b"\3\0\0\0" + bytes(5), b"\3\0\0\0" + bytes(13)])
def test_what_are_no_ids_is_refused(content):
    with pytest.raises(ValueError, match="are not the ids"):
        PackedIds.from_bytes(content)


@given(st.integers(0, 99), st.integers(1, 1500), st.sampled_from(LARGEST), st.sampled_from(LARGEST), st.data())
def test_the_common_prefix_is_that_of_the_ids(seed, n, largest, strange, data):
    """Wherever the prompt begins, and whatever kind of id it leaves with, in the low bits or in those above."""
    tokens, at = ids(seed, n, largest), data.draw(st.integers(0, 3))
    prompt = np.concatenate([ids(seed + 1, at, strange), tokens, ids(seed + 2, data.draw(st.integers(0, 5)), strange)])
    where = data.draw(st.integers(at, len(prompt) - 1))
    prompt[where] = data.draw(st.sampled_from([prompt[where], 0, prompt[where] ^ 1, prompt[where] ^ (1 << 16), strange - 1]))
    limit = data.draw(st.integers(0, n))
    assert PackedIds(tokens).common(Prompt(prompt), at, limit) == common_prefix(tokens[:limit], prompt[at:])


@pytest.mark.parametrize(("largest", "bytes_of_64"), [(1 << 16, 128), (150_000, 160), (1 << 20, 160), (1 << 21, 256)])
def test_a_block_of_64_tokens_takes_so_many_bytes(largest, bytes_of_64):
    tokens = ids(0, 64, largest)
    tokens[0] = largest - 1
    assert PackedIds(tokens).nbytes == bytes_of_64
