"""The measured errors of each way of answering over one segment, or over a session's own tail, by layer and KV head."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np

from kvdb.catalog.evidence.habits import ModelHabits, SegmentHabits
from kvdb.catalog.evidence.layer_changes import LayerChanges
from kvdb.catalog.evidence.way_record import Audit, Float64, WayEvidence, WayRecord
from kvdb.types import Bools
from query_optimizer.order_statistics import AUDITS_MIN
from query_optimizer.ways import Way


@dataclass(frozen=True, eq=False)
class EvidenceRecords:
    """Everything that an `Evidence` knows. queries: the number of queries of each layer. ways: the records of each layer, by
    way."""

    queries: Mapping[int, int] = field(default_factory=dict)
    ways: Mapping[int, Mapping[Way, WayRecord]] = field(default_factory=dict)


class Evidence:
    """The last audits of every way over the same keys. Thread-safe.

    changes: of a layer when a way is proven or withdrawn for some head, and of all when the records are taken or restored;
    `version` counts all of them.
    """

    def __init__(self) -> None:
        self.changes = LayerChanges()
        self._queries: dict[int, int] = {}
        self._records: dict[int, dict[Way, WayRecord]] = {}
        self._habits: SegmentHabits | None = None
        self._lock = Lock()

    @property
    def version(self) -> int:
        return self.changes.version

    def adopt(self, habits: ModelHabits, segment: int, tokens: int) -> None:
        """Prove ways sooner that were proven over other segments, and tell these habits what is proven here. segment, tokens: the
        number and the length of the one that this is of. The first habits stay."""
        with self._lock:
            if self._habits is None:
                self._habits = SegmentHabits(habits, segment, tokens)
                self._meet_all()

    def audits_needed(self, layer: int, kv_heads: int, error_max: float) -> int:
        """The least number of audits that prove any way for all heads of a layer, as far as other segments tell."""
        return AUDITS_MIN if self._habits is None else self._habits.audits_needed(layer, kv_heads, error_max)

    def count_queries(self, layer: int, queries: int) -> None:
        """Count queries of a layer, audited or not. Their number tells which audits are old, and which ways have waited long
        enough."""
        with self._lock:
            self._queries[layer] = self._queries.get(layer, 0) + queries

    def add(self, layer: int, way: Way, audit: Audit, limits: Float64 | None = None) -> Bools:
        """Add an audit. limits: float64 `[kv_heads]`, the error that each head may have, None for a way that is not in use.

        Returns the heads that exceeded their limit this time and keep the way, bool `[kv_heads]`; they should soon be audited
        again.
        """
        with self._lock:
            ways = self._records.setdefault(layer, {})
            record = ways.get(way)
            if record is None:
                record = ways[way] = WayRecord.empty(len(audit.errors), audit.signs.shape[1])
                self._meet(layer, way, record)
            now = self._queries.get(layer, 0)
            known, unlike = record.summary(now), record.unlike(audit)
            proven = np.isfinite(known.bounds)
            record.add_unlike(audit, unlike, known.bounds if limits is None else limits, now)
            suspects = np.zeros(len(audit.heads), np.bool_)
            if not audit.chosen:
                record.add(audit, unlike, limits, now)
                audit = replace(audit, heads=audit.heads & ~unlike.all(axis=1), errors=np.where(unlike, 0, audit.errors))
                if limits is not None:
                    suspects = record.judge(audit, limits, now)
                self._teach(layer, way, record)
            widened = audit.chosen and bool((audit.heads[:, None] & ~record.unlike(audit)).any())
            changed = widened or (np.isfinite(record.summary(now).bounds) != proven).any()
            if changed or (limits is not None and audit.complete and not audit.chosen and _over(audit, limits)):
                self.changes.advance(layer)
            return suspects

    def of(self, layer: int) -> Mapping[Way, WayEvidence]:
        """What is known about each way in one layer now."""
        with self._lock:
            now = self._queries.get(layer, 0)
            return {way: record.summary(now) for way, record in self._records.get(layer, {}).items()}

    def layers(self) -> list[int]:
        """The layers with any evidence."""
        with self._lock:
            return sorted(self._records)

    def take(self) -> EvidenceRecords:
        """Return all records, and forget them."""
        with self._lock:
            taken = EvidenceRecords(self._queries, self._records)
            self._queries, self._records = {}, {}
            self.changes.advance()
            return taken

    def restore(self, records: EvidenceRecords) -> None:
        """Replace everything by what `take` returned, which belongs to this evidence from now on."""
        with self._lock:
            self._queries = dict(records.queries)
            self._records = {layer: dict(ways) for layer, ways in records.ways.items()}
            self._meet_all()
            self.changes.advance()

    def _meet_all(self) -> None:
        """Have every record know the habits, and the habits every record; called with the lock held, like the following."""
        for layer, ways in self._records.items():
            for way, record in ways.items():
                self._meet(layer, way, record)
                self._teach(layer, way, record)

    def _meet(self, layer: int, way: Way, record: WayRecord) -> None:
        if self._habits is not None:
            record.meet(self._habits.of(layer, way))

    def _teach(self, layer: int, way: Way, record: WayRecord) -> None:
        if self._habits is not None:
            self._habits.learn(layer, way, record.rows, record.broken)


def _over(audit: Audit, limits: Float64) -> bool:
    """Whether the heads together exceeded their budget in some query, so that plans have to be made anew."""
    squares = np.where(audit.heads[:, None], audit.errors.astype(np.float64) ** 2, 0).sum(axis=0)
    return not bool((squares <= (limits[audit.heads] ** 2).sum()).all())
