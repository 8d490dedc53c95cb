"""A share of the mass from an index that answers ranges: the range is widened until what it holds has the share.

Every KV head by itself, so that what comes out for one does not depend on which others are asked.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from indexes.base import Found, Queries
from indexes.retrieval import Dipr

Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
ALPHA_FACTOR = 0.02
"""Each attempt takes tokens of so much less weight."""
ALPHA_LEAST = 1e-12


def reach_mass(search: Callable[[Queries, Dipr], Found], queries: Queries, p: float) -> Found:
    """The fewest tokens that have, with what lies outside, the share p of the mass, as far as estimates of the rest are right."""
    alpha = max(1 - p, 0.01) / 2
    found = search(queries, Dipr(alpha))
    while alpha > ALPHA_LEAST and (short := heads_of(queries, _mass_missing(queries, found, p))).any():
        alpha = max(alpha * ALPHA_FACTOR, ALPHA_LEAST)
        found = joined(queries, found, search(replace(queries, asked=short), Dipr(alpha)), short)
    return _keep_mass(queries, found, p)


def heads_of(queries: Queries, rows: Mask) -> Mask:
    """bool `[kv_heads]`: the KV heads of which some row is set."""
    return np.asarray(rows.reshape(queries.kv_heads, -1).any(axis=1))


def joined(queries: Queries, found: Found, again: Found, heads: Mask) -> Found:
    """The rows of `again` for some KV heads, bool `[kv_heads]`, which it alone was asked for, those of `found` for the others."""
    each = queries.rows // queries.kv_heads
    rows = np.repeat(heads, each)
    counts = np.where(rows, np.diff(again.offsets), np.diff(found.offsets))
    parts = [again if head else found for head in heads]
    slices = [slice(part.offsets[i * each], part.offsets[(i + 1) * each]) for i, part in enumerate(parts)]
    chosen = rows.reshape(found.missed.shape)
    return Found(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.concatenate([part.ids[at] for part, at in zip(parts, slices, strict=True)]),
        np.concatenate([part.scores[at] for part, at in zip(parts, slices, strict=True)]),
        max(found.scanned, again.scanned),
        found.nbytes + again.nbytes,
        np.where(chosen, again.missed, found.missed),
        np.where(chosen, again.missed_bound, found.missed_bound),
        None,
        None if found.dense is None or again.dense is None else np.where(chosen, again.dense, found.dense),
    )


def _mass_missing(queries: Queries, found: Found, p: float) -> Mask:
    """The rows that were answered and have less than the share p, by the estimate of what was not found."""
    inside, total = _logs(queries, found)
    short = (np.logaddexp(inside, _flat(queries.outside)) < np.log(p) + total) & np.isfinite(_flat(found.missed))
    return np.asarray(short if found.dense is None else short & ~found.dense.reshape(-1))


def _keep_mass(queries: Queries, found: Found, p: float) -> Found:
    """The fewest of the tokens found that have, with what lies outside, the share p; all, if that is too few."""
    _, total = _logs(queries, found)
    outside = _flat(queries.outside)
    ids, scores, offsets = [found.ids[:0]], [found.scores[:0]], [0]
    dropped = np.full(queries.rows, -np.inf)
    for row in range(queries.rows):
        at = slice(found.offsets[row], found.offsets[row + 1])
        logits = queries.scale * found.scores[at].astype(np.float64)
        order = np.argsort(-logits, kind="stable")
        sums = np.logaddexp(np.logaddexp.accumulate(logits[order]), outside[row])
        enough = outside[row] >= np.log(p) + total[row]
        count = 0 if enough else min(int(np.searchsorted(sums, np.log(p) + total[row])) + 1, len(order))
        kept = np.sort(order[:count])
        dropped[row] = np.logaddexp.reduce(logits[order[count:]], initial=-np.inf)
        ids.append(found.ids[at][kept])
        scores.append(found.scores[at][kept])
        offsets.append(offsets[-1] + count)
    shape = found.missed.shape
    return replace(
        found,
        offsets=np.array(offsets, np.int64),
        ids=np.concatenate(ids),
        scores=np.concatenate(scores),
        missed=np.logaddexp(_flat(found.missed), dropped).reshape(shape).astype(np.float32),
        missed_bound=(np.logaddexp(_flat(found.missed_bound), dropped) + 1e-5).reshape(shape).astype(np.float32),
    )


def _flat(values: npt.NDArray[np.float32]) -> Float64:
    return values.astype(np.float64).reshape(-1)


def _logs(queries: Queries, found: Found) -> tuple[Float64, Float64]:
    """The logs of the mass found and of all of it, of each row."""
    inside = np.full(queries.rows, -np.inf)
    for row in range(queries.rows):
        logits = queries.scale * found.scores[found.offsets[row] : found.offsets[row + 1]].astype(np.float64)
        inside[row] = np.logaddexp.reduce(logits, initial=-np.inf)
    return inside, np.logaddexp(np.logaddexp(inside, _flat(found.missed)), _flat(queries.outside))
