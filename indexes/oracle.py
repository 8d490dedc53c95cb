"""The exact answer to a query: the products with all keys, in float32, read from the blocks themselves.

Sums of exponentials are float64. `indexes/recall.py` measures indexes with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np
import numpy.typing as npt

from indexes.base import Float32, Int64, Queries, SearchResult
from indexes.blocks import Blocks
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP

Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

STEP = 16_384
"""The number of keys or values that are read at once."""
ROUNDING = 2.0**-20
"""How far two float32 products of the same vectors, summed in different orders, may differ, as a share of |q||k|."""


@dataclass(frozen=True)
class Judged:
    """The judgement of one search. out: `[rows, value_dim]`, the attention over found tokens and window; all others are `[rows]`.

    kept (found tokens and window), missed, missed_estimate and missed_bound are logs of sums of exp(scale * q.k).
    """

    recall: Float64
    mass: Float64
    out: Float64
    kept: Float64
    missed: Float64
    missed_estimate: Float64
    missed_bound: Float64
    bound_holds: Mask


def dipr_set(logits: Float32, beta: float, floor: float = -np.inf) -> Mask:
    """The tokens within `beta` of the largest logit and of `floor`, bool `[tokens]`. logits: q.k `[tokens]`, -inf where
    unseen."""
    seen = logits > -np.inf
    return seen & (logits >= max(float(logits.max(initial=-np.inf)), floor) - beta)


def top_k_set(logits: Float32, k: int) -> Mask:
    """The k tokens with the largest logits, bool `[tokens]`; among equal ones, those that come first."""
    chosen = np.zeros(len(logits), np.bool_)
    chosen[np.argsort(-logits, kind="stable")[:k]] = True
    return chosen & (logits > -np.inf)


def top_p_set(logits: Float32, p: float, scale: float, outside: float = -np.inf) -> Mask:
    """The fewest tokens that, together with the mass `outside`, have the share p of the softmax mass; bool `[tokens]`.

    outside: the log of the sum of exp(scale * q.k) over tokens elsewhere.
    """
    order = np.argsort(-logits, kind="stable")
    top = max(float(scale * logits.max(initial=-np.inf)), outside)
    if top == -np.inf:
        return np.zeros(len(logits), np.bool_)
    weights = np.exp(scale * logits[order].astype(np.float64) - top)
    had = np.exp(outside - top)
    before = had + np.concatenate([[0.0], np.cumsum(weights)[:-1]]) if len(order) else np.empty(0)
    chosen = np.zeros(len(logits), np.bool_)
    chosen[order[before < p * (had + weights.sum())]] = True
    return chosen & (logits > -np.inf)


def relevant_set(logits: Float32, retrieval: Retrieval, scale: float, floor: float, outside: float) -> Mask:
    """The tokens that `retrieval` asks for, bool `[tokens]`. logits: q.k `[tokens]`, -inf for unseen tokens."""
    match retrieval:
        case Exact():
            return logits > -np.inf
        case Dipr():
            return dipr_set(logits, retrieval.beta(scale), floor)
        case TopK():
            return top_k_set(logits, retrieval.k)
        case TopP():
            return top_p_set(logits, retrieval.p, scale, outside)
        case _:
            assert_never(retrieval)


class Oracle:
    """The exact answers to queries over blocks. It holds every product: 4 * q_heads * n * tokens bytes.

    window: the number of first and of last visible tokens of each query that are attended exactly, whatever an index finds. The
    attribute `queries` holds the queries for an index: they see the tokens outside of the window, and `floor` and `outside` hold
    the window's maximum and mass.
    """

    def __init__(self, blocks: Blocks, queries: Queries, window: tuple[int, int] = (0, 0)) -> None:
        self.blocks = blocks
        self.scale = queries.scale
        self._heads, self._n = queries.q.shape[:2]
        self.logits = _products(blocks, queries.q)
        self._hide(queries)
        self._outside = queries.outside.reshape(-1).astype(np.float64)
        begin = np.minimum(queries.begin + window[0], queries.end)
        end = np.maximum(queries.end - window[1], begin)
        self._begin, self._end = np.tile(begin, self._heads), np.tile(end, self._heads)
        windowed = [np.concatenate([row[:b], row[e:]]) for row, b, e in self._rows()]
        largest = np.array([row.max(initial=-np.inf) for row in windowed], np.float32).reshape(queries.floor.shape)
        self._window = np.array([_log_sum_exp(self.scale * row) for row in windowed])
        self._total = np.array([_log_sum_exp(self.scale * row) for row in self.logits])
        outside = np.logaddexp(self._window, self._outside).astype(np.float32).reshape(largest.shape)
        self.queries = replace(queries, begin=begin, end=end, floor=np.maximum(queries.floor, largest), outside=outside)
        self.visible = np.array([np.count_nonzero(row > -np.inf) for row in self.logits])
        self._border = _border(blocks, queries.q)
        self.out = self._attention(None)
        self._relevant: dict[Retrieval, list[Int64]] = {}

    def relevant_tokens(self, retrieval: Retrieval) -> list[Int64]:
        """The token ids that an index should find for each row of `queries`, ascending."""
        if retrieval not in self._relevant:
            floor, outside = self.queries.floor.reshape(-1), self.queries.outside.reshape(-1)
            self._relevant[retrieval] = [
                b + np.flatnonzero(relevant_set(row[b:e], retrieval, self.scale, float(floor[i]), float(outside[i])))
                for i, (row, b, e) in enumerate(self._rows())
            ]
        return self._relevant[retrieval]

    def judge(self, result: SearchResult, retrieval: Retrieval) -> Judged:
        """Judge how well a result answers `queries`."""
        rows, relevant = _rows_of(result), self.relevant_tokens(retrieval)
        recall = np.array([self._recall(i, ids, relevant[i], retrieval) for i, ids in enumerate(rows)])
        found_mass = np.array([_log_sum_exp(self.scale * self.logits[i, ids]) for i, ids in enumerate(rows)])
        kept = np.logaddexp(found_mass, self._window)
        missed, holds = self.certify(result)
        bound, estimate = (x.reshape(-1).astype(np.float64) for x in (result.missed_bound, result.missed))
        return Judged(recall, 1 - self.share(missed), self._attention(rows), kept, missed, estimate, bound, holds)

    def certify(self, result: SearchResult) -> tuple[Float64, Mask]:
        """The log of the mass that was missed, and whether `missed_bound` is not below it, `[rows]` each."""
        missed = np.array([self._missed(i, ids) for i, ids in enumerate(_rows_of(result))])
        slack = self.scale * self._border + 1e-6  # the rounding of the oracle's own products in float32
        return missed, np.isneginf(missed) | (result.missed_bound.reshape(-1) >= missed - slack)

    def error(self, out: npt.ArrayLike) -> Float64:
        """The norm of the difference between `out` and exact attention, relative to the norm of exact attention, `[rows]`."""
        difference = np.asarray(out, np.float64).reshape(self.out.shape) - self.out
        exact: Float64 = np.linalg.norm(self.out, axis=1)
        return np.asarray(np.linalg.norm(difference, axis=1) / np.maximum(exact, 1e-30))

    def error_of_all(self, out: npt.ArrayLike) -> float:
        """`error` in one norm over all rows."""
        difference = np.asarray(out, np.float64).reshape(self.out.shape) - self.out
        return float(np.linalg.norm(difference)) / max(float(np.linalg.norm(self.out)), 1e-30)

    def share(self, logs: Float64) -> Float64:
        """The share of all mass, `[rows]`, whose log of a sum of exp(scale * q.k) is `logs`."""
        everything = np.logaddexp(self._total, self._outside)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.where(np.isneginf(logs), 0.0, np.exp(logs - everything))

    def _rows(self) -> Iterator[tuple[Float32, int, int]]:
        yield from zip(self.logits, self._begin.tolist(), self._end.tolist(), strict=True)

    def _hide(self, queries: Queries) -> None:
        """Set products with tokens that a query does not see to -inf."""
        for i, row in enumerate(self.logits):
            row[: queries.begin[i % self._n]] = -np.inf
            row[queries.end[i % self._n] :] = -np.inf
        if queries.hidden is not None:
            bits = np.unpackbits(queries.hidden.view(np.uint8), bitorder="little")[: self.blocks.tokens]
            self.logits[:, bits.astype(np.bool_)] = -np.inf

    def _recall(self, i: int, ids: Int64, relevant: Int64, retrieval: Retrieval) -> float:
        """The share of the relevant tokens that was found.

        Rounding decides on tokens very close to the threshold. They count only where k is given, or where there are no other
        relevant tokens; then any of them will do.
        """
        if not len(relevant) or isinstance(retrieval, Exact):
            return len(ids) / len(relevant) if len(relevant) else 1.0
        row, threshold = self.logits[i], self._threshold(i, relevant, retrieval)
        sure = relevant[row[relevant] > threshold + self._border[i]]
        hits = int(np.isin(sure, ids, assume_unique=True).sum())
        if len(sure) and not isinstance(retrieval, TopK):
            return hits / len(sure)
        close = int((np.abs(row[ids] - threshold) <= self._border[i]).sum())
        return (hits + min(close, len(relevant) - len(sure))) / len(relevant)

    def _threshold(self, i: int, relevant: Int64, retrieval: Retrieval) -> float:
        """The least q.k of the relevant tokens."""
        row = self.logits[i]
        if isinstance(retrieval, Dipr):
            return max(float(row[relevant].max()), float(self.queries.floor.flat[i])) - retrieval.beta(self.scale)
        return float(row[relevant].min())

    def _missed(self, i: int, ids: Int64) -> float:
        """The log of the mass of the tokens that row i of `queries` sees and that were not found."""
        begin, end = self._begin[i], self._end[i]
        rest = self.logits[i, begin:end].copy()
        rest[ids - begin] = -np.inf
        return _log_sum_exp(self.scale * rest)

    def _attention(self, found: Sequence[Int64] | None) -> Float64:
        """The attention over each row's found tokens and the window, or over everything for None."""
        value_dim, per_head = self.blocks.value_dim, self._heads * self._n // self.blocks.kv_heads
        out = np.zeros((self._heads * self._n, value_dim))
        for head in range(self.blocks.kv_heads):
            mine = range(head * per_head, (head + 1) * per_head)
            weights = np.stack([self._weights(i, None if found is None else found[i]) for i in mine])
            for begin in range(0, self.blocks.tokens, STEP):
                part = weights[:, begin : begin + STEP]
                if part.any():
                    out[mine.start : mine.stop] += part @ self.blocks.values(head, begin, begin + part.shape[1])
        return out

    def _weights(self, i: int, ids: Int64 | None) -> Float32:
        logits = self.logits[i]
        if ids is not None:
            logits = logits.copy()
            logits[self._begin[i] : self._end[i]] = -np.inf
            logits[ids] = self.logits[i, ids]
        total = _log_sum_exp(self.scale * logits)
        return np.zeros_like(logits) if total == -np.inf else np.exp(np.float32(self.scale) * logits - np.float32(total))


def merged(judged: Judged, tail: Float32) -> Float64:
    """The output with `tail` merged in, an estimate of the output over the tokens not found, by the estimate of their mass."""
    with np.errstate(over="ignore", invalid="ignore"):
        share = 1 / (1 + np.exp(judged.kept - judged.missed_estimate))
    share = np.where(np.isneginf(judged.missed_estimate), 0.0, share)[:, None]
    out: Float64 = (1 - share) * judged.out + share * tail.reshape(judged.out.shape)
    return out


def _products(blocks: Blocks, q: Float32) -> Float32:
    """Every product q.k, `[q_heads * n, tokens]`."""
    heads, n, head_dim = q.shape
    grouped = q.reshape(blocks.kv_heads, -1, head_dim)
    out = np.empty((blocks.kv_heads, grouped.shape[1], blocks.tokens), np.float32)
    for head in range(blocks.kv_heads):
        for begin in range(0, blocks.tokens, STEP):
            end = min(begin + STEP, blocks.tokens)
            out[head, :, begin:end] = grouped[head] @ blocks.keys(head, begin, end).T
    return out.reshape(heads * n, blocks.tokens)


def _border(blocks: Blocks, q: Float32) -> Float64:
    """ROUNDING in units of q.k, `[q_heads * n]`, from the lengths of the query and the longest key."""
    lengths = np.linalg.norm(q.astype(np.float64), axis=2).reshape(blocks.kv_heads, -1)
    for head in range(blocks.kv_heads):
        longest = 0.0
        for begin in range(0, blocks.tokens, STEP):
            keys = blocks.keys(head, begin, min(begin + STEP, blocks.tokens))
            longest = max(longest, float(np.linalg.norm(keys, axis=1).max()))
        lengths[head] *= ROUNDING * longest
    return np.asarray(lengths.reshape(-1))


def _rows_of(result: SearchResult) -> list[Int64]:
    return [result.ids[a:b].astype(np.int64) for a, b in zip(result.offsets, result.offsets[1:], strict=False)]


def _log_sum_exp(logits: npt.NDArray[np.floating]) -> float:
    top = float(logits.max(initial=-np.inf))
    if top == -np.inf:
        return top
    return top + float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))
