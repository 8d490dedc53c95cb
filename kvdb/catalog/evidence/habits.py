"""What the ways of answering erred, kept for the next contexts of the same model."""

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from kvdb.types import Bools, Float32, ModelSpec
from query_optimizer.habit import Habit, OtherContext
from query_optimizer.order_statistics import AUDITS_MIN
from query_optimizer.ways import Way

CONTEXTS_MAX, ROWS_MAX = 16, AUDITS_MIN
"""The number of last segments whose audits of a way are kept, and the number of last audits of each."""
LENGTHS_RATIO = 4
"""A segment tells nothing of others that have this many times as many tokens, or as few."""
MODELS_MAX = 64
"""The number of models, of a tenant each, whose habits are kept."""


@dataclass(eq=False)
class ModelHabits:
    """The habits of one model, as one tenant's contexts show them. Thread-safe. They are lost when the database is closed, but
    learned again from the stored evidence of every segment that is read."""

    _lock: Lock = field(default_factory=Lock)
    _known: dict[tuple[int, Way], OrderedDict[int, tuple[int, OtherContext]]] = field(default_factory=dict)

    def learn(self, layer: int, way: Way, segment: int, tokens: int, rows: Float32, withdrawn: Bools) -> None:
        """Keep the audits of a way over a segment of so many tokens, in place of those that were kept of it."""
        told = OtherContext(rows[-ROWS_MAX:].copy(), withdrawn.copy())
        with self._lock:
            segments = self._known.setdefault((layer, way), OrderedDict())
            segments[segment] = tokens, told
            if len(segments) > CONTEXTS_MAX:
                segments.popitem(last=False)

    def of(self, layer: int, way: Way, segment: int, tokens: int) -> Habit:
        """What the way erred over other segments of about so many tokens."""
        with self._lock:
            known = list(self._known.get((layer, way), {}).items())
        least, most = tokens / LENGTHS_RATIO, tokens * LENGTHS_RATIO
        return Habit([told for number, (size, told) in known if number != segment and least < size < most])

    def ways(self, layer: int) -> list[Way]:
        """The ways that are known in a layer."""
        with self._lock:
            return [way for one, way in self._known if one == layer]


class Habits:
    """The habits of every model of a database. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._models: OrderedDict[tuple[str, str], ModelHabits] = OrderedDict()

    def of(self, spec: ModelSpec, salt: str) -> ModelHabits:
        """The habits of a model for whoever has this salt: no tenant's contexts speak for another's."""
        with self._lock:
            key = spec.digest, salt
            if key not in self._models and len(self._models) == MODELS_MAX:
                self._models.popitem(last=False)
            return self._models.setdefault(key, ModelHabits())


@dataclass(frozen=True)
class SegmentHabits:
    """The habits of a model, as one of its segments sees them: what was known of a way when it was first audited there."""

    model: ModelHabits
    segment: int
    tokens: int
    _needed: dict[tuple[int, float], int] = field(default_factory=dict, compare=False)

    def of(self, layer: int, way: Way) -> Habit:
        return self.model.of(layer, way, self.segment, self.tokens)

    def learn(self, layer: int, way: Way, rows: Float32, withdrawn: Bools) -> None:
        self.model.learn(layer, way, self.segment, self.tokens, rows, withdrawn)

    def audits_needed(self, layer: int, kv_heads: int, error_max: float) -> int:
        """The least number of audits that prove any way for all heads to err no more than that."""
        key = layer, error_max
        if key not in self._needed:
            heads = np.ones(kv_heads, np.bool_)
            told = [self.of(layer, way).of(heads) for way in self.model.ways(layer)]
            self._needed[key] = min((needed for needed, bound in told if bound <= error_max), default=AUDITS_MIN)
        return self._needed[key]
