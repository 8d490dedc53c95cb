"""Keys and queries without much structure, and what brute force finds in them."""

import numpy as np

import indexes._native as native
from indexes.base import Queries, SearchResult
from indexes.blocks import DTYPES, Blocks
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP

RETRIEVALS = [Exact(), Dipr(0.012), Dipr(1e-5), TopK(1), TopK(50), TopP(0.5), TopP(0.99)]


def some_blocks(
    n: int, head_dim: int = 64, kv_heads: int = 2, dtype: str = "float32", seed: int = 0, block_size: int = 64
) -> Blocks:
    """Keys with a constant offset, topics, and some much longer ones."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((kv_heads, n, head_dim)) + 3 * rng.standard_normal((kv_heads, 1, head_dim))
    k += rng.standard_normal((kv_heads, 7, head_dim))[:, np.arange(n) // 37 % 7]
    k[:, rng.random(n) < 0.01] *= 2.5
    return Blocks.of(k.astype(DTYPES[dtype]), block_size=block_size)


def some_queries(blocks: Blocks, n: int = 1, group: int = 2, length: float = 1.0, seed: int = 1, **changes: object) -> Queries:
    rng = np.random.default_rng(seed)
    shape = (blocks.kv_heads * group, n)
    fields = {
        "q": (length * rng.standard_normal((*shape, blocks.head_dim))).astype(np.float32),
        "begin": np.zeros(n, np.int64),
        "end": np.full(n, blocks.tokens, np.int64),
        "hidden": None,
        "floor": np.full(shape, -np.inf, np.float32),
        "outside": np.full(shape, -np.inf, np.float32),
    }
    return Queries(kv_heads=blocks.kv_heads, scale=blocks.head_dim**-0.5, **{**fields, **changes})


def every_score(blocks: Blocks, queries: Queries) -> tuple[np.ndarray, np.ndarray]:
    """The exact float32 q.k of each row with every token, and which of them it sees."""
    rows, n = queries.rows, blocks.tokens
    scores = np.empty(rows * n, np.float32)
    ids = np.tile(np.arange(n, dtype=np.int32), rows)
    native.score(blocks.native, queries.native, np.arange(rows + 1) * n, ids, scores)
    tokens = np.arange(n)
    seen = (tokens >= queries.begin[:, None]) & (tokens < queries.end[:, None])
    if queries.hidden is not None:
        seen &= ~np.unpackbits(queries.hidden.view(np.uint8), bitorder="little")[:n].astype(bool)
    return scores.reshape(rows, n), np.tile(seen, (queries.q.shape[0], 1))


def expected_ids(retrieval: Retrieval, scores: np.ndarray, seen: np.ndarray, floor: float, outside: float, scale: float):
    """Of one row, by the definition of the retrieval."""
    ids = np.flatnonzero(seen)
    scores = scores[ids]
    order = np.argsort(-scores, kind="stable")
    if isinstance(retrieval, Exact) or not len(ids):
        return ids
    if isinstance(retrieval, Dipr):
        largest = max(np.float32(floor), scores.max())
        return ids[scores >= largest - np.float32(retrieval.beta(scale))]
    if isinstance(retrieval, TopK):
        return np.sort(ids[order[: retrieval.k]])
    mass = np.exp(scale * scores[order].astype(float))
    total = mass.sum() + np.exp(outside)
    reached = np.exp(outside) + np.concatenate([[0], np.cumsum(mass)])
    return np.sort(ids[order[: np.searchsorted(reached, retrieval.p * total)]])


def check(found: SearchResult, blocks: Blocks, queries: Queries, retrieval: Retrieval) -> None:
    """Rows that were given up have nothing, all others what brute force finds; what was missed is bounded."""
    scores, seen = every_score(blocks, queries)
    assert found.offsets[0] == 0
    assert found.offsets[-1] == len(found.ids) == len(found.scores)
    for row in range(queries.rows):
        part = slice(found.offsets[row], found.offsets[row + 1])
        floor, outside = queries.floor.reshape(-1)[row], queries.outside.reshape(-1)[row]
        expected = expected_ids(retrieval, scores[row], seen[row], floor, outside, queries.scale)
        if found.dense is not None and found.dense.reshape(-1)[row]:
            expected = expected[:0]
        np.testing.assert_array_equal(found.ids[part], expected)
        np.testing.assert_array_equal(found.scores[part], scores[row][expected])
        missed = np.setdiff1d(np.flatnonzero(seen[row]), expected)
        with np.errstate(divide="ignore"):
            truth = np.log(np.exp(queries.scale * scores[row][missed].astype(float)).sum())
        assert found.missed_bound.reshape(-1)[row] >= truth
        assert found.missed.reshape(-1)[row] <= found.missed_bound.reshape(-1)[row]
        assert (truth == -np.inf) == (found.missed_bound.reshape(-1)[row] == -np.inf)
