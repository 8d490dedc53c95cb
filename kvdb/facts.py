"""What the optimizer is told of a call: numbers, gathered from segments, indexes, statistics and the machine."""

from dataclasses import dataclass

from indexes.base import Cost, Index
from indexes.demand import GUESS
from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb.config import WindowConfig
from kvdb.parts import Part
from kvdb.types import ModelSpec
from query_optimizer.cost import Machine
from query_optimizer.facts import Facts, HeadFacts, IndexFacts, PartFacts
from query_optimizer.rules import ESTIMATED
from query_optimizer.wanted import Wanted

DENSE = 0.5
"""A KV head of which a larger share of the queries wants too much is not searched; what it wants says nothing of the others."""


TAIL = 1.3
"""Times as much as without takes a search with an estimate of the rest; measured on clusters (benchmarks/README.md)."""


@dataclass(frozen=True)
class Call:
    """A call of `new` queries in one layer. tier: where the blocks lie."""

    spec: ModelSpec
    machine: Machine
    window: WindowConfig
    layer: int
    tier: str
    new: int
    wanted: Wanted

    @property
    def rows(self) -> int:
        """Queries of one KV head."""
        return self.spec.q_heads // self.spec.kv_heads * self.new


def gather(call: Call, parts: list[Part]) -> Facts:
    """What the optimizer sees of a call over these parts."""
    spec, machine, wanted = call.spec, call.machine, call.wanted
    among = float(sum(part.visible for part in parts) * spec.token_nbytes * spec.layers)  # before this layer is read again
    return Facts(
        layer=call.layer,
        layers=spec.layers,
        parts=tuple(_part_facts(call, part, among) for part in parts),
        new_tokens=call.new,
        kv_heads=spec.kv_heads,
        group=spec.q_heads // spec.kv_heads,
        token_nbytes=spec.token_nbytes,
        window_tokens=call.window.sink_tokens + call.window.recent_tokens,
        call_seconds=machine.exact_call_s,
        step_seconds=machine.step_seconds(among),
        retrieval=wanted.retrieval,
        bounded=wanted.missed_mass_max is not None,
        estimate_tail=wanted.estimate_tail,
        hints=wanted.hints,
    )


def _part_facts(call: Call, part: Part, among: float) -> PartFacts:
    machine, spec = call.machine, call.spec
    heads = _heads(call, part)
    operations = 2.0 * part.visible * spec.q_heads * call.new * spec.head_dim
    seconds = machine.exact_seconds(part.visible * spec.token_nbytes, operations, among) - machine.exact_call_s
    return PartFacts(
        name=part.name,
        visible=part.visible,
        stored=part.stored,
        tier=call.tier,
        seconds=seconds,
        begin=part.span.begin,
        end=part.span.end,
        indexes=tuple(_index_facts(call, part, index, heads, seconds, among) for index in part.kinds.values()),
        heads=heads,
        fresh=part.segment is None,
    )


def _index_facts(
    call: Call, part: Part, index: Index, heads: tuple[HeadFacts, ...], whole_seconds: float, among: float
) -> IndexFacts:
    """heads: what is known of them; those that are not searched for long do not count. whole_seconds: of reading the part."""
    tokens, spec, machine = part.span.tokens, call.spec, call.machine
    retrieval = call.wanted.retrieval or Dipr()

    def searched(of: Retrieval, wanted: float | None = None) -> tuple[Cost, float]:
        cost = index.cost(tokens, call.rows, of, wanted=wanted)
        found = min(of.k, tokens) if isinstance(of, TopK) else GUESS if wanted is None else wanted
        values = (1 - cost.given_up) * found * call.rows * spec.token_nbytes / 2
        seconds = machine.search_s + machine.seconds(cost, among) + machine.values_seconds(values, among)
        return cost, seconds + cost.given_up * whole_seconds

    cost, seconds = _, sharp = searched(retrieval)
    # A query that was not answered counts as one that retrieved everything.
    answered = [(head.retrieved - head.dense * tokens) / (1 - head.dense) for head in heads if head.dense < DENSE]
    if answered:
        cost, seconds = searched(retrieval, max(0.0, sum(answered) / len(answered)))
    tail = TAIL * searched(ESTIMATED)[1] if index.estimates_tail else None
    return IndexFacts(index.kind, seconds, cost.nbytes, index.nbytes, sharp, index.walks, tail)


def _heads(call: Call, part: Part) -> tuple[HeadFacts, ...]:
    """What is known of each KV head; of its query heads, the one that wants most counts."""
    known = None if part.segment is None else part.segment.statistics.of(call.layer)
    if known is None:
        return ()
    kv_heads = call.spec.kv_heads
    queries, retrieved, dense = (
        values.reshape(kv_heads, -1).max(axis=1).tolist() for values in (known.queries, known.retrieved, known.dense)
    )
    tokens = part.span.tokens
    return tuple(HeadFacts(seen, share * tokens, left) for seen, share, left in zip(queries, retrieved, dense, strict=True))
