"""TopP over a scan of codes: the fewest tokens that have a share of the softmax mass, proven by bounds and not estimated."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from indexes.base import Queries, SearchResult
from indexes.top_p import heads_of, joined

ALPHA_FIRST, ALPHA_LEAST = 1e-2, 1e-12
"""The first range that is searched, as a share of the largest weight, and the last one before all tokens are read."""
ALPHA_FACTOR = 1e-2
"""Each further range multiplies the least weight by this factor."""

SearchRange = Callable[[Queries, float], SearchResult]
"""Searches queries for the tokens within beta, in units of q.k, of the largest; an infinite beta finds all."""


def search_top_p(search: SearchRange, queries: Queries, p: float) -> SearchResult:
    """Widen the range until the mass found, and the bound on what was missed, agree on how many tokens are needed."""
    alpha = ALPHA_FIRST
    result, unsure = None, np.empty(0, np.bool_)
    while True:
        beta = math.inf if p == 1 or alpha < ALPHA_LEAST else -math.log(alpha) / queries.scale
        again = search(queries if result is None else replace(queries, active_heads=unsure), beta)
        result = again if result is None else joined(queries, result, again, unsure)
        counts = _tokens_for_share(queries, result, p)
        unsure = heads_of(queries, np.array([count is None for count in counts]))
        if not unsure.any():
            return _first_tokens(queries, result, [count or 0 for count in counts])
        alpha *= ALPHA_FACTOR


def _tokens_for_share(queries: Queries, result: SearchResult, p: float) -> list[int | None]:
    """How many of each row's best tokens leave at most 1 - p of all mass; None where that cannot be told yet."""
    counts: list[int | None] = []
    outside, bounds = queries.outside.reshape(-1).astype(float), result.missed_bound.reshape(-1).astype(float)
    for row in range(queries.rows):
        if result.dense is not None and result.dense.reshape(-1)[row]:
            counts.append(0)
            continue
        scores = queries.scale * result.scores[result.offsets[row] : result.offsets[row + 1]].astype(float)
        top = max(scores.max(initial=-math.inf), outside[row], bounds[row])
        if top == -math.inf:
            counts.append(0)
            continue
        seen = math.exp(outside[row] - top) + np.concatenate([[0.0], np.cumsum(np.exp(-np.sort(-scores) - top))])
        least, most = seen[-1], seen[-1] + math.exp(bounds[row] - top)
        # A share that rounding could miss counts as reached only by all.
        needed = [len(scores) if p == 1 else int(np.searchsorted(seen, p * total)) for total in (least, most)]
        counts.append(needed[1] if needed[0] == needed[1] <= len(scores) else None)
    return counts


def _first_tokens(queries: Queries, result: SearchResult, counts: list[int]) -> SearchResult:
    """The result with only the best `counts[row]` tokens of each row; the others count as missed."""
    keep = np.zeros(len(result.ids), bool)
    missed, bound = result.missed.reshape(-1).copy(), result.missed_bound.reshape(-1).copy()
    for row, count in enumerate(counts):
        tokens = slice(int(result.offsets[row]), int(result.offsets[row + 1]))
        order = np.argsort(-result.scores[tokens], kind="stable")
        keep[tokens.start + order[:count]] = True
        lost = queries.scale * result.scores[tokens][order[count:]].astype(float)
        if len(lost):
            log_lost = lost.max() + math.log(np.exp(lost - lost.max()).sum())
            missed[row] = np.logaddexp(missed[row], log_lost)
            bound[row] = np.nextafter(np.float32(np.logaddexp(bound[row], log_lost)), np.float32(np.inf))
    shape = queries.q.shape[:2]
    return replace(
        result,
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        ids=result.ids[keep],
        scores=result.scores[keep],
        missed=missed.reshape(shape),
        missed_bound=bound.reshape(shape),
    )
