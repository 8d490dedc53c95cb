"""Decode steps that native code carries out by itself, from the caller's arrays to the answer.

A step like the one before it needs nothing of Python: the token is appended, its query answered by the same plan, and what that
took is added up. At a full block, and when enough was kept of what steps showed, Python lends a hand between two steps.
"""

import sys
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

import kvdb._native as _native
import kvdb.validate as validate
from kvdb.attention.block_run import BlockRun
from kvdb.attention.exact import AttentionStats
from kvdb.attention.shared_prefix import SHARED_TOKENS_MIN
from kvdb.attention.step import PreparedStep, made_step
from kvdb.catalog.segments.tail import Tail
from kvdb.errors import CapacityError
from kvdb.planning.planner import Planner
from kvdb.session.observed_queries import EVERY, FIRST, ObservedQueries, tells
from kvdb.session.query_samples import QuerySamples
from kvdb.session.runner import Course, Starts, StepsTaken
from kvdb.types import Array, Float32, LayerShape
from query_optimizer.query_options import NO_OPTIONS, QueryOptions

AHEAD_MAX, AHEAD_PART = 8, 4
"""Native steps have up to so many blocks at a time, beside the first no more than this part of those that the tail has: each time
costs as much as a few steps."""


def blocks_ahead(tail: Tail) -> int:
    """How many blocks a tail takes for steps that follow."""
    return min(AHEAD_MAX, 1 + tail.table.length // tail.table.layout.block_size // AHEAD_PART)


class HostSteps:
    """The steps of one layer in main memory; see `kvdb.session.runner.StepRunner`."""

    def __init__(
        self,
        shape: LayerShape,
        run: BlockRun,
        tail: Tail,
        planner: Planner,
        query_samples: QuerySamples,
        observed: ObservedQueries,
    ) -> None:
        self._shape = shape.q_heads, 1, shape.head_dim
        self._answer = shape.q_heads, 1, shape.value_dim
        self._dtype = shape.numpy_dtype
        self._run = run
        self._tail = tail
        self._planner = planner
        self._query_samples = query_samples
        self._observed = observed
        native = tail.table.layout.native
        self._native = _native.LayerSteps(native, shape.q_heads, shape.softmax_scale, np.empty(0, self._dtype), shape.window)
        self._course: Course | None = None
        self._step: PreparedStep | None = None
        self._facts: list[tuple[_native.Version, int]] = []
        self._allowed = self._left = self._advanced = 0
        """How many steps everything but the room of blocks still allows and how many native code may take, when last looked at;
        and how many of those that are not counted yet the tail has in its length already."""
        self._asked = NO_OPTIONS
        self._takes_tensors = False

    def set_sinks(self, sinks: Float32 | None) -> None:
        self._native.set_sinks(sinks)

    @property
    def running(self) -> bool:
        return self._course is not None

    @property
    def halted(self) -> bool:
        """Also where what was kept of steps has to be collected."""
        return self._course is not None and self._native.halted

    def run(self, q: Any, k: Any, v: Any, options: QueryOptions, start: int | None) -> Any | None:
        """Arrays of numpy, or tensors of torch in main memory."""
        if self._course is None:
            return None
        if type(q) is not np.ndarray and not self._takes_tensors:
            self._take_tensors()
        return self._native.step(q, k, v, options, start)

    def run_with(self, others: Sequence[Self], q: Any, k: Any, v: Any, options: QueryOptions, starts: Starts) -> Any | None:
        """Arrays of numpy."""
        count = 1 + len(others)
        if any(getattr(array, "shape", ())[:1] != (count,) for array in (q, k, v)):
            return None
        validate.starts(starts, count)
        out = np.empty((count, *self._answer), self._dtype)
        native = [self._native, *(other._native for other in others)]
        return out if _native.take_steps(native, q, k, v, options, starts, out, SHARED_TOKENS_MIN) else None

    def begin(self, course: Course, asked: QueryOptions, steps: int, keeps: int) -> None:
        run, tail, prepared = self._run, self._tail, course.prepared
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
        self._course, self._step, self._asked, self._facts = course, step, asked, facts
        self._allowed = allowed
        self._follow()
        self._native.observe_next(self._observed.asked if tells(1, course.options) else -1, FIRST, EVERY)
        self._sample_next()
        self._native.keep_last(keeps)

    def resume(self) -> bool:
        table = self._tail.table
        before = table.length
        taken = self._look()
        table.length += taken
        self._advanced += taken
        goes_on = not (self._native.full or self._step is not None or self._allowed <= 0 or table.room)
        if not self._has_room(before) or not goes_on:
            return False
        self._follow()
        return True

    def stop(self) -> None:
        if self._course is not None:
            self._course = self._step = None
            self._native.stop()

    def collect(self) -> StepsTaken | None:
        if self._course is None:
            return None
        samples = self._native.take_samples()
        totals = self._native.take_totals()
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

    def last_kernel(self) -> tuple[int, int]:
        return self._native.last_ns, self._native.threads

    def planned(self, kernel_ns: int) -> None:
        self._native.last_ns = kernel_ns

    def _follow(self) -> None:
        """Let native code take steps, as many as are allowed and the tail has room for."""
        run = self._run
        self._left = min(self._allowed, self._tail.table.room)
        reads = *run.arrays, run.blocks, run.all_blocks.placement
        step = None if self._step is None else self._step.native
        self._native.follow(self._asked, step, *reads, run.tokens, self._left, self._facts)

    def _has_room(self, before: int) -> bool:
        """Take blocks ahead where the tail has no room; False where there are none, which the next append says, if it can make no
        room. before: the length of the tail that the run knows."""
        table = self._tail.table
        if not table.room:
            try:
                table.reserve_ahead(blocks_ahead(self._tail))
            except CapacityError:
                return False
            self._run.refresh(before)
        return True

    def _look(self) -> int:
        """How many steps were taken since this was last asked."""
        taken = self._left - self._native.left
        self._left -= taken
        self._allowed -= taken
        return taken

    def _take_tensors(self) -> None:
        """Take tensors of torch from now on, if there are any: whoever has one has imported it."""
        torch = sys.modules.get("torch")
        if torch is not None:
            self._native.take_tensors(torch.Tensor, getattr(torch, self._dtype.name))
            self._takes_tensors = True

    def _sample(self, steps: int, kept: list[tuple[int, bytes]]) -> None:
        """Add the queries of these steps to the sample, those in between as passed by."""
        seen = 0
        for number, query in kept:
            self._query_samples.pass_by(number - seen)
            self._query_samples.add(self._query(query))
            seen = number + 1
        self._query_samples.pass_by(steps - seen)
        self._query_samples.last = self._query(self._native.last_query())
        self._sample_next()

    def _observe(self, steps: int) -> None:
        """Tell the parts that were searched what these steps showed."""
        assert self._course is not None
        if tells(1, self._course.options):
            self._observed.pass_by(steps)
        if self._step is not None:
            self._step.tell(self._native.take_observations())

    def _recent(self) -> tuple[Array, Array] | None:
        """See `StepsTaken`."""
        bits, shapes = self._native.recent(), (self._shape, self._answer)
        if not bits[0]:
            return None
        q, out = (
            np.frombuffer(one, self._dtype).reshape(-1, heads, dim).transpose(1, 0, 2)
            for one, (heads, _, dim) in zip(bits, shapes, strict=True)
        )
        return q, out

    def _query(self, bits: bytes) -> Array:
        return np.frombuffer(bits, self._dtype).reshape(self._shape)

    def _sample_next(self) -> None:
        self._native.sample_next(self._query_samples.next_in, self._query_samples.every)
