"""Counts and times of calls, at the edge of the server."""

from collections import Counter as Counts
from collections.abc import Mapping
from typing import NamedTuple

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.samples import Sample

from kvdb.rpc.calls import CALLS

SECONDS = tuple(round(base * 10**power, 6) for power in range(-5, 2) for base in (1.0, 2.5, 5.0))
"""The buckets of times: three for each power of ten from 10 us to 50 s."""

METHODS = {call.path: call.rpc for call in CALLS}
OTHER = "other"
SHARED_MEMORY = "SharedMemory"
STREAM = "Decode"
"""Its messages are timed one by one."""


class CallTotals(NamedTuple):
    """Calls since the start of a server. codes: how many ended with each status of gRPC. latencies: how many "steps" of decoding
    and how many other "calls" took at most so many seconds, for each bucket; none before the first."""

    codes: Mapping[str, int]
    latencies: Mapping[str, Mapping[float, int]]


class CallMetrics:
    """Counters and histograms of calls. Labels are the methods of the contract, statuses of gRPC, and calls of a stream: however
    many clients, tenants and contexts there are, there are no more."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counted = "Calls that ended, streams too, by method and status; through shared memory those that failed."
        self._calls = Counter("kvdb_calls", counted, ("method", "code"), registry=registry)
        took = "From a call's arrival to its end, by method."
        self._seconds = Histogram("kvdb_call_seconds", took, ("method",), buckets=SECONDS, registry=registry)
        waited = "How long a call, or a message of a stream, waited for its turn, and where the engine had no room for that."
        self._queue = Histogram("kvdb_queue_seconds", waited, buckets=SECONDS, registry=registry)
        step = "A message of a Decode stream, from its parts to its reply, by the call that it holds."
        self._steps = Histogram("kvdb_decode_seconds", step, ("call",), buckets=SECONDS, registry=registry)

        self._of_call: dict[str, Histogram] = {}  # looking a label up takes longer than counting

    def ended(self, method: str, code: grpc.StatusCode, seconds: float) -> str:
        """Count a call. Returns the method as the label says it."""
        short = METHODS.get(method, OTHER)
        self._calls.labels(short, code.name).inc()
        self._seconds.labels(short).observe(seconds)
        return short

    def failed(self, code: grpc.StatusCode) -> None:
        """Count a call through shared memory that failed; `stepped` has counted it too."""
        self._calls.labels(SHARED_MEMORY, code.name).inc()

    def totals(self) -> CallTotals:
        """What was counted so far."""
        codes: Counts[str] = Counts()
        latencies: dict[str, Counts[float]] = {"steps": Counts(), "calls": Counts()}
        for sample in self._samples(self._calls, "kvdb_calls_total"):
            codes[sample.labels["code"]] += int(sample.value)
        for sample in self._samples(self._seconds, "kvdb_call_seconds_bucket"):
            if sample.labels["method"] != STREAM:
                latencies["calls"][float(sample.labels["le"])] += int(sample.value)
        for sample in self._samples(self._steps, "kvdb_decode_seconds_bucket"):
            latencies["steps"][float(sample.labels["le"])] += int(sample.value)
        return CallTotals(codes, latencies)

    @staticmethod
    def _samples(metric: Counter | Histogram, name: str) -> list[Sample]:
        return [sample for family in metric.collect() for sample in family.samples if sample.name == name]

    def waited(self, seconds: float) -> None:
        """Count how long a turn was waited for."""
        self._queue.observe(seconds)

    def stepped(self, call: str, seconds: float) -> None:
        """Count a message of a Decode stream. call: a field of `DecodeRequest.call`."""
        observed = self._of_call.get(call)
        if observed is None:
            observed = self._of_call[call] = self._steps.labels(call)
        observed.observe(seconds)
