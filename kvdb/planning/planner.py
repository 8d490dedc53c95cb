"""Plans for one layer of a session: facts are gathered, the optimizer decides, and its plan is kept until the facts change."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from kvdb._native import Version
from kvdb.attention.block_run import BlockRun
from kvdb.attention.device import DeviceAttention
from kvdb.catalog.evidence.evidence import Evidence
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.catalog.segments.tail import Tail
from kvdb.gpu.interface import DevicePart, GpuInterface, supports
from kvdb.planning.budget import guards_of, layer_budget, ranges_of
from kvdb.planning.facts import Call, Costs, gather, operations_of
from kvdb.planning.gpu_facts import exact_seconds
from kvdb.planning.hints import check_hints
from kvdb.planning.partition import MakeDeviceAttention, device_part, run_partition
from kvdb.planning.parts import Part, parts_of
from kvdb.planning.prepared import SERVED, Prepared, Variant, Versions
from kvdb.planning.services import PlanningServices
from kvdb.types import ModelSpec
from query_optimizer.access import Access
from query_optimizer.diffuse import DiffuseHead
from query_optimizer.facts import Facts
from query_optimizer.plan import Plan
from query_optimizer.query_options import NO_HINTS, NO_OPTIONS, QueryOptions
from query_optimizer.ways import HeadShare

PREPARED_MAX = 64
"""How many plans of one layer are kept; a caller may ask for another alpha each time."""
DEVICE_ATTENTIONS_MAX = 8
"""The number of DeviceAttention objects that are kept; each takes memory of the GPU."""
RECHECK_QUERIES = 256
"""After so many queries of a layer, over all sessions, heads that are known to be diffuse are searched once more."""
FIRST_USES, FIRST_BUDGETED_USES, USES_MAX, BUDGETED_USES_MAX, SETTLED_USES = 4, 32, 256, 1024, 1 << 30
"""A plan is made anew after FIRST_USES queries, the next after twice as many, and so on up to USES_MAX, because what is known
about the heads changes. With an error budget that is evidence, and whatever it proves has a plan made anew at once; so the first
is kept longer, and so are all, unless they know heads that are to be searched once more. A plan that is settled is kept."""

Key = tuple[QueryOptions, int, Variant]
"""What a plan is made for: options, the bits of the number of queries, and what an audit changes."""
_NO_KEY: Key = NO_OPTIONS, 0, SERVED


class Planner:
    """Makes the plans of one layer. A plan is kept for its options and number of queries until a fact that it depends on
    changes."""

    def __init__(
        self, services: PlanningServices, spec: ModelSpec, snapshot: Snapshot, layer: int, run: BlockRun, tail: Tail
    ) -> None:
        self._services = services
        self._spec = spec
        self._shape = spec.shape(layer)
        self._gpu = services.gpu if spec.uniform else None
        self._snapshot = snapshot
        self._layer = layer
        self._run = run
        self._tail = tail
        self._prepared: dict[Key, Prepared] = {}
        self._last: tuple[Key, Prepared | None] = _NO_KEY, None
        self._next_uses: dict[Key, int] = {}
        self._costs: Costs = {}
        self._checked: set[QueryOptions] = set()
        self._failed_gpu_version: int | None = None
        self._device_attentions: dict[Hashable, DeviceAttention] = {}
        self._device_attentions_version: Versions = ()
        segments = [view.segment for view in snapshot.views]
        owners = [tail.evidence, *(owner for one in segments for owner in (one.indexes, one.evidence))]
        self._changes = [owner.changes.of(layer) for owner in owners]

    @property
    def run(self) -> BlockRun:
        """What queries of the layer read."""
        return self._run

    @property
    def gpu(self) -> GpuInterface | None:
        """The GPU of the database, None without one, and for a model whose layers differ."""
        return self._gpu

    def prepare(self, n: int, options: QueryOptions, variant: Variant = SERVED) -> Prepared:
        """The plan of a call of n queries. variant: SERVED for the plan of the answer, another for an audit. Raises
        UnknownRule."""
        key = options, n.bit_length(), variant
        last, prepared = self._last
        # A caller most often asks for the same again; hashing what it asks for takes longer than all else.
        if last[0] is not options or last[1:] != key[1:]:
            prepared = self._prepared.get(key)
        if prepared is not None:
            self._last = key, prepared
            prepared.uses_left -= 1
            still_good = prepared.version == self._versions() and prepared.plan.holds_for(self._run.read_tokens)
            if prepared.uses_left >= 0 and still_good:
                return prepared
        if len(self._prepared) >= PREPARED_MAX:
            self._prepared.clear()
            self._next_uses.clear()
        uses = self._next_uses.get(key, FIRST_USES if options.error_max is None else FIRST_BUDGETED_USES)
        prepared = self._prepare(n, options, uses, variant=variant)
        most = USES_MAX if options.error_max is None or prepared.knows_diffuse else BUDGETED_USES_MAX
        self._next_uses[key] = min(2 * uses, most)
        if prepared.plan.settled:
            prepared.uses_left = SETTLED_USES
        if prepared.knows_diffuse and n == 1 and self._recheck_is_due():
            prepared = self._prepare(n, options, 1, rechecks=True)
        self._prepared[key] = prepared
        self._last = key, prepared
        return prepared

    def facts_of(self, prepared: Prepared) -> list[tuple[Version, int]] | None:
        """The facts a plan depends on that other threads may change, with the values that it holds for; None if it no longer
        holds."""
        facts = [(changes, changes.value) for changes in self._changes]
        return facts if prepared.version == self._versions() else None

    def prepare_once(self, n: int, options: QueryOptions) -> Prepared:
        """A plan as from `prepare`, but made anew and not kept. Raises UnknownRule."""
        return self._prepare(n, options, 0)

    def check(self, options: QueryOptions) -> None:
        """Raises InvalidArgument or Unsupported for hints that cannot be followed."""
        if options.hints == NO_HINTS or options in self._checked:
            return
        parts = parts_of(self._services.config, self._layer, self._snapshot, self._run, self._tail)
        check_hints(self._services.config, self._services.optimizer, self._shape, parts, options)
        if len(self._checked) >= PREPARED_MAX:
            self._checked.clear()
        self._checked.add(options)

    def plan(self, options: QueryOptions, n: int = 1) -> Plan:
        """The plan of n queries, made anew. Raises UnknownRule."""
        parts = self._parts(n, options)
        return self._services.optimizer.plan(self._budgeted(self._facts(n, options, parts), parts, SERVED))

    def blocks_of(self, prepared: Prepared, access: Access) -> tuple[int, int]:
        """The blocks [first, last) of the run that hold the tokens of an access."""
        first = prepared.parts[access.part].span.first_block
        return first + access.begin // self._block_size, first + -(-access.end // self._block_size)

    def device_attention_of(self, prepared: Prepared, access: Access) -> DeviceAttention:
        """The object that answers one access on the GPU by itself."""
        make_device = self._device_attention_maker()
        assert make_device is not None
        part = prepared.parts[access.part]
        if part.slots is None:
            return make_device([], True)
        return make_device([device_part(access, part, self._snapshot, self._run, self._block_size)], False)

    def leave_gpu(self) -> None:
        """Plan without the GPU, which failed to answer, until its version changes."""
        self.forget()
        self._failed_gpu_version = None if self.gpu is None else self.gpu.version

    def suggest(self, prepared: Prepared) -> None:
        """Have the indexes built that a plan wishes for, if the configuration allows it."""
        wishes, prepared.wishes = prepared.wishes, ()
        for segment, kind in wishes:
            self._services.advisor.suggest(segment, kind)

    def build_seconds(self, prepared: Prepared) -> float:
        """What the indexes that a plan wishes for would take to build in this layer."""
        return sum(self._services.advisor.build_seconds(segment, kind) for segment, kind in prepared.wishes)

    def asked_before(self) -> float:
        """How many queries this layer of the stored tokens has had, in all sessions so far."""
        segments = [view.segment for view in self._snapshot.views]
        return min((one.usage.queries_in_all / len(one.tables) for one in segments), default=0.0)

    def forget(self) -> None:
        """Forget all plans, and what they have on the GPU."""
        self._prepared.clear()
        self._last = _NO_KEY, None
        self._device_attentions.clear()

    @property
    def _block_size(self) -> int:
        return self._tail.table.layout.block_size

    def _parts(self, n: int, options: QueryOptions) -> list[Part]:
        """The parts of the layer. Copies on the GPU are parts of their own, if the GPU answers sooner than the CPU."""
        known = self._services.config, self._layer, self._snapshot, self._run, self._tail
        gpu, spec, shape, machine = self.gpu, self._spec, self._shape, self._services.machine
        if gpu is None or gpu.memory(spec) is None or not supports(options) or self._failed_gpu_version == gpu.version:
            return parts_of(*known)
        for view in self._snapshot.views:
            gpu.prefetch(spec, view.segment)
        if self._tail.copy is None:
            self._tail.copy = gpu.mirror_tail(spec, self._tail.table)
        parts = parts_of(*known, gpu)
        tokens = sum(part.visible for part in parts if part.on_gpu)
        cpu_seconds = machine.exact_seconds(tokens * shape.token_nbytes, operations_of(shape, tokens, n))
        return parts if exact_seconds(shape, gpu.machine, tokens, n) < cpu_seconds else parts_of(*known)

    def _facts(self, n: int, options: QueryOptions, parts: list[Part]) -> Facts:
        services, gpu = self._services, self.gpu
        known = self._shape, len(self._spec.kept), services.machine, services.config.window, self._layer, n, options, self._costs
        return gather(Call(*known, *(() if gpu is None else (gpu.machine, gpu.memory(self._spec)))), parts)

    def _recheck_is_due(self) -> bool:
        """Whether diffuse heads are due to be searched once more. If so, they are not due again for a while, in any session."""
        due = [view.segment for view in self._snapshot.views if view.segment.is_due_for_probe(self._layer, RECHECK_QUERIES)]
        for segment in due:
            segment.statistics.mark_probed(self._layer, segment.usage.queries_in_all)
        return bool(due)

    def _versions(self) -> Versions:
        gpu, copy = self.gpu, self._tail.copy
        on_gpu = (0, 0) if gpu is None else (gpu.version, copy is not None and copy.full)
        return self._tail.seals, self._run.version, *on_gpu, *(changes.value for changes in self._changes)

    def _evidence(self, parts: list[Part]) -> tuple[Evidence, ...]:
        """The evidence of each part that an index may search."""
        owners = [self._tail if part.segment is None else part.segment for part in parts if part.span.tokens]
        return tuple(dict.fromkeys(owner.evidence for owner in owners))

    def _budgeted(self, facts: Facts, parts: list[Part], variant: Variant) -> Facts:
        """The facts with the error budget of a query that names nothing."""
        error_max = facts.options.error_max
        if error_max is None:
            return facts
        evidence = [one.of(self._layer) for one in self._evidence(parts)]
        budget = layer_budget(facts, evidence, error_max, variant.trial)
        heads = tuple(HeadShare() if head in variant.whole else share for head, share in enumerate(budget.heads))
        return replace(facts, budget=replace(budget, heads=heads))

    def _prepare(self, n: int, options: QueryOptions, uses: int, rechecks: bool = False, variant: Variant = SERVED) -> Prepared:
        version, parts = self._versions(), self._parts(n, options)
        facts, evidence = self._budgeted(self._facts(n, options, parts), parts, variant), self._evidence(parts)
        if rechecks:
            hints = replace(facts.hints, rules_off=(*facts.hints.rules_off, DiffuseHead.name))
            facts = replace(facts, options=replace(options, hints=hints))
        plan = self._services.optimizer.plan(facts)
        by_name = {part.name: part for part in parts}
        wanted = [(by_name[name].segment, kind) for name, kind in plan.wishes]
        wishes = tuple((segment, kind) for segment, kind in wanted if segment is not None)
        make_device, sinks = self._device_attention_maker(), self._services.config.window.sink_tokens
        partition = run_partition(plan, by_name, self._snapshot, self._run, self._block_size, make_device, sinks)
        if facts.budget is not None:
            known = [one.of(self._layer) for one in evidence]
            partition.guards = guards_of(facts.budget, known)
            partition.ranges = ranges_of(facts.budget, known, self._shape.q_heads)
        prepared = Prepared(plan, by_name, partition, version, uses, rechecks, facts.budget, evidence, wishes)
        if facts.budget is None:  # somebody asked for a search
            self.suggest(prepared)
        return prepared

    def _device_attention_maker(self) -> MakeDeviceAttention | None:
        gpu = self.gpu
        if gpu is None:
            return None

        def make(parts: Sequence[DevicePart], tail: bool) -> DeviceAttention:
            """The object for these parts. Plans with the same parts share it, because making its tables on the device takes
            longer than a query."""
            version = self._versions()
            if self._device_attentions_version != version or len(self._device_attentions) >= DEVICE_ATTENTIONS_MAX:
                self._device_attentions.clear()
                self._device_attentions_version = version
            key = tail, tuple((part.span, part.kind, part.retrieval, part.rotation) for part in parts)
            if key not in self._device_attentions:
                copy = self._tail.copy if tail else None
                self._device_attentions[key] = gpu.layer_attention(self._spec, parts, self._snapshot.moves, copy)
            return self._device_attentions[key]

        return make
