"""The keys of HiCache's pages."""

import hashlib

import numpy as np
import pytest

from engine_adapter.sglang.keys import IDS, page_ids, page_keys
from kvdb.errors import InvalidArgument, Unsupported


def test_a_key_is_the_hash_of_the_one_before_and_of_the_tokens():
    tokens = np.arange(40, dtype=np.int32)
    first = hashlib.sha256(tokens[:16].tobytes())
    second = hashlib.sha256(first.digest() + tokens[16:32].tobytes())
    assert page_keys(tokens, 16) == [first.hexdigest(), second.hexdigest()]


def test_a_seed_tells_tenants_apart():
    tokens = np.arange(16)
    seed = hashlib.sha256(b"tenant").hexdigest()
    assert page_keys(tokens, 16, seed) == [hashlib.sha256(bytes.fromhex(seed) + tokens.astype("<u4").tobytes()).hexdigest()]


def test_ids_of_a_chain_begin_as_those_of_its_beginning():
    keys = page_keys(np.arange(64), 16)
    ids = page_ids(keys, 16)
    assert len(ids) == 64
    assert np.array_equal(page_ids(keys[:2], 16), ids[:32])
    assert ids.min() >= 0
    assert len({tuple(row) for row in ids.reshape(4, 16)}) == 4


@pytest.mark.parametrize("key", ["", "abc", "g" * 64, "0" * 65, "A" * 64])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(InvalidArgument):
        page_ids([key], 16)


def test_pages_too_short_for_a_key_are_refused():
    with pytest.raises(Unsupported):
        page_ids(["0" * 64], IDS - 1)


def test_keys_are_those_of_sglang():
    """What the hash extension of SGLang 0.5.23, compiled, gave for the tokens 0 to 49 in pages of 16, and behind a seed."""
    keys = [
        "5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea",
        "4681c0107c38f402cd1bc30b0b09a65202dba31f98269d9d7f63f5e0dea6901a",
        "9c9217b40433137e8a734787cbb1fa92045602840c3ab29539366f8ffe21ec2f",
    ]
    assert page_keys(np.arange(50), 16) == keys
    assert page_keys(np.arange(16), 16, keys[0]) == ["a2f50891fec0429f29a88904aac63db5147ab2da0124e47ba2ab3ec95a302584"]
