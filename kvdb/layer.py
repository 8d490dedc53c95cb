"""One layer of a session: its blocks, its plans, and the queries it has seen."""

from kvdb.attention import execute
from kvdb.attention.execute import Reading
from kvdb.attention.run import Run
from kvdb.attention.sparse import Question, sparse
from kvdb.attention.state import AttentionState
from kvdb.catalog.segment import Views
from kvdb.planner import Engine, Planner, Prepared
from kvdb.samples import Samples
from kvdb.storage.table import BlockTable
from kvdb.tail import Tail
from kvdb.types import Array, ModelSpec
from query_optimizer.plan import Plan
from query_optimizer.wanted import Wanted


class Layer:
    """The tail, the run that queries read, and the plans for them."""

    def __init__(self, engine: Engine, spec: ModelSpec, views: Views, number: int, tail: BlockTable) -> None:
        self.tail = tail
        self.run = Run([(view.segment.tables[number], view.visible) for view in views], tail)
        self.samples = Samples(engine.config.indexes.sample_queries)
        self.number = number
        self._spec = spec
        self._views = views
        self._own = Tail(engine.config, tail)
        self._seals = False
        self.planner = Planner(engine, spec, views, number, self.run, self._own)

    def append(self, k: Array, v: Array) -> None:
        start = self.tail.length
        try:
            self.tail.append(k, v)
        finally:
            self.run.refresh(start)  # also when nothing was appended: a shared last block may have been copied

    def answer(self, q: Array, wanted: Wanted) -> tuple[Array, Plan, Reading]:
        """Attention of the last n tokens, `[q_heads, n, head_dim]`. Raises UnknownRule."""
        self.samples.add(q)
        if self._seals:
            self._own.seal()
        prepared = self.planner.prepare(q.shape[1], wanted)
        self._seals = prepared.seals
        state, reading = self.carry_out(prepared, q, wanted)
        return state.out, prepared.plan, reading

    def carry_out(self, prepared: Prepared, q: Array, wanted: Wanted) -> tuple[AttentionState, Reading]:
        """The answer to queries q of the last n tokens by a plan."""
        layout, scale = self.tail.layout, self._spec.softmax_scale
        # One query sees everything; the first of several, asked of tokens before the tail, less than the searched parts hold.
        if not prepared.sections.searched or q.shape[1] > max(1, self.tail.length - self._own.sealed):
            return execute.exact(layout, self.run, q, q.shape[1], scale)
        return sparse(Question(layout, self.run, q, scale, wanted), prepared.sections, prepared.plan.retrieval)
