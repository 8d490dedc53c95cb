"""What several searches found, brought together: of each row only what counts once all parts are known."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from indexes.base import Float32, Found
from indexes.retrieval import Dipr, Retrieval, TopK


def cut_of(founds: Sequence[Found], floor: Float32, scale: float, retrieval: Retrieval) -> Float32:
    """The smallest score that counts now that every part is known, float32 `[q_heads, n]`. floor: the largest of all."""
    if isinstance(retrieval, Dipr):
        return np.asarray(floor - np.float32(retrieval.beta(scale)), np.float32)
    if isinstance(retrieval, TopK):
        return _kth(founds, retrieval.k).reshape(floor.shape)
    return np.full(floor.shape, -np.inf, np.float32)


def trimmed(found: Found, cut: Float32, scale: float) -> Found:
    """What reaches the cut of its row, float32 `[rows]`; the mass of the rest counts as missed."""
    counts = np.diff(found.offsets)
    keep = found.scores >= np.repeat(cut, counts)
    if keep.all():
        return found
    rows = np.repeat(np.arange(len(counts)), counts)
    lost, limit = rows[~keep], scale * cut.astype(np.float64)
    mass = np.bincount(lost, np.exp(scale * found.scores[~keep] - limit[lost]), len(counts))
    with np.errstate(divide="ignore"):
        log_mass = (np.log(mass) + limit).reshape(found.missed.shape)
    missed, bound = (np.logaddexp(log, log_mass) for log in (found.missed, found.missed_bound))
    return replace(
        found,
        offsets=np.concatenate([[0], np.cumsum(np.bincount(rows[keep], minlength=len(counts)))]).astype(np.int64),
        ids=found.ids[keep],
        scores=found.scores[keep],
        missed=missed.astype(np.float32),
        missed_bound=np.nextafter(bound.astype(np.float32), np.float32(np.inf)),
    )


def _kth(founds: Sequence[Found], k: int) -> Float32:
    """The k-th largest score of each row over all parts, -inf for rows of fewer."""
    rows = len(founds[0].offsets) - 1
    kth = np.full(rows, -np.inf, np.float32)
    for row in range(rows):
        scores = np.concatenate([f.scores[f.offsets[row] : f.offsets[row + 1]] for f in founds])
        if len(scores) > k:
            kth[row] = np.partition(scores, len(scores) - k)[len(scores) - k]
    return kth


def largest_of(found: Found, shape: tuple[int, ...]) -> Float32:
    """The largest score of each row, -inf for rows that found nothing."""
    largest = np.full(len(found.offsets) - 1, -np.inf, np.float32)
    filled = np.flatnonzero(np.diff(found.offsets))
    if len(filled):
        largest[filled] = np.maximum.reduceat(found.scores, found.offsets[filled])
    return largest.reshape(shape)


def emptied(found: Found, rows: npt.NDArray[np.bool_]) -> Found:
    """Without what was found for these rows, bool `[rows]`, which are read elsewhere: nothing of them counts as missed."""
    counts = np.diff(found.offsets)
    nothing, where = np.float32(-np.inf), rows.reshape(found.missed.shape)
    keep = np.repeat(~rows, counts)
    return replace(
        found,
        offsets=np.concatenate([[0], np.cumsum(np.where(rows, 0, counts))]).astype(np.int64),
        ids=found.ids[keep],
        scores=found.scores[keep],
        missed=np.where(where, nothing, found.missed),
        missed_bound=np.where(where, nothing, found.missed_bound),
        dense=None,
    )
