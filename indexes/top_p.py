"""TopP for an index that answers ranges: the range is widened until its tokens have the share p of the mass.

Every KV head is widened by itself, so that its result does not depend on which other heads are active.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from indexes.base import Queries, SearchResult
from indexes.retrieval import Dipr

Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
ALPHA_FACTOR = 0.02
"""Each further range multiplies the least weight by this factor."""
ALPHA_LEAST = 1e-12
"""The alpha of the widest range; tokens outside of it are left out."""


def top_p_by_ranges(search: Callable[[Queries, Dipr], SearchResult], queries: Queries, p: float) -> SearchResult:
    """The fewest tokens that, together with the mass outside, have the share p of the mass, if the estimates of the rest are
    right."""
    alpha = max(1 - p, 0.01) / 2
    result = search(queries, Dipr(alpha))
    while alpha > ALPHA_LEAST and (short := heads_of(queries, _mass_missing(queries, result, p))).any():
        alpha = max(alpha * ALPHA_FACTOR, ALPHA_LEAST)
        result = joined(queries, result, search(replace(queries, active_heads=short), Dipr(alpha)), short)
    return _keep_mass(queries, result, p)


def heads_of(queries: Queries, rows: Mask) -> Mask:
    """The KV heads that have at least one row set, bool `[kv_heads]`. rows: bool `[rows]`."""
    return np.asarray(rows.reshape(queries.kv_heads, -1).any(axis=1))


def joined(queries: Queries, result: SearchResult, again: SearchResult, heads: Mask) -> SearchResult:
    """Two results merged: the rows of `again` for some KV heads, and the rows of `result` for the others.

    heads: bool `[kv_heads]`, the heads that were searched again; `again` has results for these alone.
    """
    each = queries.rows // queries.kv_heads
    rows = np.repeat(heads, each)
    counts = np.where(rows, np.diff(again.offsets), np.diff(result.offsets))
    parts = [again if head else result for head in heads]
    slices = [slice(part.offsets[i * each], part.offsets[(i + 1) * each]) for i, part in enumerate(parts)]
    chosen = rows.reshape(result.missed.shape)
    return SearchResult(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.concatenate([part.ids[at] for part, at in zip(parts, slices, strict=True)]),
        np.concatenate([part.scores[at] for part, at in zip(parts, slices, strict=True)]),
        max(result.scanned, again.scanned),
        result.nbytes + again.nbytes,
        np.where(chosen, again.missed, result.missed),
        np.where(chosen, again.missed_bound, result.missed_bound),
        None,
        None if result.dense is None or again.dense is None else np.where(chosen, again.dense, result.dense),
    )


def _mass_missing(queries: Queries, result: SearchResult, p: float) -> Mask:
    """The answered rows whose tokens have less than the share p, judged by the estimate of what was missed; bool `[rows]`."""
    inside, total = _logs(queries, result)
    short = (np.logaddexp(inside, _flat(queries.outside)) < np.log(p) + total) & np.isfinite(_flat(result.missed))
    return np.asarray(short if result.dense is None else short & ~result.dense.reshape(-1))


def _keep_mass(queries: Queries, result: SearchResult, p: float) -> SearchResult:
    """The result with the fewest tokens that, together with the mass outside, have the share p; with all tokens, if they have
    less."""
    _, total = _logs(queries, result)
    outside = _flat(queries.outside)
    ids, scores, offsets = [result.ids[:0]], [result.scores[:0]], [0]
    dropped = np.full(queries.rows, -np.inf)
    for row in range(queries.rows):
        at = slice(result.offsets[row], result.offsets[row + 1])
        logits = queries.scale * result.scores[at].astype(np.float64)
        order = np.argsort(-logits, kind="stable")
        sums = np.logaddexp(np.logaddexp.accumulate(logits[order]), outside[row])
        enough = outside[row] >= np.log(p) + total[row]
        count = 0 if enough else min(int(np.searchsorted(sums, np.log(p) + total[row])) + 1, len(order))
        kept = np.sort(order[:count])
        dropped[row] = np.logaddexp.reduce(logits[order[count:]], initial=-np.inf)
        ids.append(result.ids[at][kept])
        scores.append(result.scores[at][kept])
        offsets.append(offsets[-1] + count)
    shape = result.missed.shape
    return replace(
        result,
        offsets=np.array(offsets, np.int64),
        ids=np.concatenate(ids),
        scores=np.concatenate(scores),
        missed=np.logaddexp(_flat(result.missed), dropped).reshape(shape).astype(np.float32),
        missed_bound=(np.logaddexp(_flat(result.missed_bound), dropped) + 1e-5).reshape(shape).astype(np.float32),
    )


def _flat(values: npt.NDArray[np.float32]) -> Float64:
    return values.astype(np.float64).reshape(-1)


def _logs(queries: Queries, result: SearchResult) -> tuple[Float64, Float64]:
    """The log of the mass in the result, and the log of all mass; `[rows]` each."""
    inside = np.full(queries.rows, -np.inf)
    for row in range(queries.rows):
        logits = queries.scale * result.scores[result.offsets[row] : result.offsets[row + 1]].astype(np.float64)
        inside[row] = np.logaddexp.reduce(logits, initial=-np.inf)
    return inside, np.logaddexp(np.logaddexp(inside, _flat(result.missed)), _flat(queries.outside))
