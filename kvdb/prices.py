"""What builds of indexes take on this machine: what the kinds say, corrected by what builds took."""

from dataclasses import replace

import indexes.registry as registry
from indexes.base import BuildCost
from kvdb.catalog.segment import Segment

WEIGHT = 0.3
"""Of the last build in the average."""
FACTOR_MAX = 16.0
"""How far a measured build may lie from what its kind says: beyond that, something else was measured."""
UNKNOWN_KEY_SECONDS = 1e-6
"""Of a kind that cannot say, until one was built: a guess, what a flat index takes."""


class Prices:
    """One float a kind changes at a time, so that threads need no lock."""

    def __init__(self) -> None:
        self._factors: dict[str, float] = {}

    def of(self, kind: str, segment: Segment) -> BuildCost:
        """An index of that kind over one layer of a segment. search_share is 1 where the kind cannot say."""
        expected = _expected(kind, segment)
        return replace(expected, seconds=expected.seconds * self._factors.get(kind, 1.0))

    def learn(self, kind: str, segment: Segment, seconds: float) -> None:
        """Building one over one layer took so long."""
        factor = seconds / max(_expected(kind, segment).seconds, 1e-9)
        factor = min(max(factor, 1 / FACTOR_MAX), FACTOR_MAX)
        before = self._factors.get(kind, factor)
        self._factors[kind] = before + WEIGHT * (factor - before)


def _expected(kind: str, segment: Segment) -> BuildCost:
    layout = segment.tables[0].layout
    said = registry.build_cost(kind, len(segment), layout.kv_heads, layout.head_dim)
    return said or BuildCost(UNKNOWN_KEY_SECONDS * len(segment) * layout.kv_heads, 0.0, 1.0)
