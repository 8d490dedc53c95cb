"""Evidence of how wrong each way of answering is, by layer and KV head: of one segment, or of a session's own tail."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvdb.types import Float32
from query_optimizer.order_statistics import lower_bound, upper_bound
from query_optimizer.ways import Way

Bools = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

SAMPLES_MIN, SAMPLES_MAX = 64, 256
"""The number of audits of each head for which memory is taken at first, and the number of last audits that count."""
TIMES_MAX = 32
RECENT_AUDITS, RECENT_FAULTS = 4, 2
"""A way is withdrawn for a head that broke its share in RECENT_FAULTS of its last RECENT_AUDITS audits."""
WITHDRAWN_QUERIES, WITHDRAWN_QUERIES_MAX = 256, 1 << 16
"""A way that was withdrawn is not tried for this number of queries of the layer; the number doubles each time, up to the
maximum."""
STALE_QUERIES, STALE_QUERIES_MAX = 1 << 13, 1 << 20
"""Audits of a head are forgotten after this number of queries of the layer without another audit; the number doubles each time,
up to the maximum."""


@dataclass(frozen=True)
class Audit:
    """Answers by one way beside exact ones. Arrays are `[kv_heads, n]` for n queries.

    errors: float32, the L2 norm of the difference, relative to that of the layer's exact output. missed: float32, the logarithm
    of the softmax mass that is estimated to be left out, relative to what was read, for the query head with the most. heads: bool
    `[kv_heads]`, those that count. given_up: bool `[kv_heads]`, those that the search gave up on, so that they were read whole.
    time_share: the time of the search relative to that of the exact answer, None where it is not known.
    """

    errors: Float32
    missed: Float32
    heads: Bools
    given_up: Bools
    time_share: float | None = None


@dataclass(frozen=True)
class WayEvidence:
    """What the audits of one way in one layer show, an entry for each KV head.

    audits: int64, how many count. bounds, least: float64, what the 95th percentile of the error is at most and at least, each
    with a confidence of 95 %. guards: float32, the largest `missed` of any audit. median, largest: float64, of the errors.
    given_up: float64, the share of audits in which the head was read whole. waits: bool, whether the way was withdrawn and is not
    to be tried. time_share: the median, None before any was timed.
    """

    audits: Int64
    bounds: Float64
    least: Float64
    guards: Float32
    median: Float64
    largest: Float64
    given_up: Float64
    waits: Bools
    time_share: float | None


class Evidence:
    """The last audits of every way over the same keys. Thread-safe.

    version: how often a way was proven or withdrawn for some head.
    """

    def __init__(self) -> None:
        self.version = 0
        self._queries: dict[int, int] = {}
        self._records: dict[int, dict[Way, _Record]] = {}
        self._lock = Lock()

    def count_queries(self, layer: int, queries: int) -> None:
        """Count queries of a layer, audited or not. Their number tells which audits are old, and which ways have waited long
        enough."""
        with self._lock:
            self._queries[layer] = self._queries.get(layer, 0) + queries

    def add(self, layer: int, way: Way, audit: Audit, limits: Float64 | None = None) -> Bools:
        """Take in an audit. limits: float64 `[kv_heads]`, the error that each head may have, where the way is in use. Returns the
        heads that broke their share and are not withdrawn, bool `[kv_heads]`; audit these once more, and soon."""
        with self._lock:
            ways = self._records.setdefault(layer, {})
            record = ways.get(way)
            if record is None:
                record = ways[way] = _Record(len(audit.errors))
            now = self._queries.get(layer, 0)
            proven = np.isfinite(record.summary(now).bounds)
            record.add(audit, now)
            suspects = np.zeros(len(audit.heads), np.bool_)
            if limits is not None:
                suspects = record.judge(audit, limits, now)
            self.version += bool((np.isfinite(record.summary(now).bounds) != proven).any())
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


class _Record:
    """The audits of one way in one layer; the evidence's lock is held."""

    def __init__(self, kv_heads: int) -> None:
        self.counts = np.zeros(kv_heads, np.int64)
        self._errors = np.zeros((kv_heads, SAMPLES_MIN), np.float32)
        self._missed = np.zeros((kv_heads, SAMPLES_MIN), np.float32)
        self._given_up = np.zeros(kv_heads)
        self._times: deque[float] = deque(maxlen=TIMES_MAX)
        self._faults = np.zeros((kv_heads, RECENT_AUDITS), np.bool_)
        self._last = np.zeros(kv_heads, np.int64)
        self._waits_until = np.zeros(kv_heads, np.int64)
        self._withdrawn = np.full(kv_heads, WITHDRAWN_QUERIES)
        self._stale = np.full(kv_heads, STALE_QUERIES)
        self._summary: WayEvidence | None = None

    def add(self, audit: Audit, now: int) -> None:
        self._summary = None
        for head in np.flatnonzero(audit.heads).tolist():
            for error, missed in zip(audit.errors[head].tolist(), audit.missed[head].tolist(), strict=True):
                if self.counts[head] == self._errors.shape[1] < SAMPLES_MAX:
                    self._errors, self._missed = (
                        np.concatenate([a, np.zeros_like(a)], axis=1) for a in (self._errors, self._missed)
                    )
                place = self.counts[head] % SAMPLES_MAX
                self._errors[head, place], self._missed[head, place] = error, missed
                self.counts[head] += 1
            self._given_up[head] += (audit.given_up[head] - self._given_up[head]) / min(self.counts[head], SAMPLES_MAX)
            self._last[head] = now
        if audit.time_share is not None:
            self._times.append(audit.time_share)

    def judge(self, audit: Audit, limits: Float64, now: int) -> Bools:
        """Withdraw the way for heads that left their share; the heads that broke it this time only."""
        broke = audit.heads & ~(audit.errors <= limits[:, None]).all(axis=1)
        self._faults = np.where(audit.heads[:, None], np.roll(self._faults, 1, axis=1), self._faults)
        self._faults[audit.heads, 0] = broke[audit.heads]
        unproven = ~(self.summary(now).bounds <= limits)
        leave = broke & (unproven | (self._faults.sum(axis=1) >= RECENT_FAULTS))
        self._forget(leave)
        self._waits_until[leave] = now + self._withdrawn[leave]
        self._withdrawn[leave] = np.minimum(2 * self._withdrawn[leave], WITHDRAWN_QUERIES_MAX)
        return np.asarray(broke & ~leave, np.bool_)

    def summary(self, now: int) -> WayEvidence:
        stale = (self.counts > 0) & (now - self._last > self._stale)
        if stale.any():
            self._forget(stale)
            self._stale[stale] = np.minimum(2 * self._stale[stale], STALE_QUERIES_MAX)
        waits = now < self._waits_until
        if self._summary is None or (self._summary.waits != waits).any():
            self._summary = self._summarized(waits)
        return self._summary

    def _summarized(self, waits: Bools) -> WayEvidence:
        heads = len(self.counts)
        counts = np.minimum(self.counts, SAMPLES_MAX)
        bounds, least = np.full(heads, np.inf), np.full(heads, -np.inf)
        median, largest = np.full(heads, np.nan), np.full(heads, np.nan)
        guards = np.full(heads, -np.inf, np.float32)
        for head in np.flatnonzero(counts).tolist():
            errors = self._errors[head, : counts[head]]
            bounds[head], least[head] = float(upper_bound(errors)), float(lower_bound(errors))
            median[head], largest[head] = float(np.median(errors)), float(errors.max())
            guards[head] = self._missed[head, : counts[head]].max()
        time_share = float(np.median(self._times)) if self._times else None
        return WayEvidence(counts, bounds, least, guards, median, largest, self._given_up.copy(), waits, time_share)

    def _forget(self, heads: Bools) -> None:
        self.counts[heads] = 0
        self._faults[heads] = False
        self._given_up[heads] = 0
        self._summary = None
