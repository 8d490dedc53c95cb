"""The graph index against brute force: every retrieval, element type and instruction set, filters, estimates, bounds."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from indexes.base import Queries
from indexes.blocks import DTYPES, Blocks
from indexes.hnsw import Hnsw, Settings
from indexes.hnsw.build import HnswlibMissing
from indexes.retrieval import Dipr, Exact, TopK, TopP
from tests.indexes.hnsw_data import SCALE, TOKENS, ask, check_form, every_score, found_of, index, layer, pack, recall, wanted

RETRIEVALS = [Exact(), Dipr(), TopK(20), TopP(0.9)]


@pytest.mark.parametrize("retrieval", RETRIEVALS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_finds_what_brute_force_finds(dtype, retrieval, isa):
    blocks, q, _ = layer(dtype=dtype)
    queries = ask(q)
    found = index(dtype=dtype).search(queries, retrieval)
    scores = every_score(blocks, queries)
    check_form(found, scores)
    assert recall(found, wanted(scores, queries, retrieval)) >= (1.0 if isinstance(retrieval, Exact) else 0.98)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("form", ["best_first", "listed"])
def test_both_forms_find_it_and_look_at_few(form, share):
    blocks, q, _ = layer()
    queries = ask(q)
    found = index().search(queries, Dipr(), form=form, share=share)
    assert recall(found, wanted(every_score(blocks, queries), queries, Dipr())) >= 0.98
    assert found.scanned < 2 * queries.rows * 600


def test_what_dipr_finds_is_in_range_of_the_best_or_the_floor():
    blocks, q, _ = layer()
    queries = ask(q)
    best = every_score(blocks, queries).max(axis=1).reshape(queries.floor.shape)
    queries = replace(queries, floor=(best + np.linspace(-60, 60, best.size).reshape(best.shape)).astype(np.float32))
    found = index().search(queries, Dipr())
    sets = list(wanted(every_score(blocks, queries), queries, Dipr()))
    assert recall(found, sets) >= 0.98
    for row, want in enumerate(sets):
        assert set(found_of(found, row)[0].tolist()) <= want


def test_a_floor_far_above_leaves_nothing():
    _, q, _ = layer()
    queries = ask(q)
    found = index().search(replace(queries, floor=np.full_like(queries.floor, 1e6)), Dipr())
    assert len(found.ids) == 0
    assert np.isfinite(found.missed).all()


@pytest.mark.parametrize(
    "hide",
    [
        lambda rng: np.arange(TOKENS) >= TOKENS // 10,
        lambda rng: rng.random(TOKENS) < 0.9,
        lambda rng: (np.arange(TOKENS) // 100) % 2 == 0,
        lambda rng: np.arange(TOKENS) != 17,
    ],
    ids=["first tenth", "a random tenth", "every second hundred", "one"],
)
def test_hidden_tokens_are_walked_through_and_never_found(hide, rng):
    blocks, q, _ = layer()
    hidden = hide(rng)
    queries = ask(q, window=False, hidden=pack(hidden))
    scores = every_score(blocks, queries)
    found = index().search(queries, Dipr())
    check_form(found, scores)
    assert recall(found, wanted(scores, queries, Dipr())) >= 0.98


def test_a_walk_among_hidden_tokens_finds_what_is_visible(rng):
    """More visible tokens than are scanned outright, so that the walk has to find its way."""
    blocks, q, query_samples = layer(tokens=12_000)
    graph = Hnsw.build(blocks, query_samples)
    for end, hidden in ((5_000, None), (12_000, pack(rng.random(12_000) < 0.6))):
        queries = replace(ask(q, end, window=False), hidden=hidden)
        scores = every_score(blocks, queries)
        found = graph.search(queries, Dipr(), give_up=True)
        check_form(found, scores)
        walked = ~found.dense.reshape(-1)
        assert walked.mean() > 0.5
        sets = [want if walked[row] else set() for row, want in enumerate(wanted(scores, queries, Dipr()))]
        assert recall(found, sets) >= 0.95


def test_each_query_has_its_own_range():
    blocks, q, _ = layer()
    queries = ask(q)
    ends = np.array([0, 1, 900, 3000, 5000, TOKENS], np.int64)
    queries = replace(queries, begin=ends // 3, end=ends)
    for retrieval in RETRIEVALS:
        scores = every_score(blocks, queries)
        found = index().search(queries, retrieval)
        check_form(found, scores)
        assert recall(found, wanted(scores, queries, retrieval)) >= 0.97


def test_everything_hidden_finds_nothing():
    _, q, _ = layer()
    queries = ask(q, hidden=pack(np.ones(TOKENS, bool)))
    for retrieval in RETRIEVALS:
        found = index().search(queries, retrieval, tight=True)
        assert len(found.ids) == 0
        assert (found.missed == -np.inf).all()
        assert (found.missed_bound <= np.float32(1e-4)).all()


def test_a_diffuse_head_gives_up_early_or_is_read_in_full():
    blocks, q, _ = layer("diffuse")
    queries = ask(q)
    left = index("diffuse").search(queries, Dipr(), give_up=True)
    assert left.dense.all()
    assert len(left.ids) == 0
    found = index("diffuse").search(queries, Dipr())
    assert found.dense is None
    assert recall(found, wanted(every_score(blocks, queries), queries, Dipr())) >= 0.999


@pytest.mark.parametrize("kind", ["sharp", "diffuse"])
@pytest.mark.parametrize("retrieval", RETRIEVALS[1:], ids=str)
def test_bounds_hold_and_the_tight_one_is_near(kind, retrieval, isa):
    blocks, q, _ = layer(kind)
    queries = ask(q)
    scores = every_score(blocks, queries)
    loose = index(kind).search(queries, retrieval)
    tight = index(kind).search(queries, retrieval, tight=True)
    truth = np.array([np.logaddexp.reduce(SCALE * np.delete(row, found_of(tight, r)[0])) for r, row in enumerate(scores)])
    assert (loose.missed_bound.reshape(-1) >= truth).all()
    assert (tight.missed_bound.reshape(-1) >= truth).all()
    assert (tight.missed_bound <= loose.missed_bound).all()
    assert np.exp(np.median(tight.missed_bound.reshape(-1) - truth)) < 3
    assert np.abs(np.median(loose.missed.reshape(-1) - truth)) < 1


def test_top_p_counts_what_lies_outside():
    _, q, _ = layer()
    queries = ask(q)
    few = index().search(replace(queries, outside=np.full_like(queries.outside, 1e4)), TopP(0.9))
    assert len(few.ids) == 0
    less = index().search(queries, TopP(0.5))
    assert 0 < len(less.ids) < len(index().search(queries, TopP(0.95)).ids)


@pytest.mark.parametrize("k", [1, 300, 3000, TOKENS + 5])
def test_top_k_of_any_size(k):
    blocks, q, _ = layer()
    queries = ask(q)
    found = index().search(queries, TopK(k))
    assert (np.diff(found.offsets) == min(k, TOKENS - 80)).all()
    assert recall(found, wanted(every_score(blocks, queries), queries, TopK(k))) >= 0.98


def test_samples_of_queries_lead_where_keys_do_not():
    """The keys that a query wants lie apart from each other, each among others: only a sample query ties them together."""
    rng = np.random.default_rng(3)
    centres = 12 * rng.standard_normal((300, 64)).astype(np.float32)
    keys = np.repeat(centres, 40, axis=0) + rng.standard_normal((12_000, 64)).astype(np.float32)
    keys[::200, 0] = 60  # one of every fifth cluster
    blocks = Blocks.of(keys[None])
    q = np.zeros((2, 8, 64), np.float32)
    q[..., 0], q[..., 1:] = 4, 0.1 * rng.standard_normal((2, 8, 63))
    queries = replace(ask(q, 12_000, window=False), kv_heads=1, scale=0.1)
    settings = Settings(neighbours=200, random=16, starts=4)
    sets = list(wanted(every_score(blocks, queries), queries, Dipr()))
    plain = recall(Hnsw.build(blocks, None, settings).search(queries, Dipr()), sets)
    learnt = recall(Hnsw.build(blocks, np.array(q), settings).search(queries, Dipr()), sets)
    assert learnt >= 0.98
    assert plain < learnt


def test_searching_from_several_threads_gives_what_one_gives():
    from concurrent.futures import ThreadPoolExecutor

    _, q, _ = layer()
    queries = ask(q)
    alone = index().search(queries, Dipr())
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: index().search(queries, Dipr()), range(16)):
            np.testing.assert_array_equal(found.ids, alone.ids)


def test_cost_hardly_grows_with_the_tokens():
    few, many = (index().cost(tokens, 4, Dipr()) for tokens in (1 << 17, 1 << 20))
    assert many.nbytes < 2.5 * few.nbytes
    assert index().cost(1 << 20, 4, Exact()).nbytes > 50 * many.nbytes


def test_building_without_hnswlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    with pytest.raises(HnswlibMissing, match=r"pip install kvdb\[hnsw\]") as raised:
        Hnsw.build(layer()[0])
    assert raised.value.name == "hnswlib", "messages about it name the library"


def test_keys_far_from_all_others_keep_their_order():
    """Codes that cut them off made them look worse than those few beside them that are looked at themselves."""
    rng = np.random.default_rng(2)
    k = rng.standard_normal((1, TOKENS, 64)).astype(np.float32)
    direction = rng.standard_normal(64) / 8
    far = rng.choice(TOKENS, 90, replace=False)
    k[0, far] += np.linspace(60, 140, 90)[:, None] * direction
    q = (12 * direction)[None, None].astype(np.float32)
    index = Hnsw.build(Blocks.of(k), query_samples=np.repeat(q, 4, axis=1))
    found = index.search(Queries.of(q, 1, SCALE, TOKENS), Dipr(1e-20))
    scores = k[0] @ q[0, 0]
    assert found.ids.tolist() == np.flatnonzero(scores >= scores.max() - Dipr(1e-20).beta(SCALE)).tolist()
    assert 20 < len(found.ids) < 90
    assert index.codes.residual[0, far].max() < 4 * np.median(index.codes.residual)
