"""The measures of a context that are drawn, over all of its segments."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvdb.types import ERROR, MEASURES, ContextStatistics, SegmentStatistics

Values = npt.NDArray[np.float64]

DRAWN: Sequence[str] = (*MEASURES, ERROR)
TITLES = {
    "retrieved": "retrieved\nshare of the searched tokens that a query needs",
    "dense": "dense\nshare of queries that the search gave up",
    "sharpness": "sharpness\nsoftmax weight of the largest token",
    "window_hits": "window hits\nshare of queries whose largest token lies in the window",
    ERROR: "error\nbound on its 95th percentile, by audits",
}
FORMS = {"retrieved": "{:.2%}", "dense": "{:.0%}", "sharpness": "{:.0%}", "window_hits": "{:.0%}", ERROR: "{:.2%}"}
"""How values are written."""
LOGARITHMIC = {"retrieved", ERROR}
"""Small values of these matter, so colours and shades stand for their logarithm."""
LOWEST = 1e-4
"""Where logarithmic colours begin."""


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
