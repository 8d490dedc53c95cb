"""Decode steps that native code carries out by itself, from the caller's arrays to the answer.

A step like the one before it needs nothing of Python: the token is appended, its query answered by the same plan, and what that
took is added up. At a full block, and when enough was kept of what steps showed, Python lends a hand between two steps. Whatever
is rarer ends the course: a plan that is used up, new indexes or evidence. Then the step is refused, and `kvdb.session.layer`
carries it out.
"""

import sys
from typing import Any, NamedTuple

import numpy as np

import kvdb._native as _native
from kvdb.attention.block_run import BlockRun
from kvdb.attention.exact import AttentionStats
from kvdb.attention.step import PreparedStep, made_step
from kvdb.catalog.tail import Tail
from kvdb.errors import CapacityError, KvdbError
from kvdb.planning.planner import Planner
from kvdb.planning.prepared import Prepared
from kvdb.session.observed_queries import EVERY, FIRST, ObservedQueries, tells
from kvdb.session.query_samples import QuerySamples
from kvdb.types import Array, ModelSpec
from query_optimizer.query_options import NO_OPTIONS, QueryOptions

AHEAD_MAX, AHEAD_PART = 8, 4
"""Native steps have up to so many blocks at a time, beside the first no more than this part of those that the tail has: each time
costs as much as a few steps."""


class Course(NamedTuple):
    """How steps are carried out: the plan, the options that it was made for, and whether it searches."""

    prepared: Prepared
    options: QueryOptions
    searches: bool


class StepsTaken(NamedTuple):
    """Steps of a course. stats: sums over them, but for the largest bound. tokens: before each, their sum. failed: what was wrong
    with those that followed, which were answered and are forgotten. recent: queries and answers that were kept, `[q_heads, m,
    head_dim]`, those of the last tokens."""

    course: Course
    number: int
    stats: AttentionStats
    tokens: int
    failed: KvdbError | None = None
    recent: tuple[Array, Array] | None = None


class NativeSteps:
    """The native steps of one layer. The caller holds the session's turn. asked: the options that callers hand in for these
    steps. native: for `_native.take_steps`, which takes steps of several sessions."""

    __slots__ = (
        "_advanced",
        "_allowed",
        "_course",
        "_dtype",
        "_facts",
        "_left",
        "_observed",
        "_planner",
        "_query_samples",
        "_run",
        "_shape",
        "_step",
        "_tail",
        "_takes_tensors",
        "asked",
        "native",
    )

    def __init__(
        self,
        spec: ModelSpec,
        run: BlockRun,
        tail: Tail,
        planner: Planner,
        query_samples: QuerySamples,
        observed: ObservedQueries,
    ) -> None:
        self._shape = spec.q_heads, 1, spec.head_dim
        self._dtype = spec.numpy_dtype
        self._run = run
        self._tail = tail
        self._planner = planner
        self._query_samples = query_samples
        self._observed = observed
        native = tail.table.layout.native
        self.native = _native.LayerSteps(native, spec.q_heads, spec.softmax_scale, np.empty(0, self._dtype))
        self._course: Course | None = None
        self._step: PreparedStep | None = None
        self._facts: list[tuple[_native.Version, int]] = []
        self._allowed = self._left = self._advanced = 0
        """How many steps everything but the room of blocks still allows and how many native code may take, when last looked at;
        and how many of those that are not counted yet the tail has in its length already."""
        self.asked = NO_OPTIONS
        self._takes_tensors = False

    def attend(self, q: Any, k: Any, v: Any, options: QueryOptions, start: int | None) -> Any | None:
        """Append one token and answer its query, `[q_heads, 1, head_dim]`, as `SessionState.attend` does; arrays of numpy or
        tensors of torch in main memory. None where the step is not for native code alone, which includes every wrong argument;
        then nothing was done."""
        if self._course is None:
            return None
        if type(q) is not np.ndarray and not self._takes_tensors:
            self._take_tensors()
        return self.native.step(q, k, v, options, start)

    def follow(self, course: Course, asked: QueryOptions, steps: int) -> None:
        """Go on by the plan that answered the last query. asked: the options as the caller handed them in. steps: how many may be
        taken at most."""
        run, tail, prepared = self._run, self._tail, course.prepared
        if self._planner.gpu is not None:
            return
        step = made_step(prepared.partition, course.options, prepared.plan.retrieval) if course.searches else None
        allowed = min(
            steps,
            prepared.uses_left,
            prepared.plan.tokens_end - 1 - run.read_tokens,
            tail.until_seal if prepared.indexes_tail else steps,
        )
        facts = self._planner.facts_of(prepared)
        if min(allowed, tail.table.room) <= 0 or facts is None or (course.searches and step is None):
            return
        self._course, self._step, self.asked, self._facts = course, step, asked, facts
        self._allowed = allowed
        self._begin()
        self.native.observe_next(self._observed.asked if tells(1, course.options) else -1, FIRST, EVERY)
        self._sample_next()

    def keep_last(self, most: int) -> None:
        """Keep the last `most` queries and their answers, until these steps end."""
        if self._course is not None:
            self.native.keep_last(most)

    def go_further(self, course: Course, steps: int) -> None:
        """Go on by the same plan, in blocks behind the last where that is full. What was taken has to be counted before."""
        table, run = self._tail.table, self._run
        if not table.room:
            try:
                table.reserve_ahead(self._blocks_ahead())
            except CapacityError:
                return  # the next append makes room, or says that there is none
            run.refresh(table.length)
        self.follow(course, self.asked, steps)

    def extend(self) -> bool:
        """Go on into blocks behind the last, where it is full and nothing else has ended these steps, which need not be counted
        for that. False where more has to be looked at; then nothing was done, but that the tail may have its length."""
        table, run = self._tail.table, self._run
        before = table.length
        taken = self._look()
        table.length += taken
        self._advanced += taken
        if self._step is not None or self._allowed <= 0 or table.room:
            return False
        try:
            table.reserve_ahead(self._blocks_ahead())
        except CapacityError:
            return False
        run.refresh(before)
        self._begin()
        return True

    @property
    def halted(self) -> bool:
        """Whether the steps that may be taken have been taken, or what they showed has to be, and nothing else stopped them."""
        return self._course is not None and self.native.halted

    def stop(self) -> None:
        """Refuse further steps, until `follow`. What was taken has to be counted before."""
        if self._course is not None:
            self._course = self._step = None
            self.native.stop()

    def take(self) -> StepsTaken | None:
        """The steps since the last time, None for none. From then on the tail, the sample of queries and the statistics know them
        too."""
        if self._course is None:
            return None
        samples = self.native.take_samples()
        totals = self.native.take_totals()
        table = self._tail.table
        before = table.length - self._advanced
        table.length += self._look()
        self._advanced = 0
        if not totals.steps:
            return None
        self._run.refresh(before)
        self._sample(totals.steps, samples)
        self._observe(totals.steps)
        self._course.prepared.uses_left -= totals.steps
        stats = AttentionStats(
            scanned=totals.scanned,
            retrieved=totals.retrieved,
            nbytes=totals.nbytes,
            kernel_ns=totals.ns,
            missed=totals.missed,
            missed_bound=totals.bound,
            missed_bound_max=totals.bound_max,
            search_ns=totals.search_ns,
            gather_ns=totals.gather_ns,
        )
        return StepsTaken(self._course, totals.steps, stats, totals.tokens, recent=self._recent())

    def _begin(self) -> None:
        """Let native code take steps, as many as are allowed and the tail has room for."""
        run = self._run
        self._left = min(self._allowed, self._tail.table.room)
        reads = *run.arrays, run.blocks, run.all_blocks.placement
        step = None if self._step is None else self._step.native
        self.native.follow(self.asked, step, *reads, run.tokens, self._left, self._facts)

    def _look(self) -> int:
        """How many steps were taken since this was last asked."""
        taken = self._left - self.native.left
        self._left -= taken
        self._allowed -= taken
        return taken

    def _blocks_ahead(self) -> int:
        table = self._tail.table
        return min(AHEAD_MAX, 1 + table.length // table.layout.block_size // AHEAD_PART)

    def _take_tensors(self) -> None:
        """Take tensors of torch from now on, if there are any: whoever has one has imported it."""
        torch = sys.modules.get("torch")
        if torch is not None:
            self.native.take_tensors(torch.Tensor, getattr(torch, self._dtype.name))
            self._takes_tensors = True

    def _sample(self, steps: int, kept: list[tuple[int, bytes]]) -> None:
        """Add the queries of these steps to the sample, those in between as passed by."""
        seen = 0
        for number, query in kept:
            self._query_samples.pass_by(number - seen)
            self._query_samples.add(self._query(query))
            seen = number + 1
        self._query_samples.pass_by(steps - seen)
        self._query_samples.last = self._query(self.native.last_query())
        self._sample_next()

    def _observe(self, steps: int) -> None:
        """Tell the parts that were searched what these steps showed."""
        assert self._course is not None
        if tells(1, self._course.options):
            self._observed.pass_by(steps)
        if self._step is not None:
            self._step.tell(self.native.take_observations())

    def _recent(self) -> tuple[Array, Array] | None:
        """See `StepsTaken`."""
        q_heads, _, head_dim = self._shape
        bits = self.native.recent()
        if not bits[0]:
            return None
        q, out = (np.frombuffer(one, self._dtype).reshape(-1, q_heads, head_dim).transpose(1, 0, 2) for one in bits)
        return q, out

    def _query(self, bits: bytes) -> Array:
        return np.frombuffer(bits, self._dtype).reshape(self._shape)

    def _sample_next(self) -> None:
        self.native.sample_next(self._query_samples.next_in, self._query_samples.every)
