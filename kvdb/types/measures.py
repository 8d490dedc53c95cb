"""The measures of a context over all of its segments."""

import numpy as np
import numpy.typing as npt

from kvdb.types.statistics import ERROR, ContextStatistics, SegmentStatistics

Values = npt.NDArray[np.float64]


def known(segment: SegmentStatistics, measure: str) -> Values:
    """A measure as float64 `[layers, q_heads]`, NaN where nothing is known."""
    values = getattr(segment, measure).astype(np.float64)
    return np.where(_counts(segment, measure) > 0, np.where(np.isfinite(values), values, np.nan), np.nan)


def overall(statistics: ContextStatistics, measure: str) -> Values:
    """A measure over all segments, float64 `[layers, q_heads]`, NaN where nothing is known: of errors the largest, of others the
    mean, weighted by the queries."""
    values = np.stack([known(segment, measure) for segment in statistics.segments])
    if measure == ERROR:
        largest = np.where(np.isfinite(values), values, -np.inf).max(axis=0)
        return np.where(np.isfinite(largest), largest, np.nan)
    weights = np.where(np.isfinite(values), [segment.queries for segment in statistics.segments], 0)
    total = weights.sum(axis=0)
    return np.where(total > 0, (np.nan_to_num(values) * weights).sum(axis=0) / np.maximum(total, 1), np.nan)


def is_known(statistics: ContextStatistics, measure: str) -> bool:
    """Whether any query, or any audit, of any head says something of it."""
    return any(bool(_counts(segment, measure).any()) for segment in statistics.segments)


def _counts(segment: SegmentStatistics, measure: str) -> npt.NDArray[np.int64]:
    return segment.audits if measure == ERROR else segment.queries
