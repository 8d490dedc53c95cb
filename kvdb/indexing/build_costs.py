"""The cost of building indexes on this machine: the kinds' own estimates, corrected by the builds so far."""

from dataclasses import replace

import indexes.registry as registry
from indexes.base import BuildCost
from kvdb.catalog.segments.segment import Segment

WEIGHT = 0.3
"""The weight of the last build in the average."""
FACTOR_MAX = 16.0
"""The largest factor between a measured build and its kind's estimate; a larger one means that something else was measured."""
UNKNOWN_KEY_SECONDS = 1e-6
"""Seconds for each key of a kind without an estimate, until one was built: a guess, as long as a flat index takes."""


class BuildCosts:
    """One factor for each kind, which corrects its estimates. Thread-safe without a lock: floats are replaced one at a time."""

    def __init__(self) -> None:
        self._factors: dict[str, float] = {}

    def of(self, kind: str, segment: Segment) -> BuildCost:
        """The expected cost of an index of that kind over one layer of a segment; search_share is 1 for a kind without an
        estimate."""
        expected = _expected(kind, segment)
        return replace(expected, seconds=expected.seconds * self._factors.get(kind, 1.0))

    def learn(self, kind: str, segment: Segment, seconds: float) -> None:
        """Learn from the seconds that the build of one layer took."""
        factor = seconds / max(_expected(kind, segment).seconds, 1e-9)
        factor = min(max(factor, 1 / FACTOR_MAX), FACTOR_MAX)
        before = self._factors.get(kind, factor)
        self._factors[kind] = before + WEIGHT * (factor - before)


def _expected(kind: str, segment: Segment) -> BuildCost:
    layout = segment.tables[0].layout
    said = registry.build_cost(kind, len(segment), layout.kv_heads, layout.head_dim)
    return said or BuildCost(UNKNOWN_KEY_SECONDS * len(segment) * layout.kv_heads, 0.0, 1.0)
