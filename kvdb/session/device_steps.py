"""Decode steps of a layer whose arrays lie on the GPU that holds its tokens, and stay there.

A step like the one before it needs nothing of main memory: its token is appended on the GPU, and answered by the same plan. What
the session counts, samples and stores of such steps comes to main memory when anything else is asked of the session, and when as
many were taken as main memory was kept free for. A step that was given numbers which are not finite is found out then, and ends
the steps: it and what followed it are forgotten, and the next call says so.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import Any, Self

from kvdb.attention.block_run import BlockRun
from kvdb.attention.exact import AttentionStats
from kvdb.attention.partition import RunPartition
from kvdb.attention.resident import ResidentSteps, StepsOnDevice
from kvdb.catalog.segments.tail import Tail
from kvdb.errors import CapacityError, GpuLost, NonFiniteError
from kvdb.gpu.interface import GpuInterface
from kvdb.planning.planner import Planner
from kvdb.session.host_steps import blocks_ahead
from kvdb.session.observed_queries import ObservedQueries, tells
from kvdb.session.query_samples import QuerySamples
from kvdb.session.runner import Course, Starts, StepsTaken
from kvdb.types import Float32
from query_optimizer.query_options import NO_OPTIONS, QueryOptions

NOTHING = AttentionStats(0, 0, 0, 0)


class DeviceSteps:
    """The steps of one layer of a session of a database with a GPU; see `kvdb.session.runner.StepRunner`. Native code takes none
    there.

    resident: the steps on the GPU, None while none may be taken.
    """

    def __init__(
        self, run: BlockRun, tail: Tail, planner: Planner, query_samples: QuerySamples, observed: ObservedQueries
    ) -> None:
        self.resident: ResidentSteps | None = None
        self._run = run
        self._tail = tail
        self._planner = planner
        self._query_samples = query_samples
        self._observed = observed
        self._course: Course | None = None
        self._asked = NO_OPTIONS
        self._wanted = False
        self._left = self._taken = self._gpu_version = self._last_ns = 0
        self._sample_next()

    def set_sinks(self, sinks: Float32 | None) -> None:
        assert sinks is None, "a layer with sinks is answered in main memory"

    @property
    def running(self) -> bool:
        return self._course is not None

    @property
    def halted(self) -> bool:
        """Never: nothing but a step that is planned lets these steps go on."""
        return False

    def run(self, q: Any, k: Any, v: Any, options: QueryOptions, start: int | None) -> Any | None:
        """Tensors on the GPU. Numbers that are not finite are found out by a later call."""
        if self.resident is None or not self._may_go_on(options, start):
            self._want(q)
            return None
        try:
            out = self.resident.attend(q, k, v)
        except (CapacityError, GpuLost):
            self._left = 0  # taking those that were taken tells what that means
            return None
        if out is None:
            self._wanted = self.gpu is not None and self.gpu.holds(q)
        else:
            self._count_step()
        return out

    def run_with(self, others: Sequence[Self], q: Any, k: Any, v: Any, options: QueryOptions, starts: Starts) -> Any | None:
        """Tensors on the GPU, one launch for all."""
        steps = self, *others
        residents = [own.resident for own in steps if own.resident is not None]
        begins = [None] * len(steps) if starts is None else starts
        ready = len(begins) == len(residents) == len(set(map(id, steps))) == len(steps)
        if self.gpu is None or not ready or not all(map(lambda own, start: own._may_go_on(options, start), steps, begins)):
            for own in steps:
                own._want(q)
            return None
        try:
            out = self.gpu.attend_resident(residents, q, k, v)
        except (CapacityError, GpuLost):
            for own in steps:
                own._left = 0
            return None
        if out is not None:
            for own in steps:
                own._count_step()
        return out

    @property
    def gpu(self) -> GpuInterface | None:
        return self._planner.gpu

    def begin(
        self,
        course: Course,
        asked: QueryOptions,
        steps: int,
        keeps: int,  # noqa: ARG002  # queries and answers: none are, they lie on the GPU
    ) -> None:
        run, table, prepared = self._run, self._tail.table, course.prepared
        device, gpu, facts = prepared.partition.device, self.gpu, self._planner.facts_of(prepared)
        allowed = min(steps, prepared.uses_left, prepared.plan.tokens_end - 1 - run.read_tokens)
        if (
            not self._wanted
            or device is None
            or gpu is None
            or facts is None
            or allowed <= 0
            or self._reads_here(prepared.partition)
        ):
            return
        bound = inf if course.options.max_missed_mass is None else course.options.max_missed_mass
        try:
            resident = gpu.resident(device)
            if resident is None:
                return
            if not table.room:
                table.reserve_ahead(blocks_ahead(self._tail))
                run.refresh(table.length)
            self._left = min(allowed, table.room)
            resident.begin(self._left, prepared.partition.guards, prepared.partition.ranges, bound)
        except (CapacityError, GpuLost):
            return  # the next step goes by main memory, and says what is wrong
        self._course, self._asked, self._facts, self.resident = course, asked, facts, resident
        self._gpu_version = gpu.version
        self._sample_next()

    def stop(self) -> None:
        self._course = self.resident = None
        self._left = 0

    def resume(self) -> bool:
        return False

    def collect(self) -> StepsTaken | None:
        course, resident, table = self._course, self.resident, self._tail.table
        if course is None or resident is None or not self._taken:
            return None
        try:
            taken = resident.take(self._taken)
        except GpuLost as error:
            lost = GpuLost(f"{error}; the last {self._taken} tokens of the layer, which were there alone, are lost")
            self._end()
            return StepsTaken(course, 0, NOTHING, 0, lost)
        before, tokens = table.length, self._run.tokens
        self._taken = 0
        for k, v in taken.pairs:
            table.append(k, v)
        self._run.refresh(before)
        self._sample_taken(taken)
        course.prepared.uses_left -= taken.number
        if tells(1, course.options):
            self._observed.pass_by(taken.number)
        failed = None
        if taken.failed:
            self._end()
            failed = NonFiniteError(
                f"q, k or v of the token at position {tokens + taken.number}, or its answer, hold NaN or infinity; it and what "
                "followed it on the GPU is forgotten; find where the model produced them"
            )
        seen = taken.number * tokens + taken.number * (taken.number + 1) // 2
        return StepsTaken(course, taken.number, taken.stats, seen, failed)

    def last_kernel(self) -> tuple[int, int]:
        return self._last_ns, 1

    def planned(self, kernel_ns: int) -> None:
        self._last_ns = kernel_ns

    def _want(self, q: Any) -> None:
        """Take steps from the next on, if this query lies on the GPU."""
        self._wanted = self._wanted or (self.gpu is not None and self.gpu.holds(q))

    def _may_go_on(self, options: QueryOptions, start: int | None) -> bool:
        """Whether one more step may be taken, of the token at this position."""
        gpu = self.gpu
        if self._left <= 0 or gpu is None or gpu.version != self._gpu_version:
            return False
        for changes, value in self._facts:
            if changes.value != value:
                return False
        same = options is self._asked or options == self._asked
        return same and (start is None or start == self._run.tokens + self._taken)

    def _count_step(self) -> None:
        """One more step was taken."""
        if self._taken == self._next_kept:
            assert self.resident is not None
            with suppress(CapacityError, GpuLost):
                self.resident.keep_query()
                self._kept.append(self._taken)
            self._next_kept += self._every
        self._taken += 1
        self._left -= 1

    def _end(self) -> None:
        """Forget what only the GPU holds of the tail."""
        self._taken = self._left = 0
        self._tail.truncated()

    def _reads_here(self, partition: RunPartition) -> bool:
        """Whether any token is answered for by the CPU."""
        return bool(partition.searched or partition.whole or len(partition.cpu_blocks(self._run).addresses))

    def _sample_taken(self, taken: StepsOnDevice) -> None:
        """Add the queries that were kept to the sample, those in between as passed by."""
        samples, seen = self._query_samples, 0
        for number, query in zip(self._kept, taken.queries, strict=True):
            if number < taken.number:
                samples.pass_by(number - seen)
                samples.add(query)
                seen = number + 1
        samples.pass_by(taken.number - seen)
        if taken.number:
            samples.last = taken.last_query
        self._sample_next()

    def _sample_next(self) -> None:
        self._every = self._query_samples.every
        self._next_kept = self._query_samples.next_in if self._every else -1
        self._kept: list[int] = []
