"""The quantized index: what it finds is exact, what it estimates is near float64, and its bounds hold."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import indexes._native as _native
from indexes.base import IndexCorrupt, Queries
from indexes.blocks import Blocks
from indexes.chunk_codes import CHUNK
from indexes.quantized import Quantized
from indexes.retrieval import Dipr, Exact, TopK, TopP
from tests.indexes.coarse_data import Layer, check_rows, log_sum, rows, same_set, wanted

SCALE = 32**-0.5
RETRIEVALS = (Exact(), Dipr(0.05), TopK(40), TopP(0.8))


@pytest.fixture(scope="module")
def layer():
    return Layer.of(2500)


@pytest.fixture(scope="module")
def index(layer):
    return Quantized.build(layer.blocks)


def attention_over(blocks, x, row, tokens, n, scale=SCALE):
    """Attention of one row over some tokens in float64. x: logits of the row, before the scale."""
    weights = np.exp(scale * (x[tokens] - x[tokens].max()))
    return weights @ blocks.values(row // n // 2).astype(np.float64)[tokens] / weights.sum()


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("retrieval", RETRIEVALS, ids=str)
def test_what_is_found_is_exact_and_what_is_missed_is_bounded(layer, index, retrieval, tight):
    hidden = np.random.default_rng(1).random(layer.blocks.tokens) < 0.2
    for queries in (layer.queries(), layer.queries(begin=[30, 900], end=[2100, 2500], hidden=hidden)):
        found = index.search(queries, retrieval, tight=tight)
        x = check_rows(layer.blocks, queries, found)
        assert found.tail is None
        if tight:
            for row, ids in enumerate(rows(found)):
                assert same_set(x[row], ids, wanted(x[row], retrieval, SCALE))


@pytest.mark.parametrize("retrieval", [Dipr(0.05), TopK(40)], ids=str)
def test_the_margin_leaves_little_behind(layer, index, retrieval):
    queries = layer.queries()
    found = index.search(queries, retrieval)
    x = check_rows(layer.blocks, queries, found)
    right = [wanted(x[row], retrieval, SCALE) for row in range(queries.rows)]
    hits = sum(len(np.intersect1d(a, b)) for a, b in zip(rows(found), right, strict=True))
    assert hits >= 0.99 * sum(map(len, right))


@pytest.mark.skipif("amx_emulated" not in _native.emulated_isas(), reason="needs the instructions beside the tiles")
@pytest.mark.parametrize("d", [64, 128, 96])
@pytest.mark.parametrize("n", [1, 2, 4, 6, 9])
def test_scans_by_tiles_are_those_by_vectors(d, n):
    """Sums of integers are the same whoever makes them. Rows of 2 to 18 of a KV head: too few for tiles, filling them in part and
    wholly, and more than one holds; dimensions that fill tiles, and that do not."""
    rng = np.random.default_rng(n)
    k, v = rng.standard_normal((2, 2, 1500, d)).astype(np.float32)
    q = 3 * rng.standard_normal((4, n, d)).astype(np.float32)
    index = Quantized.build(Blocks.of(k, v, 64))
    queries = Queries.of(q, 2, d**-0.5, 1500)
    before, found = _native.isa(), []
    try:
        for isa in ("avx512_bf16", "amx_emulated"):
            _native.set_isa(isa)
            found.append(index.search(queries, TopK(40)))
    finally:
        _native.set_isa(before)
    for name in ("offsets", "ids", "scores", "missed", "missed_bound"):
        assert (getattr(found[0], name) == getattr(found[1], name)).all()


@pytest.mark.parametrize("floor", [-np.inf, 20.0, 1e6])
def test_a_range_begins_at_the_largest_of_all(layer, index, floor):
    queries = layer.queries(floor=floor)
    found = index.search(queries, Dipr(0.05), tight=True)
    x = check_rows(layer.blocks, queries, found)
    for row, ids in enumerate(rows(found)):
        assert same_set(x[row], ids, wanted(x[row], Dipr(0.05), SCALE, floor))


@pytest.mark.parametrize("outside", [-np.inf, 0.0, 30.0, 1e4])
def test_a_share_counts_what_is_outside(layer, index, outside):
    queries = layer.queries(outside=outside)
    found = index.search(queries, TopP(0.8), tight=True)
    x = check_rows(layer.blocks, queries, found)
    for row, ids in enumerate(rows(found)):
        assert same_set(x[row], ids, wanted(x[row], TopP(0.8), SCALE, outside=outside))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("retrieval", [Dipr(0.5), TopK(1), TopK(64), TopP(0.3)], ids=str)
def test_what_is_not_found_is_estimated(retrieval, dtype):
    """Also for queries that see a part of the tokens, and none of the hidden ones. The less the rest weighs, the rougher it may
    be."""
    layer = Layer.of(1500, dtype)
    index = Quantized.build(layer.blocks)
    hidden = np.random.default_rng(1).random(1500) < 0.2
    queries = layer.queries(begin=[0, 70], end=[1500, 1301], hidden=hidden)
    found = index.search(replace(queries, q=0.3 * queries.q), retrieval, estimate_tail=True)
    x = check_rows(layer.blocks, replace(queries, q=0.3 * queries.q), found)
    for row, ids in enumerate(rows(found)):
        rest = np.setdiff1d(np.flatnonzero(np.isfinite(x[row])), ids)
        exact = attention_over(layer.blocks, x[row], row, rest, 2)
        estimate = found.tail.reshape(-1, 32)[row]
        attended = np.exp(log_sum(x[row, ids], SCALE) - log_sum(x[row, rest], SCALE))
        assert np.linalg.norm(estimate - exact) <= (0.1 + 0.02 * attended) * np.linalg.norm(exact)
        assert abs(found.missed.reshape(-1)[row] - log_sum(x[row, rest], SCALE)) <= 0.1


@given(
    tokens=st.integers(1, 1300),
    dim=st.sampled_from([8, 24, 32, 64, 80]),
    group=st.integers(1, 6),
    n=st.integers(1, 9),
    seed=st.integers(0, 99),
    length=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_every_shape_is_answered_near_float64(tokens, dim, group, n, seed, length):
    """Found tokens and tail together are attention over everything: far nearer than what a code leaves of one value."""
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, 2, tokens, dim)).astype(np.float32) + 3 * rng.standard_normal(dim).astype(np.float32)
    q = (length * rng.standard_normal((2 * group, n, dim))).astype(np.float32)
    found = Quantized.build(Blocks.of(k, v)).search(Queries.of(q, 2, dim**-0.5, tokens), TopK(24), estimate_tail=True)
    for row, ids in enumerate(rows(found)):
        head, i = divmod(row, n)
        x = dim**-0.5 * (k[head // group].astype(np.float64) @ q[head, i])
        weights = np.exp(x - x.max())
        exact = weights @ v[head // group] / weights.sum()
        kept, rest = np.exp(x[ids] - x.max()), np.exp(found.missed[head, i] - x.max())
        out = (kept @ v[head // group][ids] + rest * found.tail[head, i]) / (kept.sum() + rest)
        assert np.linalg.norm(out - exact) <= 0.1 * np.linalg.norm(v[head // group], axis=1).max()
        everything = log_sum(x, 1.0)
        assert found.missed_bound[head, i] >= log_sum(np.delete(x, ids), 1.0) - 1e-5
        assert abs(np.logaddexp(log_sum(x[ids], 1.0), found.missed[head, i]) - everything) <= 0.25


def test_noise_of_codes_averages_out():
    """A head that looks everywhere: 4-bit codes leave a tenth of each value, and a hundredth of their mean."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, 8000, 64), np.float32)
    q = 0.2 * rng.standard_normal((4, 1, 64), np.float32)
    found = Quantized.build(Blocks.of(k, v)).search(Queries.of(q, 1, 1 / 8, 8000), TopK(1), estimate_tail=True)
    weights = np.exp(k[0] @ q[:, 0].T / 8)
    exact = (weights / weights.sum(0)).T @ v[0]
    assert np.linalg.norm(found.tail[:, 0] - exact) <= 0.15 * np.linalg.norm(exact)


def test_numbers_too_large_for_codes_are_read_as_they_are():
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, 700, 32)).astype(np.float32)
    k[0, 100] *= 1e17
    v[0, 300] *= 1e25
    k[0, 500:] *= 1e-40
    v[0, 600:] *= 1e-38
    blocks = Blocks.of(k, v)
    q = np.float32([1e-17, 1e-1])[None, :, None] * rng.standard_normal((2, 2, 32)).astype(np.float32)
    index = Quantized.build(blocks)
    index.verify()
    queries = Queries.of(q, 1, SCALE, 700)
    found = index.search(queries, TopK(3), estimate_tail=True)
    check_rows(blocks, queries, found)
    x = k[0].astype(np.float64) @ q[0, 0].astype(np.float64)
    exact = attention_over(blocks, x, 0, np.delete(np.arange(700), rows(found)[0]), 2)
    assert np.isfinite(found.tail).all()
    np.testing.assert_allclose(found.tail[0, 0], exact, rtol=0.01, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("steps", [(1, 2, CHUNK, CHUNK + 1, 2500), (2500,), (1700, 2500)], ids=str)
def test_what_is_kept_does_not_depend_on_how_many_tokens_came_at_a_time(layer, index, steps, tmp_path):
    grown = Quantized.build(layer.cut(steps[0]))
    for tokens in steps:
        grown.insert(layer.cut(tokens))
    grown.verify()
    grown.save(tmp_path / "grown")
    index.save(tmp_path / "built")
    assert (tmp_path / "grown").read_bytes() == (tmp_path / "built").read_bytes()


def test_a_file_gives_the_same_index(layer, index, tmp_path):
    index.save(tmp_path / "index")
    loaded = Quantized.load(tmp_path / "index", layer.blocks)
    loaded.verify()
    queries = layer.queries()
    first, second = (i.search(queries, TopK(20), estimate_tail=True) for i in (index, loaded))
    np.testing.assert_array_equal(first.ids, second.ids)
    np.testing.assert_array_equal(first.tail, second.tail)
    np.testing.assert_array_equal(first.missed, second.missed)


@pytest.mark.parametrize("name", ["centres", "scales", "keys", "values", "bounds"])
def test_a_changed_array_is_found(layer, name):
    index = Quantized.build(layer.blocks)
    index.arrays[name][1, 1].view(np.uint8)[3] ^= 1
    with pytest.raises(IndexCorrupt, match="codes are not those"):
        index.verify()


def test_other_keys_are_refused(layer, index, tmp_path):
    index.save(tmp_path / "index")
    with pytest.raises(IndexCorrupt, match="other keys"):
        Quantized.load(tmp_path / "index", Layer.of(2500, seed=1).blocks)
    with pytest.raises(ValueError, match="new blocks"):
        Quantized.build(layer.blocks).insert(layer.cut(100))


def test_heads_that_want_much_are_given_up():
    layer = Layer.of(6000)
    index = Quantized.build(layer.blocks)
    wide = replace(layer.queries(), q=0.001 * layer.q)
    found = index.search(wide, Dipr(0.05), give_up=True)
    assert found.dense.all()
    assert len(found.ids) == 0
    sharp = index.search(layer.queries(), TopK(10), give_up=True)
    assert not sharp.dense.any()
    assert len(sharp.ids) == 10 * 8
    assert sharp.nbytes < wide.rows * layer.blocks.tokens * layer.blocks.token_nbytes / 8
