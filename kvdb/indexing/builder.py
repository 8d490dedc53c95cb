"""The threads that build indexes while sessions go on, step by step: first those that somebody waits for, then the cheapest."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Condition
from time import perf_counter, sleep
from typing import NamedTuple
from weakref import WeakSet

import kvdb.catalog.segments.index_files as index_files
import kvdb.validate as validate
from indexes.accelerate import Accelerator
from kvdb.catalog.segments.index_set import Progress
from kvdb.catalog.segments.segment import Segment
from kvdb.errors import CapacityError, KvdbError, Unavailable
from kvdb.events import Events, Kind
from kvdb.hardware.priority import work_in_background
from kvdb.indexing.background_time import BackgroundTime
from kvdb.indexing.build import Build, abandoned, missing_layers
from kvdb.indexing.build_costs import BuildCosts
from kvdb.storage.loader import Loader

log = logging.getLogger(__name__)
LOAD_BYTES_PER_SECOND = 1e9
"""How fast an index is read from its file, roughly; it decides which build comes first."""
TURN_SECONDS = 0.01
"""How often a build looks whether there is time for it beside steps."""
NICE = 10
"""The nice value that building threads add to that of their process, on Linux."""


class Ending(NamedTuple):
    """A build that is over. error: why it was not finished, None if it was."""

    build: Build
    error: BaseException | None


class Due(NamedTuple):
    """Work for the thread that gave up the builder's lock: steps to follow, and builds that are over."""

    steps: list[tuple[Build, Future[None]]]
    endings: list[Ending]


class IndexBuilder:
    """Builds indexes layer by layer, and offers each as soon as it is built. Thread-safe.

    After each step, the build that comes first goes on: requested builds come before those that will merely pay, and then the one
    with the least to do. A build is given up when nobody else holds its segment: a waiting build keeps no dropped context alive,
    and the one under way does so only until its step ends. A build that raises is logged, shows in its `Progress`, and begins
    anew only when it is requested.

    threads: how many builds run at once. nbytes_max: the memory that the indexes of all segments may take, None for no limit.
    loader: brings segments in from disk. accelerator: a device that takes part in builds, None for none. events: told of every
    build that is over. time: what builds that nobody waits for may take while sessions step; None where none does.
    """

    def __init__(
        self,
        loader: Loader,
        threads: int,
        nbytes_max: int | None = None,
        accelerator: Accelerator | None = None,
        events: Events | None = None,
        time: BackgroundTime | None = None,
    ) -> None:
        self._loader = loader
        self._time = BackgroundTime() if time is None else time
        self.costs = BuildCosts()
        self.nbytes_max = nbytes_max
        self._threads = threads
        self._accelerator = accelerator
        self._executor = ThreadPoolExecutor(threads, "kvdb-index", initializer=work_in_background)
        self._builds: dict[tuple[int, str], Build] = {}
        self._ending: list[Build] = []  # over, but `_end` has not yet released what they hold
        self._indexed: WeakSet[Segment] = WeakSet()
        self._stopping = False
        self._events = events or Events()
        self._changed = Condition()

    def request(self, segments: Sequence[Segment], kind: str) -> list[Future[None]]:
        """Build that kind over each of the segments where it is missing: futures of these builds.

        Raises InvalidArgument for a kind that does not exist, CapacityError, before anything is begun, where the indexes would
        take more memory than they may, and Unavailable. A future raises what the build raised: Unsupported where the kind's
        library is missing, Unavailable when the database was closed, or the segment was freed or cannot come in from disk.
        """
        validate.kind(kind)
        with self._changed:
            if self._stopping:
                raise Unavailable("the database is closed; connect again")
            self._check_room([segment for segment in segments if (segment.number, kind) not in self._builds], kind)
            futures = [self._add(segment, kind, requested=True) for segment in segments]
            due = self._dispatch()
        self._carry_out(due)
        return futures

    def schedule(self, segment: Segment, kind: str) -> None:
        """Build that kind when no requested build is left, if there is room for it and it did not fail before."""
        with self._changed:
            known = segment.indexes.progress.get(kind)
            failed = known is not None and known.state == "failed"
            if self._stopping or failed or not segment.references or not self._has_room([segment], kind):
                return
            self._add(segment, kind, requested=False)
            due = self._dispatch()
        self._carry_out(due)

    def load(self, segment: Segment) -> None:
        """Bring back in the background the indexes over a segment that are on disk and not in memory, as far as there is room."""
        for kind in index_files.kept(segment):
            if missing_layers(segment, kind):
                self.schedule(segment, kind)

    def nbytes(self) -> int:
        """The memory of all indexes in bytes; unfinished ones count as finished."""
        with self._changed:
            kept = sum(segment.indexes.nbytes for segment in self._indexed)
            return kept + sum(self._missing_nbytes(build.segment, build.kind) for build in self._builds.values())

    def held_segments(self) -> list[Segment]:
        """The segments that builds hold now."""
        with self._changed:
            return [build.segment for build in (*self._builds.values(), *self._ending) if build.holds_segment]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being built or waits to be built. Returns whether that came within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._builds and not self._ending, timeout)

    def close(self) -> None:
        """Stop after the steps under way. Closing twice does nothing."""
        with self._changed:
            self._stopping = True
            idle = [build for build in self._builds.values() if not build.running]
            due = Due([], [self._finish(build, _closed()) for build in idle])
        self._carry_out(due)
        self._executor.shutdown()

    def _add(self, segment: Segment, kind: str, *, requested: bool) -> Future[None]:
        """The future of a build, which is added unless there is one already; called with the lock held."""
        build = self._builds.get((segment.number, kind))
        if build is None:
            build = Build(segment, kind, requested=requested)
            if not build.layers:
                build.future.set_result(None)
                return build.future
            self._indexed.add(segment)
            self._builds[build.key] = build
            self._report(build, "waiting")
        build.requested |= requested
        return build.future

    def _dispatch(self) -> Due:
        """Give up builds over segments that nobody else holds, and give the free threads their next steps; called with the lock
        held."""
        idle = [build for build in self._builds.values() if not build.running]
        due = Due([], [self._finish(build, abandoned()) for build in idle if self._is_abandoned(build.segment)])
        while not self._stopping and sum(build.running for build in self._builds.values()) < self._threads:
            waiting = [build for build in self._builds.values() if not build.running]
            if not waiting:
                break
            build = min(waiting, key=lambda build: (not build.requested, self._seconds_left(build)))
            try:
                due.steps.append((build, self._executor.submit(self._run_step, build)))
            except RuntimeError:  # the interpreter is ending, and nobody will wait for this
                break
            build.running = True
        return due

    def _carry_out(self, due: Due) -> None:
        """Follow steps and end builds; called without the lock, because both may take other locks and call back."""
        for build, step in due.steps:
            step.add_done_callback(partial(self._step_done, build))
        for ending in due.endings:
            build = ending.build
            build.release()
            with self._changed:
                self._ending.remove(build)
                self._changed.notify_all()
            if ending.error is None:
                build.future.set_result(None)
            else:
                build.future.set_exception(ending.error)

    def _run_step(self, build: Build) -> None:
        """One step, in a thread of the executor; its future keeps what the step raises."""
        build.acquire(self._loader)
        self._report(build, "building")
        began = self._await_turn(build)
        layer = build.layers[0]
        loaded = build.load()
        index = loaded or build.step(self._accelerator)
        if index is not None:
            build.segment.indexes.put(layer, index)
        if index is not None and loaded is None:
            index_files.keep(build.segment, layer, index)
            self.costs.learn(build.kind, build.segment, build.layer_seconds)
            build.seconds, build.layer_seconds = build.seconds + build.layer_seconds, 0.0
        if not build.requested and self._time.stepping():
            build.step_seconds = perf_counter() - began
            self._time.spend(build.step_seconds)

    def _await_turn(self, build: Build) -> float:
        """Wait until there is time for one more step of a build: at once where somebody waits for it, or for another one that
        comes first, and where no session steps. Returns when that was."""
        while not (build.requested or self._stopping or self._time.allows_build(build.step_seconds)) and self._time.stepping():
            if any(other.requested for other in list(self._builds.values())):
                break
            sleep(TURN_SECONDS)
        return perf_counter()

    def _step_done(self, build: Build, step: Future[None]) -> None:
        error = step.exception()
        with self._changed:
            build.running = False
            if error is None and build.layers and self._stopping:
                error = _closed()
            endings = []
            if error is not None or not build.layers:
                endings.append(self._finish(build, error))
            else:
                self._report(build, "building")
            due = self._dispatch()
        self._carry_out(Due(due.steps, endings + due.endings))

    def _finish(self, build: Build, error: BaseException | None) -> Ending:
        """Take a build off the list; called with the lock held. `_carry_out` releases what it holds."""
        del self._builds[build.key]
        self._ending.append(build)
        if error is None:
            self._report(build, "ready")
            self._tell(Kind.INDEX_BUILT, build)
        elif isinstance(error, Unavailable):  # given up, which is not a failure of the kind
            build.segment.indexes.report(build.kind, None)
        else:
            self._report(build, "failed", str(error) if isinstance(error, KvdbError) else f"{type(error).__name__}: {error}")
            self._tell(Kind.INDEX_FAILED, build)
            log.error("index %s of segment %d cannot be built", build.kind, build.segment.number, exc_info=error)
        return Ending(build, error)

    def _tell(self, kind: Kind, build: Build) -> None:
        self._events.tell(kind, index=build.kind, segment=build.segment.number, seconds=build.seconds)

    def _report(self, build: Build, state: str, error: str = "") -> None:
        total, spent = len(build.segment.tables), build.seconds + build.layer_seconds
        share = (total - len(build.layers) + build.share) / total
        expected = spent if state == "ready" else spent + self._seconds_left(build)
        build.segment.indexes.report(build.kind, Progress(state, share, spent, expected, error))

    def _seconds_left(self, build: Build) -> float:
        """Seconds that the rest of a build is expected to take."""
        cost = self.costs.of(build.kind, build.segment)
        loads = len(index_files.kept(build.segment).get(build.kind, set()).intersection(build.layers))
        return cost.seconds * max(len(build.layers) - loads - build.share, 0.0) + cost.nbytes * loads / LOAD_BYTES_PER_SECOND

    def _is_abandoned(self, segment: Segment) -> bool:
        """Whether nobody but builds holds the segment."""
        return segment.references <= sum(build.segment is segment and build.holds_segment for build in self._builds.values())

    def _missing_nbytes(self, segment: Segment, kind: str) -> int:
        return round(self.costs.of(kind, segment).nbytes * len(missing_layers(segment, kind)))

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


def _closed() -> Unavailable:
    return Unavailable("the database was closed while an index was built")
