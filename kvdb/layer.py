"""One layer of a session: its blocks, its plans, and the queries it has seen."""

import logging
from typing import Self

import numpy as np

import kvdb.check as check
from indexes.retrieval import Exact
from kvdb.attention import execute
from kvdb.attention.away import AwayFailed, Pending, TailHasNoRoom
from kvdb.attention.effective import Effective
from kvdb.attention.execute import Reading
from kvdb.attention.sides import on_both_sides
from kvdb.attention.sparse import Question, sparse
from kvdb.attention.state import AttentionState
from kvdb.basis import Basis
from kvdb.catalog.tally import Tally
from kvdb.errors import NonFiniteError, PositionError
from kvdb.planner import Engine, Planner, Prepared
from kvdb.samples import Samples
from kvdb.storage.table import BlockTable
from kvdb.tail import Tail
from kvdb.types import Array, ModelSpec, Positions
from query_optimizer.plan import Plan
from query_optimizer.wanted import Wanted

log = logging.getLogger(__name__)
NOTHING: Positions = np.zeros(0, np.int64)
DECODE_TOKENS = 16
"""Calls of more are a prefill, which says nothing of what a step takes."""
OBSERVED_FIRST, OBSERVED_STEP = 16, 8
"""Queries of one token: the first are all observed, and then every 8th."""


class Layer:
    """The tail, the run that queries read, and the plans for them."""

    def __init__(self, engine: Engine, spec: ModelSpec, basis: Basis, number: int, tail: BlockTable) -> None:
        self.tail = tail
        self.run = basis.run(number, tail)
        self.tally = Tally(basis.views, engine.asked)
        self.samples = Samples(engine.config.indexes.sample_queries)
        self.number = number
        self._waits = True
        self._short = engine.config.optimizer.short_context_tokens
        self._spec = spec
        self._basis = basis
        self._whole = not len(basis.missing(number))
        self._own = Tail(engine.config, tail)
        self._seals = False
        self._steps = 0
        self.planner = Planner(engine, spec, basis, number, self.run, self._own)

    def arrived(self) -> Self:
        """Itself, once everything it reads is in main memory. Raises IntegrityError or Unavailable."""
        if self._waits:
            self._basis.wait(self.number)
            self._waits = False
        return self

    def append(self, k: Array, v: Array) -> None:
        start = self.tail.length
        try:
            self.tail.append(k, v)
        finally:
            self.run.refresh(start)  # also when nothing was appended: a shared last block may have been copied

    def take_back(self, n: int) -> None:
        """Undo an append of n tokens of which no query has been asked."""
        start = self.tail.length - n
        self.tail.truncate(start)
        self.run.refresh(start)

    def check_queries(self, q: Array) -> int:
        """How many tokens ask. Raises ShapeError, DtypeError or NonFiniteError."""
        n = check.queries(self._spec, q)
        if not self.tail.layout.finite(q):
            raise NonFiniteError("q holds NaN or infinity; expected finite numbers, so find where the model produced them")
        return n

    def check_last(self, n: int) -> None:
        """Raises PositionError unless the last n tokens are there to ask."""
        self.check_whole()
        before = self._basis.layout.length if self._basis.overlay is not None else 0
        if n > self.run.tokens - before:
            raise PositionError(
                f"q asks for the last {n} tokens of layer {self.number}, which holds {self.run.tokens - before}; "
                "update the layer first, or use attend" + ("; ask for tokens before the tail with positions=" if before else "")
            )

    def check_whole(self) -> None:
        """Raises PositionError while any gap holds nothing."""
        missing = self.missing()
        if len(missing):
            raise PositionError(
                f"{len(missing)} tokens of layer {self.number} hold nothing yet, the first at position {missing[0]}; "
                "hand in their KV with overlay first"
            )

    def missing(self) -> Positions:
        """The positions before the tail that hold nothing yet, ascending."""
        if self._whole:
            return NOTHING
        missing = self._basis.missing(self.number)
        self._whole = not len(missing)
        return missing

    def overlay(self, positions: Positions, k: Array, v: Array) -> None:
        """Recomputed tokens, which have none in this layer yet. Raises NonFiniteError or CapacityError."""
        overlay = self._basis.overlay
        assert overlay is not None
        try:
            overlay.add(self.number, positions, k, v)
        finally:
            self.run.lay(overlay.positions[self.number])  # also when nothing was added, as in `append`

    def recompute(self, effective: Effective, q: Array, positions: Positions) -> Array:
        """Attention of queries at these positions, each over everything up to its own; effective: of this layer."""
        return effective.attend(q, positions, self._spec.softmax_scale).out

    def answer(self, q: Array, wanted: Wanted) -> tuple[Array, Plan, Reading]:
        """Attention of the last n tokens, `[q_heads, n, head_dim]`. Raises UnknownRule."""
        prepared = self.prepare(q, wanted)
        out, reading = self.answer_by(prepared, q, wanted)
        return out, prepared.plan, reading

    def prepare(self, q: Array, wanted: Wanted) -> Prepared:
        """The plan by which queries of the last n tokens are to be answered. Raises UnknownRule."""
        self.samples.add(q)
        if self._seals:
            self._own.seal()
        prepared = self.planner.prepare(q.shape[1], wanted)
        self._seals = prepared.seals
        return prepared

    def answer_by(self, prepared: Prepared, q: Array, wanted: Wanted, pending: Pending | None = None) -> tuple[Array, Reading]:
        """The answer to what a plan was prepared for, which counts towards what is known of such queries. pending: as `carry_out`
        takes it."""
        # What a kind that was hinted at gives up says more of the kind.
        telling = q.shape[1] == 1 and wanted.hints.index is None
        observed = telling and (prepared.looks_again or self._observes())
        state, reading = self.carry_out(prepared, q, wanted, observed, pending)
        self.count(reading, q.shape[1], wanted)
        return state.out, reading

    def count(self, reading: Reading, n: int, wanted: Wanted) -> None:
        """Tell the views what an answer to n queries took, in a step of decoding that might have been searched."""
        if n <= DECODE_TOKENS and not isinstance(wanted.retrieval, Exact) and self.run.tokens > self._short:
            self.tally.count(reading.kernel_ns, reading.retrieved, self.run.tokens, searched=bool(reading.searches))

    def reads_all(self, prepared: Prepared, n: int) -> bool:
        """Whether the CPU answers n queries by reading everything: a query of an earlier token sees less than is searched."""
        sections = prepared.sections
        return sections.away is None and (not sections.searched or n > sections.behind(self.run))

    def carry_out(
        self, prepared: Prepared, q: Array, wanted: Wanted, observed: bool = False, pending: Pending | None = None
    ) -> tuple[AttentionState, Reading]:
        """The answer to queries q of the last n tokens by a plan. observed: whether statistics are made of it. pending: what the
        GPU has to do with it, where that was launched already."""
        layout, scale, sections = self.tail.layout, self._spec.softmax_scale, prepared.sections
        question = Question(layout, self.run, q, scale, wanted, observed)
        if sections.away is not None and sections.away.takes(q.shape[1]):
            try:
                return on_both_sides(question, sections, sections.away, prepared.plan.retrieval, pending)
            except TailHasNoRoom as failure:
                log.info("the session's own tokens of layer %d stay in main memory: %s", self.number, failure)
                return self.carry_out(self.planner.fresh(q.shape[1], wanted), q, wanted, observed)
            except AwayFailed as failure:
                log.warning("layer %d is answered by the CPU alone: %s", self.number, failure)
                self.planner.stay()
                return self.carry_out(self.planner.fresh(q.shape[1], wanted), q, wanted, observed)
        if sections.away is None and question.searches(sections):
            return sparse(question, sections, prepared.plan.retrieval)
        return execute.exact(layout, self.run, q, q.shape[1], scale)

    def close(self) -> None:
        """Hand on what was counted, and give everything back but the basis."""
        self.tally.hand_on()
        self._own.release()
        self.tail.release()

    def _observes(self) -> bool:
        """Whether this query is one of those that statistics are made of."""
        self._steps += 1
        return self._steps <= OBSERVED_FIRST or self._steps % OBSERVED_STEP == 0
