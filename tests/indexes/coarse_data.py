"""Keys as coarse indexes meet them, and the truth about queries over them."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from indexes.base import Queries
from indexes.blocks import Blocks
from indexes.retrieval import Dipr, Exact, TopK, TopP

SPAN = 25
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass
class Layer:
    """kv_heads 2, group 2, head_dim 32. Keys lie around `topics` directions, SPAN tokens each; queries look for one each."""

    blocks: Blocks
    q: np.ndarray  # [4, n, 32]

    @classmethod
    def of(cls, tokens, dtype="float32", n=2, seed=0, topics=24, block_size=64):
        rng = np.random.default_rng(seed)
        centers = 3 * rng.standard_normal((topics, 32))
        topic = np.repeat(rng.integers(topics, size=(2, tokens // SPAN + 1)), SPAN, axis=1)[:, :tokens]
        k = centers[topic] + 0.5 * rng.standard_normal((2, tokens, 32)) + 4 * rng.standard_normal(32)
        v = centers[topic] + rng.standard_normal((2, tokens, 32))
        q = 0.6 * centers[rng.integers(topics, size=(4, n))] + 0.3 * rng.standard_normal((4, n, 32))
        made = DTYPES[dtype]
        return cls(Blocks.of(k.astype(made), v.astype(made), block_size), q.astype(np.float32))

    def cut(self, tokens):
        """The first tokens of the same memory."""
        b = self.blocks
        table = b.table[: -(-tokens // b.block_size)].copy()
        return Blocks(b.dtype, b.kv_heads, b.head_dim, b.block_size, table, tokens, b.owner)

    def queries(self, begin=0, end=None, hidden=None, floor=-np.inf, outside=-np.inf):
        heads, n = self.q.shape[:2]
        end = self.blocks.tokens if end is None else end
        return Queries(
            self.q,
            2,
            32**-0.5,
            np.broadcast_to(np.asarray(begin, np.int64), n).copy(),
            np.broadcast_to(np.asarray(end, np.int64), n).copy(),
            np.full((heads, n), floor, np.float32),
            np.full((heads, n), outside, np.float32),
            None if hidden is None else pack(hidden),
        )


def pack(hidden):
    """bool [tokens] as words."""
    bits = np.zeros(-(-len(hidden) // 64) * 64, bool)
    bits[: len(hidden)] = hidden
    return np.packbits(bits, bitorder="little").view(np.uint64)


def logits(blocks, queries):
    """float64 [rows, tokens], -inf where a query sees nothing."""
    heads, n = queries.q.shape[:2]
    out = np.full((heads * n, blocks.tokens), -np.inf)
    for row in range(heads * n):
        keys = blocks.keys(row // n // (heads // blocks.kv_heads)).astype(np.float64)
        i = row % n
        seen = np.zeros(blocks.tokens, bool)
        seen[queries.begin[i] : queries.end[i]] = True
        if queries.hidden is not None:
            seen &= ~np.unpackbits(queries.hidden.view(np.uint8), bitorder="little")[: blocks.tokens].astype(bool)
        out[row, seen] = (keys @ queries.q[row // n, i])[seen]
    return out


def wanted(x, retrieval, scale, floor=-np.inf, outside=-np.inf):
    """Token ids of one row of logits x."""
    order = np.argsort(-x, kind="stable")[: np.isfinite(x).sum()]
    match retrieval:
        case Exact():
            return np.sort(order)
        case Dipr():
            return np.flatnonzero(np.isfinite(x) & (x >= max(x.max(initial=-np.inf), floor) - retrieval.beta(scale)))
        case TopK():
            return np.sort(order[: retrieval.k])
        case TopP():
            if len(order) == 0:
                return order
            top = max(scale * x.max(initial=-np.inf), outside)
            weights, had = np.exp(scale * x[order] - top), np.exp(outside - top)
            before = had + np.concatenate([[0], np.cumsum(weights)[:-1]])
            return np.sort(order[before[: len(order)] < retrieval.p * (had + weights.sum())])


def rows(found):
    return [found.ids[a:b] for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


def log_sum(x, scale):
    """log of the sum of exp(scale * x), -inf for none."""
    x = x[np.isfinite(x)]
    return -np.inf if len(x) == 0 else scale * x.max() + np.log(np.exp(scale * (x - x.max())).sum())


def check_rows(blocks, queries, found):
    """What holds of every search: ids ascend and are visible, scores are exact, the bound on what was missed holds."""
    x = logits(blocks, queries)
    length = np.linalg.norm(queries.q, axis=-1).reshape(-1) * max(
        (np.linalg.norm(blocks.keys(h), axis=1).max(initial=0) for h in range(blocks.kv_heads)), default=0
    )
    assert found.offsets[0] == 0
    assert found.offsets[-1] == len(found.ids) == len(found.scores)
    for row, ids in enumerate(rows(found)):
        assert (np.diff(ids) > 0).all()
        assert np.isfinite(x[row, ids]).all()
        scores = found.scores[found.offsets[row] : found.offsets[row + 1]]
        np.testing.assert_allclose(scores, x[row, ids], atol=1e-6 * length[row], rtol=0)
        rest = x[row].copy()
        rest[ids] = -np.inf
        missed, bound = log_sum(rest, queries.scale), found.missed_bound.reshape(-1)[row]
        assert bound >= missed
        assert found.missed.reshape(-1)[row] <= bound
        if missed == -np.inf:
            assert bound == -np.inf
            assert found.missed.reshape(-1)[row] == -np.inf
    return x


def same_set(x, got, want, slack=1e-3):
    """Whether two sets of tokens are equal but for tokens whose scores lie within rounding of the border."""
    odd = np.setxor1d(got, want)
    return len(odd) == 0 or (len(want) > 0 and np.abs(x[odd] - x[want].min()).max() <= slack)
