"""Counters of events."""

from collections import Counter
from collections.abc import Iterator
from threading import Lock

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvdb.events import Event, Kind


class EventCounts(Collector):
    """A sink that counts events by kind, and offers the counts."""

    def __init__(self) -> None:
        self._counts: Counter[Kind] = Counter()
        self._refused_for_room = 0
        self._over: Counter[tuple[str, str]] = Counter()
        self._lock = Lock()

    def __call__(self, event: Event) -> None:
        """Count one event."""
        with self._lock:
            self._counts[event.kind] += 1
            if event.kind is Kind.QUOTA:
                self._over[event.origin.tenant, str(event.facts["quota"])] += 1
            elif event.kind is Kind.REFUSED and event.facts.get("code") == "RESOURCE_EXHAUSTED":
                self._refused_for_room += 1

    def collect(self) -> Iterator[Metric]:
        """The families, with the counts of now."""
        with self._lock:
            counts, over = self._counts.copy(), self._over.copy()
            room = max(0, self._refused_for_room - over.total())  # a call over a quota is refused too
        every = CounterMetricFamily("kvdb_events", "Things that happened, by kind.", labels=("event",))
        for kind in Kind:
            every.add_metric((kind,), counts[kind])
        yield every
        builds = CounterMetricFamily("kvdb_index_builds", "Builds of indexes that ended.", labels=("result",))
        builds.add_metric(("built",), counts[Kind.INDEX_BUILT])
        builds.add_metric(("failed",), counts[Kind.INDEX_FAILED])
        yield builds
        left = CounterMetricFamily("kvdb_evictions", "What left a tier: segments to disk, contexts for good.", labels=("what",))
        left.add_metric(("segment_offloaded",), counts[Kind.OFFLOADED])
        left.add_metric(("context_evicted",), counts[Kind.EVICTED])
        left.add_metric(("context_expired",), counts[Kind.EXPIRED])
        yield left
        failed = "Stored contents that were not as they were written."
        yield CounterMetricFamily("kvdb_checksum_failures", failed, counts[Kind.CHECKSUM_FAILED])
        what = "Calls refused because a quota of a tenant or, as the quota room, all room was taken."
        refused = CounterMetricFamily("kvdb_quota_rejections", what, labels=("tenant", "quota"))
        refused.add_metric(("", "room"), room)
        for (tenant, quota), number in over.items():
            refused.add_metric((tenant, quota), number)
        yield refused
