"""The threads that build indexes while sessions go on: what somebody waits for first, then the cheapest, step by step."""

import logging
import os
import sys
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock, get_native_id
from time import perf_counter
from weakref import WeakSet

import indexes._native as _native
import indexes.registry as registry
import kvdb.check as check
from indexes.accelerate import Accelerator
from indexes.base import Index
from kvdb.catalog.indexes import Progress
from kvdb.catalog.segment import Segment
from kvdb.errors import CapacityError, KvdbError, Unavailable, Unsupported
from kvdb.prices import Prices
from kvdb.storage.loader import Loader

log = logging.getLogger(__name__)
NICE = 10
"""By how much builds give way to everything else, on Linux."""


class Build:
    """One kind over one segment. layers: those without an index, the first of which is being built. asked: somebody said so,
    which comes before what would merely pay. seconds: spent, layer_seconds on the first layer alone. share: of it, what is done.
    """

    def __init__(self, segment: Segment, kind: str, *, asked: bool, layers: Sequence[int]) -> None:
        self.segment = segment
        self.kind = kind
        self.asked = asked
        self.layers = deque(layers)
        self.future: Future[None] = Future()
        self.steps: Generator[float, None, Index] | None = None
        self.running = False
        self.seconds = self.layer_seconds = self.share = 0.0

    @property
    def key(self) -> tuple[int, str]:
        return self.segment.number, self.kind

    def step(self, accelerator: Accelerator | None) -> Index | None:
        """Go on with the first layer; its index, once it stands. Raises Unsupported, and whatever the kind's build does."""
        layer, started = self.layers[0], perf_counter()
        if self.steps is None:
            self.segment.wait(layer)
            keys = self.segment.tables[layer].keys(len(self.segment))
            self.steps = registry.build_steps(self.kind, keys, self.segment.indexes.samples.get(layer), accelerator)
        try:
            self.share = next(self.steps)
        except StopIteration as done:
            self.steps, self.share = None, 0.0
            self.layers.popleft()
            index: Index = done.value
            return index
        except ModuleNotFoundError as error:
            raise Unsupported(
                f"an index of the kind {self.kind!r} needs {error.name}, which is not installed; pip install 'kvdb[hnsw]'"
            ) from None
        finally:
            self.layer_seconds += perf_counter() - started
        return None


class IndexBuilder:
    """Builds indexes layer by layer, each offered as soon as it stands. Thread-safe.

    After each step, the next is that of the build that comes first: one that was asked for before one that will merely pay, then
    the one with the least to do. A segment lives as long as something is built over it; what nobody else holds any more is given
    up. A build that raises is logged, is said by `Progress`, and begins anew only when it is asked for.

    threads: how many builds go on at once. nbytes_max: what the indexes of all segments may keep, None for no limit. loader: of
    segments that are on disk. accelerator: a device that takes part, None for none.
    """

    def __init__(
        self, loader: Loader, threads: int, nbytes_max: int | None = None, accelerator: Accelerator | None = None
    ) -> None:
        self._loader = loader
        self.prices = Prices()
        self.nbytes_max = nbytes_max
        self._threads = threads
        self._accelerator = accelerator
        self._executor = ThreadPoolExecutor(threads, "kvdb-index", initializer=_give_way)
        self._builds: dict[tuple[int, str], Build] = {}
        self._indexed: WeakSet[Segment] = WeakSet()
        self._stopping = False
        self._lock = Lock()

    def want(self, segments: Sequence[Segment], kind: str) -> list[Future[None]]:
        """Build that kind over each of the segments where it is missing: futures of these builds.

        Raises InvalidArgument for a kind that does not exist, CapacityError before anything is begun where the indexes would keep
        more than they may, Unavailable. The segments are in main memory, see `tiering.bring_in`. A future raises what the build
        raised: Unsupported where the kind's library is missing, Unavailable when the database was closed.
        """
        check.kind(kind)
        with self._lock:
            if self._stopping:
                raise Unavailable("the database is closed; connect again")
            self._check_room([segment for segment in segments if (segment.number, kind) not in self._builds], kind)
            futures = [self._begin(segment, kind, asked=True) for segment in segments]
            turns = self._dispatch()
        self._follow(turns)
        return futures

    def wish(self, segment: Segment, kind: str) -> None:
        """Build that kind when nothing that was asked for is to be done, if there is room for it and it did not fail before."""
        with self._lock:
            failed = kind in segment.indexes.progress and segment.indexes.progress[kind].state == "failed"
            if self._stopping or failed or not self._has_room([segment], kind):
                return
            with suppress(CapacityError, Unavailable):  # of a segment on disk, which cannot come in
                self._begin(segment, kind, asked=False)
            turns = self._dispatch()
        self._follow(turns)

    def nbytes(self) -> int:
        """What all indexes keep, those under way as if they were done."""
        kept = sum(segment.indexes.nbytes for segment in list(self._indexed) if segment.references)
        return kept + sum(self._missing_nbytes(build.segment, build.kind) for build in list(self._builds.values()))

    def close(self) -> None:
        """Stop after the steps under way. Closing twice does nothing."""
        with self._lock:
            self._stopping = True
            idle = [build for build in self._builds.values() if not build.running]
            for build in idle:
                self._settle(build, _closed())
        for build in idle:
            _end(build, _closed())
        self._executor.shutdown()

    def _begin(self, segment: Segment, kind: str, *, asked: bool) -> Future[None]:
        """With the lock held."""
        build = self._builds.get((segment.number, kind))
        if build is None:
            build = Build(segment, kind, asked=asked, layers=_missing(segment, kind))
            if not build.layers:
                build.future.set_result(None)
                return build.future
            segment.pin(self._loader)
            segment.retain()
            self._indexed.add(segment)
            self._builds[build.key] = build
            self._say(build, "waiting")
        build.asked |= asked
        return build.future

    def _dispatch(self) -> list[tuple[Build, Future[None]]]:
        """Give the free threads their next steps; with the lock held. What it returns is for `_follow`, without the lock."""
        turns = []
        while not self._stopping and sum(build.running for build in self._builds.values()) < self._threads:
            waiting = [build for build in self._builds.values() if not build.running]
            if not waiting:
                break
            build = min(waiting, key=lambda build: (not build.asked, self._left(build)))
            try:
                turns.append((build, self._executor.submit(self._turn, build)))
            except RuntimeError:  # the interpreter ends, and nobody will wait for this
                break
            build.running = True
        return turns

    def _follow(self, turns: list[tuple[Build, Future[None]]]) -> None:
        for build, turn in turns:
            turn.add_done_callback(partial(self._turned, build))

    def _turn(self, build: Build) -> None:
        """One step, in a thread of the executor, whose future keeps what it raises."""
        self._say(build, "building")
        layer = build.layers[0]
        index = build.step(self._accelerator)
        if index is not None:
            build.segment.indexes.put(layer, index)
            self.prices.learn(build.kind, build.segment, build.layer_seconds)
            build.seconds, build.layer_seconds = build.seconds + build.layer_seconds, 0.0

    def _turned(self, build: Build, turn: Future[None]) -> None:
        error = turn.exception()
        with self._lock:
            build.running = False
            if error is None and build.layers:
                error = _closed() if self._stopping else self._abandoned(build.segment)
            ended = error is not None or not build.layers
            if ended:
                self._settle(build, error)
            else:
                self._say(build, "building")
            turns = self._dispatch()
        self._follow(turns)
        if ended:
            _end(build, error)

    def _settle(self, build: Build, error: BaseException | None) -> None:
        """A build is over; with the lock held."""
        del self._builds[build.key]
        if error is None:
            self._say(build, "ready")
        elif isinstance(error, Unavailable):  # given up, which is no failure of the kind
            build.segment.indexes.progress.pop(build.kind, None)
        else:
            self._say(build, "failed", str(error) if isinstance(error, KvdbError) else f"{type(error).__name__}: {error}")
            log.error("index %s of segment %d cannot be built", build.kind, build.segment.number, exc_info=error)

    def _say(self, build: Build, state: str, error: str = "") -> None:
        total, spent = len(build.segment.tables), build.seconds + build.layer_seconds
        share = (total - len(build.layers) + build.share) / total
        expected = spent if state == "ready" else spent + self._left(build)
        build.segment.indexes.progress[build.kind] = Progress(state, share, spent, expected, error)

    def _left(self, build: Build) -> float:
        """Seconds that the rest of a build is expected to take."""
        return self.prices.of(build.kind, build.segment).seconds * (len(build.layers) - build.share)

    def _abandoned(self, segment: Segment) -> Unavailable | None:
        builds = sum(build.segment is segment for build in self._builds.values())
        return (
            Unavailable("nobody holds the segment any more that an index was built over")
            if segment.references <= builds
            else None
        )

    def _missing_nbytes(self, segment: Segment, kind: str) -> int:
        return round(self.prices.of(kind, segment).nbytes * len(_missing(segment, kind)))

    def _has_room(self, segments: Sequence[Segment], kind: str) -> bool:
        more = sum(self._missing_nbytes(segment, kind) for segment in segments)
        return self.nbytes_max is None or not more or self.nbytes() + more <= self.nbytes_max

    def _check_room(self, segments: Sequence[Segment], kind: str) -> None:
        """Raises CapacityError."""
        if not self._has_room(segments, kind):
            more = sum(self._missing_nbytes(segment, kind) for segment in segments)
            raise CapacityError(
                f"an index of the kind {kind!r} would keep about {more:,} bytes beside the {self.nbytes():,} of other indexes; "
                f"expected at most {self.nbytes_max:,} in all, so drop a context, choose another kind or raise indexes.bytes_max"
            )


def _missing(segment: Segment, kind: str) -> list[int]:
    """The layers without an index of that kind."""
    return [layer for layer in range(len(segment.tables)) if kind not in segment.indexes.of(layer)]


def _end(build: Build, error: BaseException | None) -> None:
    """Give back what a build held, and tell those who wait; without the lock."""
    if build.steps is not None:
        build.steps.close()
    build.segment.unpin()
    build.segment.release()
    if error is None:
        build.future.set_result(None)
    else:
        build.future.set_exception(error)


def _closed() -> Unavailable:
    return Unavailable("the database was closed while an index was built")


def _give_way() -> None:
    """Make this thread, and those that it starts, give way to all others, where the system lets one do so."""
    _native.work_in_background()
    if sys.platform == "linux":  # elsewhere a priority is that of the process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)
