"""What the database says of what was done: counters of sessions, statistics of queries, and what tiers hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvdb.types.arrays import Float32


@dataclass(frozen=True)
class SessionStats:
    """What a session holds and has done. A token counts once for each call and each group of query heads that read it.

    tokens_scanned: looked at in whatever form; tokens_retrieved: attended. missed_mass: the share of the softmax mass that a call
    left out, an estimate; missed_mass_bound: what that cannot exceed; both are means over the calls. missed_mass_bound_max: the
    largest bound of any query. rules: how many calls each rule of the optimizer decided.

    error_audits: how many answers within an error_max were compared with exact ones, of one layer each. error_median, error_p95,
    error_max_seen: how far they were from these, relative to the layer's output, 0 where there were no audits; the first two are
    of the latest. ways: how many queries of a layer were answered each way; one whose KV heads were answered in several ways
    counts for each of them."""

    tokens: int
    reused: int
    tail_tokens: int
    tail_nbytes: int
    queries: int
    tokens_scanned: int
    tokens_retrieved: int
    bytes_read: int
    kernel_seconds: float
    missed_mass: float
    missed_mass_bound: float
    missed_mass_bound_max: float
    rules: Mapping[str, int] = field(default_factory=dict)
    error_audits: int = 0
    error_median: float = 0.0
    error_p95: float = 0.0
    error_max_seen: float = 0.0
    ways: Mapping[str, int] = field(default_factory=dict)


MEASURES = ("retrieved", "dense", "sharpness", "window_hits")
"""What a search shows of each query, by the names in SegmentStatistics."""
ERROR = "error"
"""What audits show of the answers, by its name in SegmentStatistics."""


@dataclass(frozen=True, eq=False)
class SegmentStatistics:
    """What the queries were like that searched one segment of a context. Arrays are `[layers, q_heads]` and read-only.

    tokens: how many the segment has. queries: int64, how many were observed, a sample of all. The others are float32 averages in
    which the latest queries count most, 0 where none was observed. retrieved: the share of the searched tokens that a query
    needed, 1 where it needed so many that the search gave up. dense: the share of such queries. sharpness: the softmax weight of
    the largest token. window_hits: the share of queries whose largest token lies in the window, outside of what was searched.

    audits: int64, how many answers of the head's KV head were compared with exact ones. error: float32, what the 95th percentile
    of that KV head's error does not exceed, with a confidence of 95 %, relative to the layer's exact output; infinite where the
    audits are too few to say. Both are of the way of answering that errs least of those that were tried."""

    segment: int
    tokens: int
    queries: npt.NDArray[np.int64]
    retrieved: Float32
    dense: Float32
    sharpness: Float32
    window_hits: Float32
    audits: npt.NDArray[np.int64]
    error: Float32

    def at(self, places: Sequence[int | None]) -> Self:
        """The same with these rows, one for each layer, of zeros for None: its error is not known."""
        rows = [-1 if place is None else place for place in places]
        arrays = {}
        for name, array in vars(self).items():
            if np.ndim(array):
                none = np.full_like(array[:1], np.inf if name == "error" else 0)
                arrays[name] = np.append(array, none, axis=0)[rows]
                arrays[name].flags.writeable = False
        return replace(self, **arrays)


@dataclass(frozen=True)
class ContextStatistics:
    """Statistics of every segment of a context, in their order."""

    name: str
    segments: tuple[SegmentStatistics, ...]


@dataclass(frozen=True)
class TierStats:
    """What one tier holds in blocks of one size. nbytes: the memory it takes of its own kind; huge: whether in huge pages.
    pinned_nbytes: main memory that a GPU tier takes beside that, to copy from and to."""

    name: str
    blocks_used: int
    blocks_total: int
    block_nbytes: int
    nbytes: int
    huge: bool
    pinned_nbytes: int = 0


@dataclass(frozen=True)
class DatabaseStatus:
    """How a database is used at the moment. version: of the kvdb that keeps it. uptime_seconds: since it was opened. sessions:
    the open ones. indexes: by kind, over how many segments there is one; building: how many are built or wait for it. calls: of a
    server, how many use the engine, of calls_max, and calls_waiting how many wait for it; all 0 embedded."""

    version: str
    uptime_seconds: float
    contexts: int
    sessions: int
    indexes: Mapping[str, int]
    building: int
    calls: int = 0
    calls_max: int = 0
    calls_waiting: int = 0


@dataclass(frozen=True)
class SessionInfo:
    """An open session, as others are told of it. label: what it was opened under. tokens: how many it holds; reused: how many of
    them were stored when it was opened. queries: calls that were answered."""

    label: str
    tokens: int
    reused: int
    queries: int


@dataclass(frozen=True)
class Activity:
    """Sums over all sessions of a database, those that are closed too; they never become less, but for `sessions_open`.

    queries: calls that were answered. tokens_seen: tokens before them; the share that was attended is tokens_retrieved over it.
    missed_mass, missed_mass_bound: sums over the calls of what `SessionStats` has means of. seconds: of the calls by stage: plan,
    search, gather (what follows a search), attend (what is read whole). rules: calls by the rule of the optimizer that decided.
    prompt_tokens: tokens of the prompts of sessions by where their KV was found: cpu, disk, none."""

    sessions_open: int
    sessions_opened: int
    queries: int
    tokens_seen: int
    tokens_scanned: float
    tokens_retrieved: float
    bytes_read: int
    missed_mass: float
    missed_mass_bound: float
    seconds: Mapping[str, float]
    rules: Mapping[str, int]
    prompt_tokens: Mapping[str, int]


@dataclass(frozen=True)
class Space:
    """The bytes of blocks of all stored contexts, in memory and on disk. held: those that their segments have. reachable: the
    least that hold what they name, where each token that follows the same tokens is held once; compaction brings the former
    towards the latter."""

    held: int
    reachable: int


class CallTimings(NamedTuple):
    """What a server measured of a call, in seconds. queue: from when it came until it was carried out. engine: that. kernel: of
    it, what the attention kernel took, 0 where nobody measured."""

    queue: float
    engine: float
    kernel: float = 0.0
