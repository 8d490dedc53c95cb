"""Plans for one layer of a session: facts are gathered, the optimizer decides, and what it decided is kept until they change."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

import indexes.registry as registry
import kvdb.check as check
from indexes.base import Index
from indexes.retrieval import Dipr, Exact, Retrieval
from kvdb.attention.run import Run
from kvdb.attention.sections import ReadWhole, Searched, Sections, Span
from kvdb.catalog.segment import Segment, Views
from kvdb.config import Config
from kvdb.errors import InvalidArgument, Unsupported
from kvdb.tail import KIND, NAME, Tail
from kvdb.types import ModelSpec
from query_optimizer.access import Access
from query_optimizer.cost import Machine
from query_optimizer.facts import Facts, HeadFacts, IndexFacts, PartFacts
from query_optimizer.optimizer import Optimizer, UnknownRule
from query_optimizer.plan import Plan
from query_optimizer.rules import DiffuseHead, FreshTail
from query_optimizer.wanted import NO_HINTS, Wanted

PREPARED_MAX = 64
"""Plans of one layer; a caller may ask for another alpha each time."""
DENSE = 0.5
"""A KV head of which a larger share of the queries wants too much is not searched; what it wants says nothing of the others."""
FIRST_USES, USES_MAX = 4, 256
"""A plan is made anew after so many queries, each time after twice as many, as what is known of the heads changes."""


class Engine(Protocol):
    """What a planner needs of the database."""

    config: Config
    optimizer: Optimizer
    machine: Machine

    def wish(self, segment: Segment, kind: str) -> None: ...


class Prepared:
    """A plan, how it divides the run, and what it was made for.

    seals: whether old tokens of the tail are to be indexed, because they are searched or could be. relies: whether heads are not
    searched for what they want because of what is known of them. looks_again: whether they are, to see if that is still so.
    """

    __slots__ = ("looks_again", "plan", "relies", "seals", "sections", "uses", "version")

    def __init__(self, plan: Plan, sections: Sections, version: int, uses: int, looks_again: bool = False) -> None:
        """version: of the indexes; uses: how many queries it is good for."""
        self.looks_again = looks_again
        self.relies = any(access.rule == DiffuseHead.name for access in plan.accesses)
        self.plan = plan
        tail = [access for access in plan.accesses if access.part == NAME]
        self.seals = any(access.index is not None or access.rule == FreshTail.name for access in tail)
        self.sections = sections
        self.version = version
        self.uses = uses


class Part(NamedTuple):
    """A segment's view or the tail, as a plan may search it: `span`, by one of `kinds`. segment: None for the tail."""

    name: str
    visible: int
    stored: int
    span: Span
    kinds: Mapping[str, Index]
    segment: Segment | None


class Planner:
    """Plans of one layer, each prepared for what was asked and used until a fact it depended on leaves its range."""

    def __init__(self, engine: Engine, spec: ModelSpec, views: Views, number: int, run: Run, tail: Tail) -> None:
        self._engine = engine
        self._spec = spec
        self._views = views
        self._number = number
        self._run = run
        self._tail = tail
        self._prepared: dict[tuple[Wanted, int], Prepared] = {}
        self._next_uses: dict[tuple[Wanted, int], int] = {}
        self._checked: set[Wanted] = set()

    def prepare(self, new: int, wanted: Wanted) -> Prepared:
        """The plan of a call of `new` queries. Raises UnknownRule."""
        key = wanted, new.bit_length()
        prepared = self._prepared.get(key)
        if prepared is not None:
            prepared.uses -= 1
            if prepared.version == self._version() and prepared.plan.holds_for(self._run.tokens):
                if prepared.uses >= 0:
                    return prepared
                if prepared.relies:
                    prepared = self._prepared[key] = self._prepare(new, wanted, 1, looks_again=True)
                    return prepared
        if len(self._prepared) >= PREPARED_MAX:
            self._prepared.clear()
            self._next_uses.clear()
        uses = self._next_uses.get(key, FIRST_USES)
        self._next_uses[key] = min(2 * uses, USES_MAX)
        prepared = self._prepared[key] = self._prepare(new, wanted, uses)
        return prepared

    def check(self, wanted: Wanted) -> None:
        """Raises InvalidArgument for hints that name no rule or kind of index, contradict what is asked for or leave no room for
        the window, and Unsupported for a kind whose library is missing."""
        hints = wanted.hints
        if hints == NO_HINTS or wanted in self._checked:
            return
        try:
            self._engine.optimizer.check(hints.rules_off)
        except UnknownRule as error:
            raise InvalidArgument(f"Hints.rules_off: {error}") from None
        window = self._engine.config.window
        tokens = window.sink_tokens + window.recent_tokens
        least = tokens * self._spec.token_nbytes
        if hints.memory_budget is not None and hints.memory_budget < least:
            raise InvalidArgument(
                f"Hints.memory_budget is {hints.memory_budget:,} bytes, below the window: its {tokens:,} tokens take {least:,} "
                f"bytes in a layer; expected at least that, or None for no limit"
            )
        if hints.index is not None:
            self._check_index(check.kind(hints.index), wanted.retrieval)
        if len(self._checked) >= PREPARED_MAX:
            self._checked.clear()
        self._checked.add(wanted)

    def _check_index(self, kind: str, retrieval: Retrieval | None) -> None:
        if isinstance(retrieval, Exact):
            raise InvalidArgument(
                f"Hints.index is {kind!r}, but exact attention reads everything; expected index=None, or another retrieval"
            )
        parts = self.parts()
        if not any(part.span.tokens for part in parts):
            least = self._engine.config.indexes.segment_tokens_min
            held = ", ".join(f"{part.name} of {part.visible:,} tokens" for part in parts) or "nothing"
            raise InvalidArgument(
                f"Hints.index is {kind!r}, but no part of layer {self._number} can have an index ({held}, and outside of the "
                f"window at least {least:,} tokens are needed); expected index=None"
            )
        if not any(kind in part.kinds for part in parts):
            missing = registry.missing_library(kind)
            if missing is not None:
                raise Unsupported(
                    f"Hints.index is {kind!r}, which needs {missing}, which is not installed; pip install 'kvdb[hnsw]', or "
                    f"choose one of {', '.join(name for name in registry.KINDS if registry.missing_library(name) is None)}"
                )

    def fresh(self, new: int, wanted: Wanted) -> Prepared:
        """As `prepare`, made anew and not kept. Raises UnknownRule."""
        return self._prepare(new, wanted, 0)

    def blocks_of(self, access: Access) -> tuple[int, int]:
        """Which blocks of the run hold the tokens of an access."""
        size = self._tail.table.layout.block_size
        first = next(part.span.first_block for part in self.parts() if part.name == access.part)
        return first + access.begin // size, first + -(-access.end // size)

    def plan(self, wanted: Wanted, new: int = 1) -> Plan:
        """A plan made anew. Raises UnknownRule."""
        return self._engine.optimizer.plan(self.facts(new, wanted, self.parts()))

    def facts(self, new: int, wanted: Wanted, parts: list[Part]) -> Facts:
        """What the optimizer sees of a call of `new` queries."""
        spec, machine, window = self._spec, self._engine.machine, self._engine.config.window
        return Facts(
            layer=self._number,
            layers=spec.layers,
            parts=tuple(self._part_facts(part, new, wanted) for part in parts),
            new_tokens=new,
            kv_heads=spec.kv_heads,
            group=spec.q_heads // spec.kv_heads,
            token_nbytes=spec.token_nbytes,
            window_tokens=window.sink_tokens + window.recent_tokens,
            call_seconds=machine.exact_call_s,
            step_seconds=machine.step_s,
            retrieval=wanted.retrieval,
            bounded=wanted.missed_mass_max is not None,
            estimate_tail=wanted.estimate_tail,
            hints=wanted.hints,
        )

    def parts(self) -> list[Part]:
        """Everything that holds visible tokens, and what of it lies outside of the window, so that an index may be asked."""
        size, config = self._tail.table.layout.block_size, self._engine.config
        stored = self._run.base_tokens
        parts = []
        base = first_block = 0
        for view in self._views:
            begin = max(0, -(-(config.window.sink_tokens - base) // size) * size)
            end = min(view.visible, stored - config.window.recent_tokens - base) // size * size
            long = end - begin >= config.indexes.segment_tokens_min
            span = Span(begin, end, first_block) if long else Span(0, 0, first_block)
            kinds = view.segment.indexes.of(self._number) if long else {}
            parts.append(Part(part_name(view.segment), view.visible, len(view.segment), span, kinds, view.segment))
            base += view.visible
            first_block += -(-view.visible // size)
        length, index = self._tail.table.length, self._tail.index
        if length:
            kinds = {} if index is None else {KIND: index}
            parts.append(Part(NAME, length, length, Span(0, self._tail.sealed, first_block), kinds, None))
        return parts

    def _version(self) -> int:
        return self._tail.seals + sum(view.segment.indexes.version for view in self._views)

    def _prepare(self, new: int, wanted: Wanted, uses: int, looks_again: bool = False) -> Prepared:
        version, parts = self._version(), self.parts()
        facts = self.facts(new, wanted, parts)
        if looks_again:
            hints = replace(facts.hints, rules_off=(*facts.hints.rules_off, DiffuseHead.name))
            facts = replace(facts, hints=hints)
        plan = self._engine.optimizer.plan(facts)
        by_name = {part.name: part for part in parts}
        for name, kind in plan.wishes:
            segment = by_name[name].segment
            if segment is not None:
                self._engine.wish(segment, kind)
        return Prepared(plan, sections_of(plan, by_name, self._tail.table.layout.block_size), version, uses, looks_again)

    def _part_facts(self, part: Part, new: int, wanted: Wanted) -> PartFacts:
        machine, spec = self._engine.machine, self._spec
        retrieval = wanted.retrieval or Dipr()
        rows = spec.q_heads // spec.kv_heads * new
        heads = self._heads(part)
        operations = 2.0 * part.visible * spec.q_heads * new * spec.head_dim
        return PartFacts(
            name=part.name,
            visible=part.visible,
            stored=part.stored,
            tier=self._tail.table.tier.name,
            seconds=machine.exact_seconds(part.visible * spec.token_nbytes, operations) - machine.exact_call_s,
            begin=part.span.begin,
            end=part.span.end,
            indexes=tuple(self._index_facts(index, part.span.tokens, rows, retrieval, heads) for index in part.kinds.values()),
            heads=heads,
            fresh=part.segment is None,
        )

    def _index_facts(
        self, index: Index, tokens: int, rows: int, retrieval: Retrieval, heads: tuple[HeadFacts, ...]
    ) -> IndexFacts:
        """heads: what is known of them; those that are not searched for long do not count."""
        machine = self._engine.machine
        sharp = cost = index.cost(tokens, rows, retrieval)
        # A query that was not answered counts as one that retrieved everything.
        answered = [(head.retrieved - head.dense * tokens) / (1 - head.dense) for head in heads if head.dense < DENSE]
        if answered:
            cost = index.cost(tokens, rows, retrieval, wanted=sum(answered) / len(answered))
        return IndexFacts(
            kind=index.kind,
            seconds=machine.search_s + machine.seconds(cost),
            nbytes=cost.nbytes,
            kept=index.nbytes,
            sharp_seconds=machine.search_s + machine.seconds(sharp),
            walks=index.walks,
            estimates_tail=index.estimates_tail,
        )

    def _heads(self, part: Part) -> tuple[HeadFacts, ...]:
        """What is known of each KV head; of its query heads, the one that wants most counts."""
        known = None if part.segment is None else part.segment.statistics.of(self._number)
        if known is None:
            return ()
        kv_heads = self._spec.kv_heads
        queries, retrieved, dense = (
            values.reshape(kv_heads, -1).max(axis=1).tolist() for values in (known.queries, known.retrieved, known.dense)
        )
        tokens = part.span.tokens
        return tuple(HeadFacts(seen, share * tokens, left) for seen, share, left in zip(queries, retrieved, dense, strict=True))


def sections_of(plan: Plan, parts: Mapping[str, Part], block_size: int) -> Sections:
    """How a plan divides the run."""
    searched, whole = [], []
    spans = {access.part for access in plan.accesses if access.index is not None}
    for access in plan.accesses:
        part = parts[access.part]
        span = Span(access.begin, access.end, part.span.first_block)
        if access.index is not None:
            tail = access.estimate_tail
            watched = part.segment is not None and isinstance(access.retrieval, Dipr)  # a range tells what is wanted
            observe = partial(part.segment.statistics.observe, plan.layer) if watched and part.segment is not None else None
            searched.append(Searched(part.kinds[access.index], span, access.retrieval, _mask(access), tail, observe))
        elif access.part in spans and not access.all_heads:
            mask = _mask(access)
            assert mask is not None
            whole.append(ReadWhole(span, mask))
    return Sections(searched, block_size, whole)


def part_name(segment: Segment) -> str:
    """How a segment is called in plans."""
    return f"segment {segment.number}"


def _mask(access: Access) -> "np.ndarray[tuple[int], np.dtype[np.bool_]] | None":
    if access.all_heads:
        return None
    mask = np.zeros(access.kv_heads, np.bool_)
    mask[list(access.heads)] = True
    return mask
