"""Cuts the results of several searches down to the tokens that count once all parts are known."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from indexes.base import Float32, SearchResult
from indexes.retrieval import Dipr, Retrieval, TopK


def cut_of(results: Sequence[SearchResult], floor: Float32, scale: float, retrieval: Retrieval) -> Float32:
    """The smallest score that counts now that every part is known, float32 `[q_heads, n]`. floor: the largest score of all."""
    if isinstance(retrieval, Dipr):
        return np.asarray(floor - np.float32(retrieval.beta(scale)), np.float32)
    if isinstance(retrieval, TopK):
        return _kth(results, retrieval.k).reshape(floor.shape)
    return np.full(floor.shape, -np.inf, np.float32)


def trimmed(result: SearchResult, cut: Float32, scale: float) -> SearchResult:
    """The result without scores below the cut of their row, float32 `[rows]`; their mass counts as missed."""
    counts = np.diff(result.offsets)
    keep = result.scores >= np.repeat(cut, counts)
    if keep.all():
        return result
    rows = np.repeat(np.arange(len(counts)), counts)
    lost, logits = rows[~keep], scale * result.scores[~keep].astype(np.float64)
    top = np.full(len(counts), -np.inf)
    np.maximum.at(top, lost, logits)
    mass = np.bincount(lost, np.exp(logits - top[lost]), len(counts))
    log_mass = (top + np.log(np.maximum(mass, 1))).reshape(result.missed.shape)
    missed, bound = (np.logaddexp(log, log_mass) for log in (result.missed, result.missed_bound))
    return replace(
        result,
        offsets=np.concatenate([[0], np.cumsum(np.bincount(rows[keep], minlength=len(counts)))]).astype(np.int64),
        ids=result.ids[keep],
        scores=result.scores[keep],
        missed=missed.astype(np.float32),
        missed_bound=np.nextafter(bound.astype(np.float32), np.float32(np.inf)),
    )


def _kth(results: Sequence[SearchResult], k: int) -> Float32:
    """The k-th largest score of each row over all parts, -inf for rows with fewer scores."""
    rows = len(results[0].offsets) - 1
    kth = np.full(rows, -np.inf, np.float32)
    for row in range(rows):
        scores = np.concatenate([f.scores[f.offsets[row] : f.offsets[row + 1]] for f in results])
        if len(scores) > k:
            kth[row] = np.partition(scores, len(scores) - k)[len(scores) - k]
    return kth


def largest_of(result: SearchResult, shape: tuple[int, ...]) -> Float32:
    """The largest score of each row, -inf for rows that found nothing."""
    largest = np.full(len(result.offsets) - 1, -np.inf, np.float32)
    filled = np.flatnonzero(np.diff(result.offsets))
    if len(filled):
        largest[filled] = np.maximum.reduceat(result.scores, result.offsets[filled])
    return largest.reshape(shape)


def emptied(result: SearchResult, rows: npt.NDArray[np.bool_]) -> SearchResult:
    """The result without these rows, bool `[rows]`. They are read whole, so they miss nothing."""
    counts = np.diff(result.offsets)
    nothing, where = np.float32(-np.inf), rows.reshape(result.missed.shape)
    keep = np.repeat(~rows, counts)
    return replace(
        result,
        offsets=np.concatenate([[0], np.cumsum(np.where(rows, 0, counts))]).astype(np.int64),
        ids=result.ids[keep],
        scores=result.scores[keep],
        missed=np.where(where, nothing, result.missed),
        missed_bound=np.where(where, nothing, result.missed_bound),
        dense=None,
    )
