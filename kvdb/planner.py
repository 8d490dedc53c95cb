"""Plans for one layer of a session: facts are gathered, the optimizer decides, and what it decided is kept until they change."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kvdb.attention.away import Away
from kvdb.attention.run import Run
from kvdb.attention.sections import Sections
from kvdb.basis import Basis
from kvdb.catalog.segment import Segment
from kvdb.catalog.use import Asked
from kvdb.config import Config
from kvdb.facts import Call, Costs, gather
from kvdb.gpu.side import AwayPart, GpuSide, serves
from kvdb.gpu_facts import exact_seconds
from kvdb.hints import check_hints
from kvdb.parts import CPU, Part, ToAway, away_part, parts_of, sections_of
from kvdb.tail import NAME, Tail
from kvdb.types import ModelSpec
from query_optimizer.access import Access
from query_optimizer.cost import Machine
from query_optimizer.diffuse import DiffuseHead
from query_optimizer.facts import Facts
from query_optimizer.optimizer import Optimizer
from query_optimizer.plan import Plan
from query_optimizer.rules import FreshTail
from query_optimizer.wanted import NO_HINTS, Wanted

PREPARED_MAX = 64
"""Plans of one layer; a caller may ask for another alpha each time."""
AWAYS_MAX = 8
"""What answers plans on the GPU takes memory there."""
LOOK_AGAIN = 256
"""Queries of a layer, of all sessions, after which heads that are not searched for what they want are searched once more."""
FIRST_USES, USES_MAX = 4, 256
"""A plan is made anew after so many queries, each time after twice as many, as what is known of the heads changes."""


class Engine(Protocol):
    """What a planner needs of the database."""

    config: Config
    optimizer: Optimizer
    machine: Machine
    gpu: GpuSide | None

    def wish(self, segment: Segment, kind: str) -> None: ...

    def asked(self, segment: Segment, asked: Asked) -> None: ...


class Prepared:
    """A plan, how it divides the run, and what it was made for.

    parts: by name. seals: whether old tokens of the tail are to be indexed, because they are
    searched or could be. relies: whether heads are not searched for what they want because of what is known of them. looks_again:
    whether they are, to see if that is still so.
    """

    __slots__ = ("looks_again", "parts", "plan", "relies", "seals", "sections", "uses", "version")

    def __init__(
        self, plan: Plan, parts: Mapping[str, Part], sections: Sections, version: int, uses: int, looks_again: bool = False
    ) -> None:
        """version: of the indexes; uses: how many queries it is good for."""
        self.parts = parts
        self.looks_again = looks_again
        self.relies = any(access.rule == DiffuseHead.name for access in plan.accesses)
        self.plan = plan
        tail = [access for access in plan.accesses if access.part == NAME and access.tier == CPU]
        self.seals = any(access.index is not None or access.rule == FreshTail.name for access in tail)
        self.sections = sections
        self.version = version
        self.uses = uses


class Planner:
    """Plans of one layer, each prepared for what was asked and used until a fact it depended on leaves its range."""

    def __init__(self, engine: Engine, spec: ModelSpec, basis: Basis, number: int, run: Run, tail: Tail) -> None:
        self._engine = engine
        self._spec = spec
        self._basis = basis
        self._number = number
        self._run = run
        self._tail = tail
        self._prepared: dict[tuple[Wanted, int], Prepared] = {}
        self._next_uses: dict[tuple[Wanted, int], int] = {}
        self._costs: Costs = {}
        self._checked: set[Wanted] = set()
        self._stays: int | None = None
        self._aways: dict[Hashable, Away] = {}
        self._aways_version = 0

    @property
    def gpu(self) -> GpuSide | None:
        """That of the database."""
        return self._engine.gpu

    def prepare(self, new: int, wanted: Wanted) -> Prepared:
        """The plan of a call of `new` queries. Raises UnknownRule."""
        key = wanted, new.bit_length()
        prepared = self._prepared.get(key)
        if prepared is not None:
            prepared.uses -= 1
            still_good = prepared.version == self._version() and prepared.plan.holds_for(self._run.read_tokens)
            if prepared.uses >= 0 and still_good:
                return prepared
        if len(self._prepared) >= PREPARED_MAX:
            self._prepared.clear()
            self._next_uses.clear()
        uses = self._next_uses.get(key, FIRST_USES)
        self._next_uses[key] = min(2 * uses, USES_MAX)
        prepared = self._prepare(new, wanted, uses)
        if prepared.relies and new == 1 and self._looks_again():
            prepared = self._prepare(new, wanted, 1, looks_again=True)
        self._prepared[key] = prepared
        return prepared

    def check(self, wanted: Wanted) -> None:
        """Raises InvalidArgument or Unsupported for hints that cannot be followed."""
        if wanted.hints == NO_HINTS or wanted in self._checked:
            return
        parts = parts_of(self._engine.config, self._number, self._basis, self._run, self._tail)
        check_hints(self._engine.config, self._engine.optimizer, self._spec, parts, wanted)
        if len(self._checked) >= PREPARED_MAX:
            self._checked.clear()
        self._checked.add(wanted)

    def fresh(self, new: int, wanted: Wanted) -> Prepared:
        """As `prepare`, made anew and not kept. Raises UnknownRule."""
        return self._prepare(new, wanted, 0)

    def blocks_of(self, prepared: Prepared, access: Access) -> tuple[int, int]:
        """Which blocks of the run hold the tokens of an access."""
        size = self._tail.table.layout.block_size
        first = prepared.parts[access.part].span.first_block
        return first + access.begin // size, first + -(-access.end // size)

    def away_of(self, prepared: Prepared, access: Access) -> Away:
        """What answers one access on the GPU by itself."""
        to_away = self._to_away()
        assert to_away is not None
        part = prepared.parts[access.part]
        taken = away_part(access, part, self._basis, self._run, self._tail.table.layout.block_size)
        return to_away([] if taken is None else [taken], taken is None)

    def plan(self, wanted: Wanted, new: int = 1) -> Plan:
        """A plan made anew. Raises UnknownRule."""
        return self._engine.optimizer.plan(self._facts(new, wanted, self._parts(new, wanted)))

    def _parts(self, new: int, wanted: Wanted) -> list[Part]:
        """With those on the GPU as its own, where it answers sooner."""
        known = self._engine.config, self._number, self._basis, self._run, self._tail
        gpu, spec = self._engine.gpu, self._spec
        if gpu is None or gpu.memory(spec) is None or not serves(wanted) or self._stays == gpu.version:
            return parts_of(*known)
        for view in self._basis.views:
            gpu.keep(spec, view.segment)
        if self._tail.copy is None:
            self._tail.copy = gpu.tail(spec, self._tail.table)
        parts = parts_of(*known, gpu)
        tokens = sum(part.visible for part in parts if part.slots is not None)
        here = self._engine.machine.exact_seconds(tokens * spec.token_nbytes, 2.0 * tokens * spec.q_heads * new * spec.head_dim)
        sooner = exact_seconds(spec, gpu.machine, tokens, new) < here
        return parts if sooner else parts_of(*known)

    def _facts(self, new: int, wanted: Wanted, parts: list[Part]) -> Facts:
        engine, gpu = self._engine, self._engine.gpu
        known = self._spec, engine.machine, engine.config.window, self._number, new, wanted, self._costs
        return gather(Call(*known, *(() if gpu is None else (gpu.machine, gpu.memory(self._spec)))), parts)

    def stay(self) -> None:
        """The GPU failed to answer: plan without it, until something changes there."""
        self._prepared.clear()
        self._aways.clear()
        self._stays = None if self._engine.gpu is None else self._engine.gpu.version

    def _looks_again(self) -> bool:
        """Whether it is time to see if what is known of the heads is still so; then it is not for a while, in any session."""
        due = [view.segment for view in self._basis.views if view.segment.is_old(self._number, LOOK_AGAIN)]
        for segment in due:
            segment.statistics.looked(self._number, segment.use.queries_in_all)
        return bool(due)

    def _version(self) -> int:
        built = sum(view.segment.indexes.version for view in self._basis.views)
        gpu = self._engine.gpu
        on_gpu = 0 if gpu is None else gpu.version + (self._tail.copy is not None and self._tail.copy.full)
        return self._tail.seals + built + self._run.version + on_gpu

    def _prepare(self, new: int, wanted: Wanted, uses: int, looks_again: bool = False) -> Prepared:
        version, parts = self._version(), self._parts(new, wanted)
        facts = self._facts(new, wanted, parts)
        if looks_again:
            hints = replace(facts.hints, rules_off=(*facts.hints.rules_off, DiffuseHead.name))
            facts = replace(facts, hints=hints)
        plan = self._engine.optimizer.plan(facts)
        by_name = {part.name: part for part in parts}
        for name, kind in plan.wishes:
            segment = by_name[name].segment
            if segment is not None:
                self._engine.wish(segment, kind)
        sections = sections_of(plan, by_name, self._basis, self._run, self._tail.table.layout.block_size, self._to_away())
        return Prepared(plan, by_name, sections, version, uses, looks_again)

    def _to_away(self) -> ToAway | None:
        gpu = self._engine.gpu
        if gpu is None:
            return None

        def made(parts: Sequence[AwayPart], tail: bool) -> Away:
            """What plans alike have in common, as making its tables on the device takes longer than a query."""
            version = self._version()
            if self._aways_version != version or len(self._aways) >= AWAYS_MAX:
                self._aways.clear()
                self._aways_version = version
            key = tail, tuple((part.span, part.kind, part.retrieval, part.turn) for part in parts)
            if key not in self._aways:
                copy = self._tail.copy if tail else None
                self._aways[key] = gpu.away(self._spec, parts, self._basis.moves, copy)
            return self._aways[key]

        return made
