"""Indexes over tokens whose values are shorter or longer than keys, lie in them, or are none."""

import numpy as np
import pytest

from indexes.base import Queries
from indexes.blocks import Blocks
from indexes.coarse.clusters import Clusters
from indexes.oracle import Oracle, merged
from indexes.registry import KINDS, build, load, missing_library
from indexes.retrieval import Dipr, Exact, TopK
from tests.reference import attention, relative_error

HEADS, GROUP, TOKENS = 2, 3, 1500
SHAPES = [(24, 16, False), (16, 40, False), (576, 512, True), (32, 8, True), (128, 0, False)]


def layer(of, dtype=np.float32, tokens=TOKENS):
    """Keys in some directions, values that tell their keys' direction, and queries that look along some keys."""
    head_dim, value_dim, in_keys = of
    rng = np.random.default_rng(1)
    directions = rng.standard_normal((HEADS, 12, head_dim))
    chosen = rng.integers(0, 12, (HEADS, tokens))
    k = np.take_along_axis(directions, chosen[..., None], 1) + 0.3 * rng.standard_normal((HEADS, tokens, head_dim))
    v = rng.standard_normal((HEADS, 12, value_dim))
    v = np.take_along_axis(v, chosen[..., None], 1) + 0.3 * rng.standard_normal((HEADS, tokens, value_dim))
    k, v = k.astype(dtype), v.astype(dtype)
    blocks = Blocks.of(k, value_dim=value_dim) if in_keys else Blocks.of(k, v)
    q = np.repeat(directions[:, :1], GROUP, 1).reshape(HEADS * GROUP, 1, head_dim)
    q = (q + 0.5 * rng.standard_normal(q.shape)).astype(np.float32)
    return blocks, k, k[..., :value_dim] if in_keys else v, Queries.of(q, HEADS, head_dim**-0.5, tokens)


@pytest.mark.parametrize("of", SHAPES)
def test_values_are_read_as_they_were_given(of, isa):
    for dtype in (np.float32, np.float16):
        blocks, k, v, _ = layer(of, dtype, 100)
        for head in range(HEADS):
            assert np.array_equal(blocks.keys(head), k[head].astype(np.float32))
            assert np.array_equal(blocks.values(head, 7, 93), v[head, 7:93].astype(np.float32))


@pytest.mark.parametrize("of", SHAPES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "quantized"])
def test_searches_find_what_they_find_by_equal_keys(of, kind, isa, tmp_path):
    if missing_library(kind):
        pytest.skip("its library is not installed")
    blocks, k, _, queries = layer(of)
    index, like = build(kind, blocks), build(kind, Blocks.of(k))
    for retrieval in (Exact(), Dipr(0.1), TopK(9)):
        found, expected = (one.search(queries, retrieval) for one in (index, like))
        assert np.array_equal(found.ids, expected.ids)
        assert np.array_equal(found.missed_bound, expected.missed_bound)
    index.save(tmp_path / "index")
    again = load(kind, tmp_path / "index", blocks).search(queries, Dipr(0.1))
    assert np.array_equal(again.ids, index.search(queries, Dipr(0.1)).ids)
    assert not index.verify()


@pytest.mark.parametrize("of", [of for of in SHAPES if of[1]])
def test_tails_have_the_dimensions_of_values(of, isa):
    blocks, k, v, queries = layer(of)
    index = Clusters.build(blocks)
    found = index.search(queries, TopK(40), estimate_tail=True)
    assert found.tail.shape == (HEADS * GROUP, 1, of[1])
    oracle = Oracle(blocks, queries)
    out = merged(oracle.judge(found, TopK(40)), found.tail)
    expected, _ = attention(queries.q, k, v, queries.scale)
    assert relative_error(out, expected.reshape(out.shape)) < 0.1
    some = Queries.of(queries.q, HEADS, queries.scale, TOKENS - 333)
    assert index.search(some, TopK(40), estimate_tail=True).tail.shape == found.tail.shape


def test_codes_of_values_want_values_as_long_as_keys():
    for of in SHAPES:
        with pytest.raises(ValueError, match="values of their own, as long as keys: build another"):
            build("quantized", layer(of, tokens=100)[0])
