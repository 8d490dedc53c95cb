"""One layer of a session: its blocks, its plans, and the queries it has seen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

import indexes.registry as registry
from indexes.base import Float32, Index
from indexes.retrieval import Dipr, Exact, Retrieval, Wanted
from kvdb.attention import execute
from kvdb.attention.execute import Reading
from kvdb.attention.run import Run
from kvdb.attention.sparse import Question, Searched, Sections, sparse
from kvdb.catalog.segment import Segment, Views
from kvdb.catalog.tally import Tally
from kvdb.catalog.use import Asked
from kvdb.config import Config
from kvdb.storage.table import BlockTable
from kvdb.types import Array, ModelSpec
from query_optimizer.facts import Facts, IndexFacts, PartFacts
from query_optimizer.optimizer import Optimizer
from query_optimizer.plan import Plan

TAIL_INDEX = "flat"  # adding to it costs what the new keys cost
DECODE_TOKENS = 16  # calls of more are a prefill, which says nothing of what a step takes
PREPARED_MAX = 64  # plans of one layer; a caller may ask for another alpha each time


class Engine(Protocol):
    """What a layer needs of the database."""

    config: Config
    optimizer: Optimizer

    def want_index(self, segment: Segment) -> None: ...

    def asked(self, segment: Segment, asked: Asked) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """A plan, how it divides the run, and the versions of the indexes it was made with."""

    plan: Plan
    sections: Sections
    version: int


class Layer:
    """The tail, the run that queries read, and the plan prepared for each retrieval asked for."""

    def __init__(self, engine: Engine, spec: ModelSpec, views: Views, number: int, tail: BlockTable) -> None:
        self.tail = tail
        self.run = Run([(view.segment.tables[number], view.visible) for view in views], tail)
        self.tally = Tally(views, engine.asked)
        self.samples = Samples(engine.config.indexes.sample_queries)
        self._short = engine.config.optimizer.short_context_tokens
        self._engine = engine
        self._spec = spec
        self._views = views
        self._number = number
        self._tail_index: Index | None = None
        self._sealed = self._seals = 0  # tokens of the tail that are indexed, and how often some were
        self._prepared: dict[Retrieval | None, Prepared] = {}

    def append(self, k: Array, v: Array) -> None:
        start = self.tail.length
        try:
            self.tail.append(k, v)
        finally:
            self.run.refresh(start)  # also when nothing was appended: a shared last block may have been copied

    def answer(self, q: Array, wanted: Wanted) -> tuple[Array, Plan, Reading]:
        """Attention of the last n tokens, `[q_heads, n, head_dim]`."""
        n = q.shape[1]
        self.samples.add(q)
        prepared = self._prepare(n, wanted)
        layout, scale = self.tail.layout, self._spec.softmax_scale
        # A query that is asked of tokens before the tail sees less than the searched parts hold.
        if isinstance(prepared.plan.retrieval, Exact) or not prepared.sections.searched or n > self.tail.length - self._sealed:
            searched = False
            state, reading = execute.exact(layout, self.run, q, n, scale)
        else:
            searched = True
            question = Question(layout, self.run, q, scale, wanted)
            state, reading = sparse(question, prepared.sections, prepared.plan.retrieval)
        if n <= DECODE_TOKENS and not isinstance(wanted.retrieval, Exact) and self.run.tokens > self._short:
            self.tally.count(reading.kernel_ns, reading.retrieved, self.run.tokens, searched)
        return state.out, prepared.plan, reading

    def plan(self, wanted: Wanted) -> Plan:
        """The plan of the next one-token query, made anew."""
        return self._engine.optimizer.plan(self._facts(1, wanted, self._searchable()))

    def _prepare(self, new: int, wanted: Wanted) -> Prepared:
        asked = retrieval_of(wanted)
        version = self._seals + sum(view.segment.indexes.version for view in self._views)
        prepared = self._prepared.get(asked)
        if prepared is not None and not isinstance(prepared.plan.retrieval, Exact):
            version += self._seal()
        if prepared is None or prepared.version != version or not prepared.plan.holds_for(self.run.tokens):
            if len(self._prepared) >= PREPARED_MAX:
                self._prepared.clear()
            prepared = self._prepared[asked] = self._planned(new, wanted, version)
        return prepared

    def _planned(self, new: int, wanted: Wanted, version: int) -> Prepared:
        searchable = self._searchable()
        plan = self._engine.optimizer.plan(self._facts(new, wanted, searchable))
        if isinstance(plan.retrieval, Exact):
            return Prepared(plan, Sections([], self.tail.layout.block_size), version)
        searched = []
        for access in plan.accesses:
            if access.index is not None:
                begin, end, first_block, kinds = searchable[access.part]
                searched.append(Searched(kinds[access.index], begin, end, first_block))
        for view in self._views:
            if len(view.segment) >= self._engine.config.indexes.segment_tokens_min and not view.segment.indexes.of(self._number):
                self._engine.want_index(view.segment)
        return Prepared(plan, Sections(searched, self.tail.layout.block_size), version)

    def _searchable(self) -> "Mapping[str, Range]":
        """What of each part lies outside the window and has an index: by the part's name."""
        size, window = self.tail.layout.block_size, self._engine.config.window
        stored = self.run.base_tokens
        ranges: dict[str, Range] = {}
        base = first_block = 0
        for view in self._views:
            begin = max(0, -(-(window.sink_tokens - base) // size) * size)
            end = min(view.visible, stored - window.recent_tokens - base) // size * size
            kinds = view.segment.indexes.of(self._number)
            if kinds and end - begin >= self._engine.config.indexes.segment_tokens_min:
                ranges[part_name(view.segment)] = (begin, end, first_block, kinds)
            base += view.visible
            first_block += -(-view.visible // size)
        if self._tail_index is not None:
            ranges[TAIL] = (0, self._sealed, first_block, {TAIL_INDEX: self._tail_index})
        return ranges

    def _facts(self, new: int, wanted: Wanted, searchable: "Mapping[str, Range]") -> Facts:
        tier, asked = self.tail.tier.name, retrieval_of(wanted)
        rows = self._spec.q_heads // self._spec.kv_heads * new
        parts = []
        sizes = [(part_name(v.segment), v.visible, len(v.segment)) for v in self._views]
        for name, visible, stored in [*sizes, (TAIL, self.tail.length, self.tail.length)]:
            begin, end, _, kinds = searchable.get(name, (0, 0, 0, {}))
            indexes = tuple(
                IndexFacts(kind, index.cost(end - begin, rows, asked or Dipr()).nbytes) for kind, index in kinds.items()
            )
            if visible:
                parts.append(PartFacts(name, visible, stored, tier, indexes, end - begin))
        return Facts(self._number, tuple(parts), new, self._spec.token_nbytes, asked)

    def _seal(self) -> bool:
        """Index what of the tail has become old, if it is much; whether anything was."""
        config = self._engine.config
        step = -(-config.indexes.tail_tokens // self.tail.layout.block_size) * self.tail.layout.block_size
        if not step or self.tail.length - self._sealed < step + config.window.recent_tokens:
            return False
        self._sealed += (self.tail.length - config.window.recent_tokens - self._sealed) // step * step
        blocks = self.tail.keys(self._sealed)
        if self._tail_index is None:
            self._tail_index = registry.build(TAIL_INDEX, blocks)
        else:
            self._tail_index.add(blocks)
        self._seals += 1
        return True


TAIL = "tail"
Range = tuple[int, int, int, Mapping[str, Index]]
"""Tokens [begin, end) that can be searched, the run's block where the part begins, and the indexes by kind."""


def part_name(segment: Segment) -> str:
    return f"segment {segment.number}"


def retrieval_of(wanted: Wanted) -> Retrieval | None:
    """What is asked for; a bound on the missed mass alone begins with a range."""
    return Dipr() if wanted.retrieval is None and wanted.missed_mass_max is not None else wanted.retrieval


class Samples:
    """Some of the queries of one layer, evenly over all that were asked, for indexes to learn from.

    queries_max: of each head; 0 keeps none.
    """

    def __init__(self, queries_max: int) -> None:
        self._max = queries_max
        self._step, self._seen, self._count = 1, 0, 0
        self._kept: list[Array] = []

    def add(self, q: Array) -> None:
        """Look at queries `[q_heads, n, head_dim]`."""
        n = q.shape[1]
        first = -self._seen % self._step
        self._seen += n
        if not self._max or first >= n:
            return
        picked = q[:, first :: self._step].copy()
        self._kept.append(picked)
        self._count += picked.shape[1]
        while self._count > self._max:
            whole = np.concatenate(self._kept, axis=1)[:, ::2]
            self._kept, self._count, self._step = [whole.copy()], whole.shape[1], 2 * self._step

    def all(self) -> Float32 | None:
        """float32 `[q_heads, m, head_dim]`, None where nothing was asked."""
        return np.concatenate(self._kept, axis=1).astype(np.float32) if self._kept else None
