"""One layer of a session: its blocks, its plans, and the queries it has seen."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter_ns

import numpy as np

import kvdb.attention.exact as exact_attention
import kvdb.deadlines as deadlines
import kvdb.validate as validate
from indexes.retrieval import Exact
from kvdb.attention.device import DeviceFailed, Pending, TailHasNoRoom
from kvdb.attention.exact import AttentionStats
from kvdb.attention.hybrid import hybrid_attention
from kvdb.attention.query import AttentionQuery
from kvdb.attention.sparse import sparse
from kvdb.attention.state import AttentionState, beyond_float32
from kvdb.attention.trained import LastSelected
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.catalog.segments.tail import Tail
from kvdb.errors import CapacityError, InvalidArgument, KvdbError, NonFiniteError, PositionError
from kvdb.indexing.background_time import StepClock
from kvdb.planning.planner import Planner
from kvdb.planning.prepared import Prepared
from kvdb.session.asked import Asked
from kvdb.session.audits import EXPECTED_TOKENS, Audits
from kvdb.session.counters import SessionCounters
from kvdb.session.device_steps import DeviceSteps
from kvdb.session.host_steps import HostSteps
from kvdb.session.no_steps import NoSteps
from kvdb.session.observed_queries import ObservedQueries, tells
from kvdb.session.query_samples import QuerySamples
from kvdb.session.runner import Course, LayerState, StepRunner
from kvdb.session.segment_counters import SegmentCounters
from kvdb.session.services import SessionServices
from kvdb.session.terms import SessionTerms
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import Reservation
from kvdb.storage.paged_segment import PageReads, reading
from kvdb.types import Array, Float32, ModelSpec, Positions
from query_optimizer.plan import Plan
from query_optimizer.query_options import NO_OPTIONS, QueryOptions

log = logging.getLogger(__name__)
# size: one layer of a session, of which every step here changes the same few things
LATE_TAIL_TOKENS = 1024
"""A session that added more does not leave them behind when it ends, for its queries to be asked again."""
NO_POSITIONS: Positions = np.zeros(0, np.int64)
READ_ALL = QueryOptions(retrieval=Exact())


class Layer:
    """One layer of a session: its own tokens, the run of blocks that queries read, and the plans by which they are answered."""

    def __init__(
        self,
        services: SessionServices,
        spec: ModelSpec,
        snapshot: Snapshot,
        number: int,
        tail: BlockTable,
        terms: SessionTerms,
        counters: SessionCounters,
    ) -> None:
        """terms: those of the session, with an error_max. counters: those of the session."""
        assert terms.error_max is not None
        self.tail = tail
        self.query_samples = QuerySamples(services.config.indexes.sample_queries, Reservation(services.budget))
        self.number = number
        self.sinks: Float32 | None = None
        self.selected: LastSelected | None = None
        self._waits = True
        self._services = services
        self._spec = spec
        self.shape = spec.shape(number)
        self._tail = Tail(services.config, tail)
        self._indexes_tail = False
        self._error_max = terms.error_max
        self._resolved = NO_OPTIONS, READ_ALL if self.shape.window else NO_OPTIONS.with_default(terms.error_max)
        self._counters = counters
        self._observed = ObservedQueries()
        self._failed: KvdbError | None = None
        self._asked = NO_OPTIONS
        self._closed = False
        self._base_on(snapshot)
        clock = StepClock(services.background_time, len(spec.kept))
        expected = EXPECTED_TOKENS if terms.expected_tokens is None else terms.expected_tokens
        self.audits = Audits(number, self.planner, services.auditor, clock, expected)

    def _base_on(self, snapshot: Snapshot) -> None:
        """Read the stored tokens of this snapshot from now on."""
        self._snapshot = snapshot
        self._complete = not len(snapshot.missing(self.number))
        self.run = snapshot.run(self.number, self.tail)
        self.pages = snapshot.pages(self.number)
        self.page_reads: PageReads | None = None
        self.segment_counters = SegmentCounters(snapshot.views, self._services)
        self.planner = Planner(self._services, self._spec, snapshot, self.number, self.run, self._tail)
        known = self.run, self._tail, self.planner, self.query_samples, self._observed
        self.runner: StepRunner
        if not self.shape.value_dim:
            self.runner = NoSteps()
        else:
            self.runner = HostSteps(self.shape, *known) if self.planner.gpu is None else DeviceSteps(*known)
        self.runner.set_sinks(self.sinks)
        self._course: Course | None = None

    @property
    def state(self) -> LayerState:
        """What its next step begins with."""
        if self._closed:
            return LayerState.closed
        if self._waits:
            return LayerState.loading
        if not self.runner.running:
            return LayerState.planned
        return LayerState.halted if self.runner.halted else LayerState.running

    def ready(self) -> "Layer":
        """Stop the runner, and wait for comparisons under way, and until everything that the layer reads is in main memory.
        Returns the layer. Raises IntegrityError, Unavailable, and what `raise_failure` raises."""
        self.stop()
        self.raise_failure()
        if self._waits:
            self._snapshot.wait(self.number)
            self._waits = False
        return self

    def set_sinks(self, sinks: Float32 | None) -> None:
        """The logits of its sinks, float32 `[q_heads]`, None for none. The runner begins anew."""
        self.stop()
        self.sinks = sinks
        self.runner.set_sinks(sinks)

    def stop(self) -> None:
        """Have the next step planned: stop the runner, and wait for comparisons under way."""
        self.collect()
        self.runner.stop()
        self.audits.settle()

    def raise_failure(self) -> None:
        """Raise, once, what was found out about steps on a GPU that had been answered: NonFiniteError or GpuLost."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def collect(self) -> None:
        """Count the steps that the runner took, so that the layer's tail and counters say them too."""
        if (taken := self.runner.collect()) is None:
            return
        course, number, stats, tokens, self._failed, recent = taken
        if number:
            self._counters.count(course.prepared.plan, stats, tokens, number)
            self.segment_counters.count(number, 1, course.options, stats, self.run.tokens, searched=course.searches)
            self.audits.follow(course.prepared, stats, number, recent)

    def begin(self, asked: QueryOptions) -> None:
        """Let the runner take steps like the one just answered. asked: its options, as the caller gave them."""
        if (course := self._course) is not None and not self.pages:  # runners pin nothing
            self._asked = asked
            self.runner.begin(course, asked, self.audits.idle_steps(course.prepared), self.audits.keeps)

    def resume(self) -> None:
        """Let the runner go on that halted."""
        if not self.runner.resume():
            self.collect()
            self.begin(self._asked)

    def append(self, k: Array, v: Array, gap: int = 0) -> None:
        """Append the KV of n tokens, `[kv_heads, n, head_dim]`, behind so many that no query of the layer will see, or raise
        NonFiniteError or CapacityError."""
        start = 0 if gap else self.tail.length
        try:
            if gap:
                self.tail.skip(gap, k, v)
            else:
                self.tail.append(k, v)
        finally:
            self.run.refresh(start)  # also if nothing was appended, because a shared last block may have been copied

    def truncate(self, n: int) -> None:
        """Forget the last n tokens of the tail. The runner is stopped."""
        self.audits.forget_recent()
        self.tail.truncate(self.tail.length - n)
        self.run.refresh(self.tail.length)
        self._tail.truncated()

    def rebase(self, snapshot: Snapshot) -> None:
        """Read the tokens before the tail from this snapshot from now on. The runner is stopped."""
        self.segment_counters.flush()
        self._waits = True
        self._base_on(snapshot)
        self.audits.planner = self.planner
        self.audits.forget_recent()

    def resolve(self, options: QueryOptions) -> QueryOptions:
        """The options, with the session's error_max if they name none; what a window sees is read whole. Raises InvalidArgument
        or Unsupported for hints that cannot be followed."""
        asked, resolved = self._resolved
        if options is not asked and options != asked:
            resolved = READ_ALL if self.shape.window else options.with_default(self._error_max)
            self.planner.check(resolved)
            self._resolved = options, resolved
        return resolved

    def check_queries(self, q: Array) -> int:
        """The number of queries n in q, `[q_heads, n, head_dim]`. Raises ShapeError, DtypeError or NonFiniteError, and
        InvalidArgument while the sinks are not known."""
        n = validate.queries(self.shape, q)
        if self.shape.sinks and self.sinks is None:
            raise InvalidArgument(f"layer {self.number} has sinks, whose logits are not known yet; hand them in with put_sinks")
        if not self.tail.layout.finite(q):
            raise NonFiniteError("q holds NaN or infinity; expected finite numbers, so find where the model produced them")
        return n

    def check_last(self, n: int) -> None:
        """Raises PositionError if the layer has a gap, or holds fewer than n tokens that queries can belong to."""
        self.check_no_gaps()
        self.check_window(n)
        before = self._snapshot.layout.length if self._snapshot.overlay is not None else 0
        if n > self.run.tokens - before:
            raise PositionError(
                f"q asks for the last {n} tokens of layer {self.number}, which holds {self.run.tokens - before}; "
                "update the layer first, or use attend" + ("; ask for tokens before the tail with positions=" if before else "")
            )

    @property
    def held_from(self) -> int:
        """The first position from which on it holds every token: 0, but for a layer with a window."""
        held = 0
        for view in self._snapshot.views:
            unseen = view.segment.unseen
            held = view.begin + min(unseen[self.number], view.visible) if unseen and unseen[self.number] else held
        return self.run.base_tokens + self.tail.unseen if self.tail.unseen else held

    def check_window(self, n: int, *, new: bool = False) -> None:
        """Raises PositionError where the window of the first of n queries reaches before what the layer holds. new: whether they
        are of tokens that are still to come."""
        if not self.shape.window:
            return
        first = self.run.tokens - (0 if new else n)
        sees = max(0, first - self.shape.window + 1)
        if (held := self.held_from) > sees:
            raise PositionError(f"layer {self.number} holds tokens from {held} on; a query at {first} sees those from {sees} on")

    def check_truncated(self, tokens: int) -> None:
        """Raises PositionError where the window of the next token, behind so many, would reach before what the layer holds."""
        held = self.held_from if self.shape.window else 0
        if held and max(0, tokens - self.shape.window + 1) < held and tokens < self.run.tokens:
            raise PositionError(
                f"layer {self.number} holds tokens from {held} on, so it can be cut to {held + self.shape.window - 1}"
            )

    def check_no_gaps(self) -> None:
        """Raises PositionError if any position holds nothing yet."""
        missing = self.missing()
        if len(missing):
            raise PositionError(
                f"{len(missing)} tokens of layer {self.number} hold nothing yet, the first at position {missing[0]}; "
                "hand in their KV with overlay first"
            )

    def missing(self) -> Positions:
        """The positions before the tail that hold nothing yet, ascending."""
        if self._complete:
            return NO_POSITIONS
        missing = self._snapshot.missing(self.number)
        self._complete = not len(missing)
        return missing

    def overlay(self, positions: Positions, k: Array, v: Array) -> None:
        """Add recomputed tokens, which have no overlay in this layer yet. Raises NonFiniteError or CapacityError."""
        overlay = self._snapshot.overlay
        assert overlay is not None
        self.audits.forget_recent()
        try:
            overlay.add(self.number, positions, k, v)
        finally:
            self.run.update_overlay(overlay.positions[self.number])  # also if nothing was added, see `append`

    def answer(self, q: Array, options: QueryOptions) -> tuple[Array, Plan, AttentionStats]:
        """Answer queries of the last tokens: the output, the plan, what was read. Raises UnknownRule or NonFiniteError."""
        prepared = self.prepare(q, options)
        out, stats = self.answer_prepared(prepared, q, options)
        return out, prepared.plan, stats

    def prepare(self, q: Array, options: QueryOptions) -> Prepared:
        """The plan by which the queries of the last n tokens are answered. Raises UnknownRule."""
        self.query_samples.add(q)
        self._course = None
        if self._indexes_tail:
            self._tail.seal()
        started = perf_counter_ns()
        prepared = self.planner.prepare(q.shape[1], options)
        self._counters.plan_ns += perf_counter_ns() - started
        self._indexes_tail = prepared.indexes_tail
        return prepared

    def answer_prepared(
        self, prepared: Prepared, q: Array, options: QueryOptions, pending: Pending | None = None
    ) -> tuple[Array, AttentionStats]:
        """Answer queries by their plan, and count them. Raises NonFiniteError, DeadlineExceeded or Cancelled."""
        deadlines.check()
        n = q.shape[1]
        observed = tells(n, options) and (prepared.rechecks or self._observed.takes_next())
        comparison = self.audits.due(prepared, n, options, alone=pending is None)
        repeats = n == 1 and comparison is None and not prepared.rechecks
        self._course = Course(prepared, options, self._searches(prepared)) if repeats else None
        served = prepared if comparison is None else comparison.served
        state, stats = self.execute(served, q, options, observed, pending)
        if comparison is None and (comparison := self.audits.unlike(prepared, stats)) is not None:
            self._course = None
        if not self.tail.layout.finite(state.out, state.lse):
            raise beyond_float32()
        self.segment_counters.count(1, n, options, stats, self.run.tokens, searched=stats.given_up is not None)
        self.audits.answered(prepared, comparison, q, state.out, stats, options, self.execute)
        return state.out, stats

    def answered_exactly(self, prepared: Prepared, q: Array, out: Array, stats: AttentionStats, options: QueryOptions) -> None:
        """Count an answer that was computed with those of others. q, out: `[q_heads, 1, head_dim]`."""
        self.segment_counters.count(1, 1, options, stats, self.run.tokens, searched=False)
        comparison = self.audits.due(prepared, 1, options, alone=False)
        self._course = Course(prepared, options, False) if comparison is None and not prepared.rechecks else None
        self.audits.answered(prepared, comparison, q, out, stats, options, self.execute)

    def reads_all(self, prepared: Prepared, n: int) -> bool:
        """Whether the CPU answers n queries by reading everything, and each by itself sees nothing else."""
        alike = not self.shape.window and self.sinks is None
        return alike and prepared.partition.device is None and not self._searches(prepared, n)

    def execute(
        self,
        prepared: Prepared,
        q: Array,
        options: QueryOptions,
        observed: bool = False,
        pending: Pending | None = None,
        judged: bool = True,
    ) -> tuple[AttentionState, AttentionStats]:
        """Answer the queries q of the last n tokens by a plan. observed: whether they go into the statistics. pending: what was
        already launched on the GPU for them, None for nothing. judged: as in `AttentionQuery`. Raises what `Pool.pin` raises for
        a layer on disk."""
        asked = options, observed, judged, self.sinks, self.shape.window
        query = AttentionQuery(self.tail.layout, self.run, q, self.shape.softmax_scale, *asked)
        answer = partial(self._execute, prepared, query, pending)
        searches = self._searches(prepared, q.shape[1])
        before = PageReads.so_far(self.pages)
        answered = reading(self.pages, answer, whole=not searches)
        if searches:
            self.page_reads = PageReads.so_far(self.pages) - before
        return answered

    def _execute(
        self, prepared: Prepared, query: AttentionQuery, pending: Pending | None
    ) -> tuple[AttentionState, AttentionStats]:
        """`execute`, once everything that it reads is in main memory."""
        partition, q, options = prepared.partition, query.q, query.options
        if partition.device is not None and partition.device.takes(q.shape[1]):
            try:
                return hybrid_attention(query, partition, partition.device, prepared.plan.retrieval, pending)
            except TailHasNoRoom as failure:
                log.info("the session's own tokens of layer %d stay in main memory: %s", self.number, failure)
            except DeviceFailed as failure:
                log.warning("layer %d is answered by the CPU alone: %s", self.number, failure)
                self.planner.leave_gpu()
            return self.execute(self.planner.prepare_once(q.shape[1], options), q, options, query.observed, judged=query.judged)
        if self._searches(prepared, q.shape[1]):
            return sparse(query, partition, prepared.plan.retrieval)
        asked = query.layout, self.run, q, q.shape[1], query.scale
        return exact_attention.exact(*asked, sinks=query.sinks, window=query.window)

    def prove(self, asked: Asked, goes_on: Callable[[], bool]) -> bool:
        """Compare ways that are not proven yet for these queries with exact answers, as long as it goes on. Returns whether more
        could be compared once an index is there that is built now. Raises IntegrityError or Unavailable."""
        self._snapshot.wait(self.number)
        queries = asked.queries.all()
        if queries is None:
            return False
        return self.audits.prove(queries.astype(self.shape.numpy_dtype), asked.options, self.execute, goes_on)

    def close(self) -> Asked | None:
        """Tell the segments what was counted, and give everything back but the snapshot. Returns what was asked and would tell
        more, which has the tail then; None for nothing."""
        asked = self._stop()
        elsewhere = self.planner.gpu is not None or self._snapshot.overlay is not None  # a GPU answers one thread at a time
        elsewhere = elsewhere or self.sinks is not None  # which those that are asked again would lack
        if asked is None or not self.query_samples.number or elsewhere or self.tail.length > LATE_TAIL_TOKENS:
            self.query_samples.release()
            self.tail.release()
            return None
        return Asked(self.query_samples, asked, self.tail)

    def let_go(self) -> None:
        """Close a layer whose tail is another's."""
        self._stop()
        self.query_samples.release()

    def _stop(self) -> QueryOptions | None:
        """Tell the segments what was counted, and give back what only queries need. Returns what `Audits.close` does."""
        with suppress(CapacityError):  # a GPU's, whose tokens go with the rest
            self.stop()
        self._closed = True
        asked = self.audits.close()
        self.segment_counters.flush()
        self.planner.forget()
        self._course = None
        self._tail.release()
        return asked

    def _searches(self, prepared: Prepared, n: int = 1) -> bool:
        """Whether indexes alone answer n queries beside the window. They cannot if a query belongs to a token before their last,
        which sees less than they hold."""
        partition = prepared.partition
        return partition.device is None and bool(partition.searched) and n <= partition.behind(self.run)
