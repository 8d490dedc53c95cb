"""Small layers as real heads show them, and what brute force finds in them."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from benchmarks.workloads import Shape, generate
from indexes.base import Queries
from indexes.blocks import DTYPES, Blocks
from indexes.hnsw import Hnsw
from indexes.retrieval import Dipr, Exact, TopK, TopP

TOKENS = 6000
SCALE = 64**-0.5


@lru_cache(maxsize=8)
def layer(kind="sharp", dtype="bfloat16", tokens=TOKENS):
    work = workload(kind, tokens)
    return Blocks.of(work.k.astype(DTYPES[dtype]), work.v.astype(DTYPES[dtype])), work.queries, work.query_samples


@lru_cache(maxsize=4)
def workload(kind, tokens):
    return generate(kind, Shape(tokens, kv_heads=2, group=2, head_dim=64, dtype=DTYPES["float32"]), queries=6, query_samples=48)


@lru_cache(maxsize=8)
def index(kind="sharp", dtype="bfloat16"):
    blocks, _, query_samples = layer(kind, dtype)
    return Hnsw.build(blocks, query_samples)


def ask(q, tokens=TOKENS, window=True, hidden=None):
    """Queries with a window of 16 and 64 tokens outside, if at all."""
    queries = Queries.of(q, 2, SCALE, tokens, hidden)
    if not window:
        return queries
    n = q.shape[1]
    return replace(queries, begin=np.full(n, 16, np.int64), end=np.full(n, tokens - 64, np.int64))


def pack(hidden):
    bits = np.zeros(-(-len(hidden) // 64) * 64, np.uint8)
    bits[: len(hidden)] = hidden
    return np.packbits(bits, bitorder="little").view(np.uint64)


def every_score(blocks, queries):
    """float64 `[rows, tokens]`: q.k, -inf where a query does not see."""
    heads, n = queries.q.shape[:2]
    group = heads // blocks.kv_heads
    out = np.empty((heads, n, blocks.tokens))
    for head in range(heads):
        out[head] = queries.q[head].astype(np.float64) @ blocks.keys(head // group).astype(np.float64).T
    token = np.arange(blocks.tokens)
    seen = (token >= queries.begin[:, None]) & (token < queries.end[:, None])
    if queries.hidden is not None:
        seen &= np.unpackbits(queries.hidden.view(np.uint8), bitorder="little", count=blocks.tokens) == 0
    out[:, ~seen] = -np.inf
    return out.reshape(heads * n, -1)


def wanted(scores, queries, retrieval):
    """Of each row the tokens that the retrieval asks for."""
    floor, outside = queries.floor.reshape(-1), queries.outside.reshape(-1)
    for row, values in enumerate(scores):
        order = np.argsort(-values, kind="stable")[: np.isfinite(values).sum()]
        if isinstance(retrieval, Exact) or not len(order):
            yield set(order.tolist())
        elif isinstance(retrieval, Dipr):
            least = max(values.max(initial=-np.inf), floor[row]) - retrieval.beta(queries.scale)
            yield set(np.flatnonzero((values >= least) & np.isfinite(values)).tolist())
        elif isinstance(retrieval, TopK):
            yield set(order[: retrieval.k].tolist())
        elif isinstance(retrieval, TopP):
            sums = np.logaddexp(np.logaddexp.accumulate(queries.scale * values[order]), outside[row])
            yield set(order[: int(np.searchsorted(sums, sums[-1] + np.log(retrieval.p))) + 1].tolist())


def found_of(found, row):
    at = slice(found.offsets[row], found.offsets[row + 1])
    return found.ids[at], found.scores[at]


def recall(found, sets):
    sets = list(sets)
    hits = sum(len(want & set(found_of(found, row)[0].tolist())) for row, want in enumerate(sets))
    return hits / max(1, sum(map(len, sets)))


def check_form(found, scores):
    """Ids ascend, are seen, and have the scores of brute force."""
    assert len(found.offsets) == len(scores) + 1
    for row, values in enumerate(scores):
        ids, has = found_of(found, row)
        assert (np.diff(ids) > 0).all()
        assert np.isfinite(values[ids]).all()
        np.testing.assert_allclose(has, values[ids], rtol=1e-4, atol=1e-3)
