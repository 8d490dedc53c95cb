"""The audits of one way of answering in one layer, and what they show of each KV head."""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from kvdb.types import Bools, Float32
from query_optimizer.order_statistics import lower_bound, upper_bound

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

SAMPLES_MIN, SAMPLES_MAX = 64, 256
"""The number of audits of each head for which memory is taken at first, and the number of last audits that count."""
TIMES_MAX = 32
RECENT_AUDITS, RECENT_FAULTS = 4, 2
"""A way is withdrawn for a head that exceeded its limit in RECENT_FAULTS of its last RECENT_AUDITS audits."""
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
    time_share: the time of the search relative to that of the exact answer, None where it is not known. complete: whether all
    heads that the way answers were compared, so that the audit says what their errors are together.
    """

    errors: Float32
    missed: Float32
    heads: Bools
    given_up: Bools
    time_share: float | None = None
    complete: bool = True


@dataclass(frozen=True)
class WayEvidence:
    """What the audits of one way in one layer show, an entry for each KV head.

    audits: int64, how many count. bounds, least: float64, what the 95th percentile of the error is at most and at least, each
    with a confidence of 95 %. guards: float32, the largest `missed` of any audit. median, largest: float64, of the errors.
    given_up: float64, the share of audits in which the head was read whole. waits: bool, whether the way was withdrawn and is not
    to be tried. time_share: the lower quartile, as other work of the processors only adds to a time; None before any was timed.
    rows: float32 `[n, kv_heads]`, the errors of the last complete audits, a row for each query; NaN where a head was not
    compared.
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
    rows: Float32


@dataclass(eq=False)
class WayRecord:
    """The last audits of one way in one layer. Not thread-safe; times are numbers of queries of the layer.

    counts: int64 `[kv_heads]`, the number of audits since the head was last forgotten. errors, missed: float32 `[kv_heads, n]`,
    of the last audits, as in `Audit`; audit number i stands at i modulo n. rows: as in `WayEvidence`. times: float64, the time
    shares of the last audits. given_up: float64 `[kv_heads]`, as in `WayEvidence`. faults: bool `[kv_heads, RECENT_AUDITS]`,
    whether the head exceeded its limit, the last audit first. last, waits_until: int64 `[kv_heads]`, when a head was last
    audited, and until when the way is not tried for it. withdrawn, stale: int64 `[kv_heads]`, how long the way will not be tried
    when it is next withdrawn, and how long audits count without a new one.
    """

    counts: Int64
    errors: Float32
    missed: Float32
    rows: Float32
    times: Float64
    given_up: Float64
    faults: Bools
    last: Int64
    waits_until: Int64
    withdrawn: Int64
    stale: Int64
    _summary: WayEvidence | None = field(default=None, init=False, repr=False)

    @classmethod
    def empty(cls, kv_heads: int) -> Self:
        """A record without audits."""
        zeros = [np.zeros(kv_heads, np.int64) for _ in range(3)]
        return cls(
            counts=zeros[0],
            errors=np.zeros((kv_heads, SAMPLES_MIN), np.float32),
            missed=np.zeros((kv_heads, SAMPLES_MIN), np.float32),
            rows=np.zeros((0, kv_heads), np.float32),
            times=np.zeros(0),
            given_up=np.zeros(kv_heads),
            faults=np.zeros((kv_heads, RECENT_AUDITS), np.bool_),
            last=zeros[1],
            waits_until=zeros[2],
            withdrawn=np.full(kv_heads, WITHDRAWN_QUERIES),
            stale=np.full(kv_heads, STALE_QUERIES),
        )

    def add(self, audit: Audit, now: int) -> None:
        """Add an audit. now: the number of queries of the layer so far."""
        self._summary = None
        for head in np.flatnonzero(audit.heads).tolist():
            for error, missed in zip(audit.errors[head].tolist(), audit.missed[head].tolist(), strict=True):
                if self.counts[head] == self.errors.shape[1] < SAMPLES_MAX:
                    self.errors, self.missed = (np.concatenate([a, np.zeros_like(a)], axis=1) for a in (self.errors, self.missed))
                place = self.counts[head] % SAMPLES_MAX
                self.errors[head, place], self.missed[head, place] = error, missed
                self.counts[head] += 1
            self.given_up[head] += (audit.given_up[head] - self.given_up[head]) / min(self.counts[head], SAMPLES_MAX)
            self.last[head] = now
        if audit.complete:
            rows = np.where(audit.heads, audit.errors.T, np.float32(np.nan))
            self.rows = np.concatenate([self.rows, rows])[-SAMPLES_MAX:]
        if audit.time_share is not None:
            self.times = np.append(self.times, audit.time_share)[-TIMES_MAX:]

    def judge(self, audit: Audit, limits: Float64, now: int) -> Bools:
        """Withdraw the way for heads that exceeded their limits too often, or are no longer proven to keep them. Returns the
        other heads that exceeded their limits this time, bool `[kv_heads]`."""
        broke = audit.heads & ~(audit.errors <= limits[:, None]).all(axis=1)
        self.faults = np.where(audit.heads[:, None], np.roll(self.faults, 1, axis=1), self.faults)
        self.faults[audit.heads, 0] = broke[audit.heads]
        unproven = ~(self.summary(now).bounds <= limits)
        leave = broke & (unproven | (self.faults.sum(axis=1) >= RECENT_FAULTS))
        self._forget(leave)
        self.waits_until[leave] = now + self.withdrawn[leave]
        self.withdrawn[leave] = np.minimum(2 * self.withdrawn[leave], WITHDRAWN_QUERIES_MAX)
        return np.asarray(broke & ~leave, np.bool_)

    def summary(self, now: int) -> WayEvidence:
        """What the audits show; those that are stale are forgotten."""
        stale = (self.counts > 0) & (now - self.last > self.stale)
        if stale.any():
            self._forget(stale)
            self.stale[stale] = np.minimum(2 * self.stale[stale], STALE_QUERIES_MAX)
        waits = now < self.waits_until
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
            errors = self.errors[head, : counts[head]]
            bounds[head], least[head] = float(upper_bound(errors)), float(lower_bound(errors))
            median[head], largest[head] = float(np.median(errors)), float(errors.max())
            guards[head] = self.missed[head, : counts[head]].max()
        time_share = float(np.quantile(self.times, 0.25)) if len(self.times) else None
        return WayEvidence(counts, bounds, least, guards, median, largest, self.given_up.copy(), waits, time_share, self.rows)

    def _forget(self, heads: Bools) -> None:
        self.counts[heads] = 0
        self.faults[heads] = False
        self.given_up[heads] = 0
        self.rows = np.where(heads, np.float32(np.nan), self.rows)
        self._summary = None
