"""The audits of one way of answering in one layer, and what they show of each KV head."""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from kvdb.attention.signs import SIGNS, outside
from kvdb.types import Bools, Float32
from query_optimizer.habit import NO_HABIT, Habit
from query_optimizer.order_statistics import AUDITS_MIN, lower_bound, upper_bound

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

RANGE_AUDITS, RANGE_MARGIN, RANGE_MARGIN_MIN = 16, 0.5, 0.1
"""From so many audits on, a query is unlike them if a sign lies beyond those of all by more than this part of what they span and
more than the minimum."""
UNLIKE_QUERIES = 4 * AUDITS_MIN
"""Where AUDITS_MIN of so many queries were unlike those of the proof, and are not within their limit, the way is withdrawn."""


@dataclass(frozen=True)
class Audit:
    """Answers by one way beside exact ones. Arrays are `[kv_heads, n]` for n queries.

    errors: float32, the L2 norm of the difference, relative to that of the layer's exact output. missed: float32, the logarithm
    of the softmax mass that is estimated to be left out, relative to what was read, for the query head with the most. signs:
    float32 `[SIGNS, q_heads, n]`, as `kvdb.attention.signs` has them. heads: bool `[kv_heads]`, those that count. given_up: bool,
    those that the search gave up on, so that they were read whole.
    time_share: the time of the search relative to that of the exact answer, None where it is not known. complete: whether all
    heads that the way answers were compared, so that the audit says what their errors are together. chosen: whether the heads are
    compared because they were told to be unlike those of the proof, so that they say nothing of the others.
    """

    errors: Float32
    missed: Float32
    signs: Float32
    heads: Bools
    given_up: Bools
    time_share: float | None = None
    complete: bool = True
    chosen: bool = False


@dataclass(frozen=True)
class WayEvidence:
    """What the audits of one way in one layer show, an entry for each KV head.

    audits: int64, how many count. bounds, least: float64, what the 95th percentile of the error is at most and at least, each
    with a confidence of 95 %. guards: float32, the largest `missed` of any audit. ranges: float32 `[2, SIGNS, q_heads]`,
    the least and the largest that a sign may be in a query like those of the audits. median, largest: float64, of the errors.
    given_up: float64, the share of audits in which the head was read whole. waits: bool, whether the way was withdrawn and is not
    to be tried. time_share: the lower quartile, as other work of the processors only adds to a time; None before any was timed.
    rows: float32 `[n, kv_heads]`, the errors of the last complete audits, a row for each query; NaN where a head was not
    compared. habit: what the way erred in other contexts, where that still speaks for it.
    """

    audits: Int64
    bounds: Float64
    least: Float64
    guards: Float32
    ranges: Float32
    median: Float64
    largest: Float64
    given_up: Float64
    waits: Bools
    time_share: float | None
    rows: Float32
    habit: Habit = NO_HABIT


@dataclass(eq=False)
class WayRecord:
    """The last audits of one way in one layer. Not thread-safe; times are numbers of queries of the layer.

    counts: int64 `[kv_heads]`, the number of audits since the head was last forgotten. errors, missed: float32 `[kv_heads, n]`,
    of the last audits, as in `Audit`; audit number i stands at i modulo n. rows: as in `WayEvidence`. times: float64, the time
    shares of the last audits. given_up: float64 `[kv_heads]`, as in `WayEvidence`. faults: bool `[kv_heads, RECENT_AUDITS]`,
    whether the head exceeded its limit, the last audit first. last, waits_until: int64 `[kv_heads]`, when a head was last
    audited, and until when the way is not tried for it. withdrawn, stale: int64 `[kv_heads]`, how long the way will not be tried
    when it is next withdrawn, and how long audits count without a new one. seen: float32 `[2, SIGNS, q_heads]`, the least and the
    largest of each sign in the audits that count. unlike_seen: the same, of audits of queries unlike those, which count once they
    are AUDITS_MIN; unlike_errors: float32 `[kv_heads, AUDITS_MIN]`, and unlike_counts: int64 `[kv_heads]`, are of them;
    unlike_since: int64 `[kv_heads]`, when the first was. habit: what the way erred in other contexts before its first audit here;
    a head that was withdrawn or forgotten has to be proven without it.
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
    seen: Float32
    unlike_seen: Float32
    unlike_errors: Float32
    unlike_counts: Int64
    unlike_since: Int64
    habit: Habit = NO_HABIT
    _summary: WayEvidence | None = field(default=None, init=False, repr=False)

    @classmethod
    def empty(cls, kv_heads: int, q_heads: int) -> Self:
        """A record without audits."""
        zeros = [np.zeros(kv_heads, np.int64) for _ in range(5)]
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
            seen=_nothing_seen(q_heads),
            unlike_seen=_nothing_seen(q_heads),
            unlike_errors=np.zeros((kv_heads, AUDITS_MIN), np.float32),
            unlike_counts=zeros[3],
            unlike_since=zeros[4],
        )

    def unlike(self, audit: Audit) -> Bools:
        """The heads of an audit for whose query it is unlike those of the audits that count, bool `[kv_heads, n]`. In use they
        are read whole."""
        return audit.heads[:, None] & outside(audit.signs, self._ranges(), len(self.counts))

    def add(self, audit: Audit, unlike: Bools, limits: Float64 | None, now: int) -> None:
        """Add an audit. unlike: as of `unlike`. limits: the error that heads may have, None for any. now: the number of queries
        of the layer so far."""
        self._summary = None
        like = audit.heads[:, None] & ~unlike
        within = np.True_ if limits is None else audit.errors <= limits[:, None]
        self._see(self.seen, audit.signs, like & within & ~audit.given_up)
        for head in np.flatnonzero(like.any(axis=1)).tolist():
            chosen = like[head]
            self._count(head, audit.errors[head, chosen], audit.missed[head, chosen])
            more = audit.given_up[head, chosen] - self.given_up[head]
            self.given_up[head] += float(more.sum()) / max(min(self.counts[head], SAMPLES_MAX), len(more))
            self.last[head] = now
        if audit.complete:
            rows = np.where(audit.heads, np.where(unlike, 0, audit.errors).T, np.float32(np.nan)).astype(np.float32)
            self.rows = np.concatenate([self.rows, rows])[-SAMPLES_MAX:]
        if audit.time_share is not None:
            self.times = np.append(self.times, audit.time_share)[-TIMES_MAX:]

    def add_unlike(self, audit: Audit, unlike: Bools, limits: Float64, now: int) -> None:
        """Add what an audit shows of heads for whose query it is unlike those of the audits that count, bool `[kv_heads, n]`.
        AUDITS_MIN such are a proof of their own: within the limit, they count from then on; else the way is withdrawn if so few
        queries lay between that it hardly serves."""
        for head, query in np.argwhere(unlike).tolist():
            self._summary = None
            mask = np.arange(len(self.counts)) == head
            if not self.unlike_counts[head]:
                self.unlike_since[head] = now
            self._see(self.unlike_seen, audit.signs[..., [query]], mask[:, None])
            self.unlike_errors[head, self.unlike_counts[head]] = audit.errors[head, query]
            self.unlike_counts[head] += 1
            if self.unlike_counts[head] == AUDITS_MIN:
                self._settle_unlike(mask, limits[head], now)

    def _settle_unlike(self, mask: Bools, limit: float, now: int) -> None:
        """Decide on AUDITS_MIN audits of unlike queries of the one head in the mask."""
        head = int(mask.argmax())
        errors, rows = self.unlike_errors[head].copy(), self._rows(mask)
        seen = self.unlike_seen[..., rows].copy()
        if upper_bound(errors) <= limit:
            if self.counts[head] < AUDITS_MIN:
                self._forget(mask)
            self._count(head, errors, np.full(AUDITS_MIN, -np.inf, np.float32))
            self.seen[0, :, rows] = np.minimum(self.seen[0, :, rows], seen[0].T)
            self.seen[1, :, rows] = np.maximum(self.seen[1, :, rows], seen[1].T)
        elif now - self.unlike_since[head] <= UNLIKE_QUERIES:
            self._withdraw(mask, now)
        self._forget_unlike(mask)

    def meet(self, habit: Habit) -> None:
        """Take what is known of the way from other contexts."""
        self.habit, self._summary = habit, None

    @property
    def broken(self) -> Bools:
        """The heads for which the way was withdrawn at some time, bool `[kv_heads]`."""
        return np.asarray(self.withdrawn > WITHDRAWN_QUERIES, np.bool_)

    def judge(self, audit: Audit, limits: Float64, now: int) -> Bools:
        """Withdraw the way for heads that exceeded their limits too often, or are no longer proven to keep them. Returns the
        other heads that exceeded their limits this time, bool `[kv_heads]`."""
        broke = audit.heads & ~(audit.errors <= limits[:, None]).all(axis=1)
        self.faults = np.where(audit.heads[:, None], np.roll(self.faults, 1, axis=1), self.faults)
        self.faults[audit.heads, 0] = broke[audit.heads]
        unproven = ~(self.summary(now).bounds <= limits)
        leave = broke & (unproven | (self.faults.sum(axis=1) >= RECENT_FAULTS))
        self._withdraw(leave, now)
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
        habitual = ~self.broken & (self.stale == STALE_QUERIES)
        for head in np.flatnonzero(counts).tolist():
            errors = self.errors[head, : counts[head]]
            bounds[head], least[head] = float(upper_bound(errors)), float(lower_bound(errors))
            if habitual[head] and counts[head] < AUDITS_MIN:
                bounds[head] = self.habit.proves(errors, np.arange(heads) == head)
            median[head], largest[head] = float(np.median(errors)), float(errors.max())
            guards[head] = self.missed[head, : counts[head]].max()
        time_share = float(np.quantile(self.times, 0.25)) if len(self.times) else None
        ranges, given_up = self._ranges(), self.given_up.copy()
        habit = self.habit if habitual.all() else NO_HABIT
        return WayEvidence(counts, bounds, least, guards, ranges, median, largest, given_up, waits, time_share, self.rows, habit)

    def _ranges(self) -> Float32:
        """See `WayEvidence`. Without audits enough, everything is in range."""
        least, most = self.seen
        with np.errstate(invalid="ignore"):
            margin = np.maximum(RANGE_MARGIN * (most - least), RANGE_MARGIN_MIN)
            ranges = np.stack([least - margin, most + margin])
        unknown = (least > most) | ~self._rows(self.counts >= RANGE_AUDITS)
        return np.where(unknown, np.array([-np.inf, np.inf]).reshape(2, 1, 1), ranges).astype(np.float32)

    def _rows(self, heads: Bools) -> Bools:
        """The query heads of some KV heads, bool `[q_heads, ...]` for `[kv_heads, ...]`."""
        return np.repeat(heads, self.seen.shape[2] // len(self.counts), axis=0)

    def _see(self, seen: Float32, signs: Float32, heads: Bools) -> None:
        """Widen what was seen by the signs of these heads and queries, bool `[kv_heads, n]`."""
        shown = np.where(self._rows(heads), signs, np.float32(np.nan))
        seen[0] = np.fmin(seen[0], np.fmin.reduce(shown, axis=2))
        seen[1] = np.fmax(seen[1], np.fmax.reduce(shown, axis=2))

    def _count(self, head: int, errors: Float32, missed: Float32) -> None:
        for error, left_out in zip(errors.tolist(), missed.tolist(), strict=True):
            if self.counts[head] == self.errors.shape[1] < SAMPLES_MAX:
                self.errors, self.missed = (np.concatenate([a, np.zeros_like(a)], axis=1) for a in (self.errors, self.missed))
            place = self.counts[head] % SAMPLES_MAX
            self.errors[head, place], self.missed[head, place] = error, left_out
            self.counts[head] += 1

    def _withdraw(self, heads: Bools, now: int) -> None:
        self._forget(heads)
        self.waits_until[heads] = now + self.withdrawn[heads]
        self.withdrawn[heads] = np.minimum(2 * self.withdrawn[heads], WITHDRAWN_QUERIES_MAX)

    def _forget_unlike(self, heads: Bools) -> None:
        self.unlike_counts[heads] = 0
        self.unlike_seen[..., self._rows(heads)] = _nothing_seen(1)

    def _forget(self, heads: Bools) -> None:
        self.seen[..., self._rows(heads)] = _nothing_seen(1)
        self._forget_unlike(heads)
        self.counts[heads] = 0
        self.faults[heads] = False
        self.given_up[heads] = 0
        self.rows = np.where(heads, np.float32(np.nan), self.rows)
        self._summary = None


def _nothing_seen(q_heads: int) -> Float32:
    """What was seen of signs before there was an audit."""
    return np.broadcast_to(np.array([np.inf, -np.inf], np.float32).reshape(2, 1, 1), (2, SIGNS, q_heads)).copy()
