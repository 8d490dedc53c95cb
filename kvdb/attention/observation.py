"""Observations of searches, for the statistics of the segments that were searched."""

from dataclasses import dataclass

from kvdb.types import Bools, Float32


@dataclass(frozen=True)
class Observation:
    """What the search of a segment showed about one query of one layer.

    values: float32 `[4, q_heads]`, one row for each of MEASURES. seen: bool `[4, q_heads]`, which of the values are known; None
    for all.
    """

    values: Float32
    seen: Bools | None
