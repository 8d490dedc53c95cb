"""The measuring tool itself: right on an index that finds everything, and it sees what a bad one misses."""

from dataclasses import replace

import numpy as np
import pytest

from indexes.base import Queries
from indexes.blocks import DTYPES, Blocks
from indexes.oracle import Oracle, dipr_set, merged, top_k_set, top_p_set
from indexes.recall import measure
from indexes.retrieval import Dipr, Exact, TopK, TopP
from tests.reference import attention, relative_error
from tests.scan import Scan

RETRIEVALS = [Exact(), Dipr(0.05), TopK(20), TopP(0.7)]
KV_HEADS, GROUP, DIM, TOKENS, STEPS = 2, 3, 16, 700, 4
SCALE = DIM**-0.5


def make(dtype="float32", seed=0, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, KV_HEADS, tokens, DIM)).astype(DTYPES[dtype])
    q = 2 * rng.standard_normal((KV_HEADS * GROUP, STEPS, DIM), np.float32)
    return k, v, Blocks.of(k, v), q


def hidden_bits(tokens, which):
    bits = np.zeros(-(-tokens // 64) * 64, np.uint8)
    bits[which] = 1
    return np.packbits(bits, bitorder="little").view(np.uint64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("retrieval", RETRIEVALS, ids=str)
@pytest.mark.parametrize("window", [(0, 0), (8, 32)])
def test_an_index_that_finds_everything_has_recall_one_and_a_bound_that_holds(dtype, retrieval, window):
    *_, blocks, q = make(dtype)
    report = measure(Scan(blocks, loose=0), Queries.of(q, KV_HEADS, SCALE, TOKENS), retrieval, window=window, repetitions=1)
    assert (report.recall, report.recall_min, report.bound_valid) == (1, 1, 1)
    assert report.found == pytest.approx(report.relevant)
    assert report.bound_ratio == pytest.approx(1, abs=1e-4)
    assert report.missed == pytest.approx(report.missed_estimate, abs=1e-6)
    assert report.mass + report.missed == pytest.approx(1)
    assert report.scanned == TOKENS - sum(window)
    assert str(retrieval) in str(report)
    assert report.to_dict()["recall"] == 1


def test_everything_found_is_the_exact_output():
    k, v, blocks, q = make()
    queries = Queries.of(q, KV_HEADS, SCALE, TOKENS)
    report = measure(Scan(blocks, loose=0), queries, Exact(), repetitions=1)
    assert report.error < 1e-5
    assert report.mass == 1
    assert report.missed == 0
    expected, _ = attention(q, k, v, SCALE)
    assert relative_error(Oracle(blocks, queries).out.reshape(expected.shape), expected) < 1e-5


@pytest.mark.parametrize("retrieval", [Exact(), Dipr(0.05), TopK(20)], ids=str)
def test_an_index_that_drops_half_of_the_tokens_shows_it(retrieval):
    *_, blocks, q = make()
    report = measure(Scan(blocks, keep=0.5, loose=0), Queries.of(q, KV_HEADS, SCALE, TOKENS), retrieval, repetitions=1)
    assert report.recall == pytest.approx(0.5, abs=0.06)
    assert 0.01 < report.missed < 0.9
    assert report.error > 0.02


def test_the_one_wanted_token_that_was_not_found_is_seen():
    *_, blocks, q = make()
    queries = Queries.of(20 * q, KV_HEADS, SCALE, TOKENS)
    report = measure(Scan(blocks, keep=0, loose=0), queries, Dipr(0.9), repetitions=1)
    assert report.relevant < 1.5
    assert report.recall == 0


def test_a_bound_below_the_truth_is_seen():
    *_, blocks, q = make()
    queries = Queries.of(q, KV_HEADS, SCALE, TOKENS)
    oracle = Oracle(blocks, queries)
    found = Scan(blocks, loose=0).search(queries, TopK(5))
    low = found.missed_bound.copy()
    low[1, 2] -= 0.01
    holds = oracle.judge(replace(found, missed_bound=low), TopK(5)).bound_holds
    assert np.flatnonzero(~holds).tolist() == [1 * STEPS + 2]


def test_the_tail_of_a_perfect_estimate_leaves_no_error():
    *_, blocks, q = make()
    oracle = Oracle(blocks, Queries.of(q, KV_HEADS, SCALE, TOKENS), (8, 32))
    found = Scan(blocks, loose=0).search(oracle.queries, TopK(5), estimate_tail=True)
    judged = oracle.judge(found, TopK(5))
    assert oracle.error_of_all(judged.out) > 0.01
    assert oracle.error_of_all(merged(judged, found.tail)) < 1e-5


def test_the_output_is_attention_over_window_and_found_tokens_alone():
    k, v, blocks, q = make()
    oracle = Oracle(blocks, Queries.of(q, KV_HEADS, SCALE, TOKENS), (8, 32))
    found = Scan(blocks, loose=0).search(oracle.queries, TopK(5))
    judged = oracle.judge(found, TopK(5))
    ids = found.ids[found.offsets[5] : found.offsets[6]]
    seen = np.concatenate([np.arange(8), ids, np.arange(TOKENS - 32, TOKENS)])
    head, step = divmod(5, STEPS)
    expected, lse = attention(q[head : head + 1, step : step + 1], k[:1, seen], v[:1, seen], SCALE)
    assert relative_error(judged.out[5], expected[0, 0]) < 1e-5
    assert judged.kept[5] == pytest.approx(lse[0, 0], rel=1e-6)


def test_what_a_query_does_not_see_counts_nowhere():
    k, v, blocks, q = make()
    hidden = np.arange(100, 300)
    begin, end = np.array([0, 10, 500, 650]), np.array([700, 650, 500, 651])
    queries = replace(Queries.of(q, KV_HEADS, SCALE, TOKENS, hidden_bits(TOKENS, hidden)), begin=begin, end=end)
    oracle = Oracle(blocks, queries)
    assert oracle.visible.tolist() == [500, 440, 0, 1] * (KV_HEADS * GROUP)
    kept = np.setdiff1d(np.arange(10, 650), hidden)
    expected, _ = attention(q[:, 1:2], k[:, kept], v[:, kept], SCALE)
    out = oracle.out.reshape(q.shape)
    assert relative_error(out[:, 1:2], expected) < 1e-5
    assert not out[:, 2].any()
    report = measure(Scan(blocks, loose=0), queries, Dipr(0.05), oracle=oracle, repetitions=1)
    assert report.recall == report.bound_valid == 1


def test_a_floor_from_outside_raises_the_threshold():
    *_, blocks, q = make()
    queries = Queries.of(q, KV_HEADS, SCALE, TOKENS)
    high = replace(queries, floor=np.full(q.shape[:2], 1e4, np.float32))
    assert not any(map(len, Oracle(blocks, high).relevant_tokens(Dipr(0.05))))
    assert all(map(len, Oracle(blocks, queries).relevant_tokens(Dipr(0.05))))


def test_the_sets_by_hand():
    logits = np.array([3, -np.inf, 1, 3, 2], np.float32)
    assert dipr_set(logits, 1.0).tolist() == [True, False, False, True, True]
    assert dipr_set(logits, 1.0, floor=4).tolist() == [True, False, False, True, False]
    assert top_k_set(logits, 3).tolist() == [True, False, False, True, True]
    assert top_k_set(logits, 9).tolist() == [True, False, True, True, True]
    assert top_p_set(logits, 1.0, 1.0).tolist() == [True, False, True, True, True]
    half = np.exp([3.0, 3.0]).sum() / np.exp([3.0, 1, 3, 2]).sum()
    assert top_p_set(logits, half - 1e-6, 1.0).tolist() == [True, False, False, True, False]
    assert top_p_set(logits, half + 1e-6, 1.0).tolist() == [True, False, False, True, True]
    assert not top_p_set(logits, 0.5, 1.0, outside=10.0).any()


@pytest.mark.parametrize("retrieval", RETRIEVALS, ids=str)
def test_nothing_to_see_is_nothing_missed(retrieval):
    *_, blocks, q = make(tokens=64)
    report = measure(Scan(blocks, loose=0), Queries.of(q, KV_HEADS, SCALE, 0), retrieval, repetitions=1)
    assert (report.recall, report.relevant, report.found, report.missed, report.error) == (1, 0, 0, 0, 0)


@pytest.mark.parametrize("retrieval", RETRIEVALS, ids=str)
def test_keys_that_are_all_equal(retrieval):
    keys = np.ones((KV_HEADS, 100, DIM), np.float32)
    q = make()[3]
    report = measure(Scan(Blocks.of(keys, keys), loose=0), Queries.of(q, KV_HEADS, SCALE, 100), retrieval, repetitions=1)
    assert report.recall == 1
    assert report.error < 1e-5
