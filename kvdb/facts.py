"""What the optimizer is told of a call: numbers, gathered from segments, indexes, statistics and the machine."""

from dataclasses import dataclass

from indexes.base import Index
from indexes.retrieval import Dipr, Retrieval
from kvdb.config import WindowConfig
from kvdb.parts import Part
from kvdb.types import ModelSpec
from query_optimizer.cost import Machine
from query_optimizer.facts import Facts, HeadFacts, IndexFacts, PartFacts
from query_optimizer.wanted import Wanted

DENSE = 0.5
"""A KV head of which a larger share of the queries wants too much is not searched; what it wants says nothing of the others."""


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


def gather(call: Call, parts: list[Part]) -> Facts:
    """What the optimizer sees of a call over these parts."""
    spec, machine, wanted = call.spec, call.machine, call.wanted
    return Facts(
        layer=call.layer,
        layers=spec.layers,
        parts=tuple(_part_facts(call, part) for part in parts),
        new_tokens=call.new,
        kv_heads=spec.kv_heads,
        group=spec.q_heads // spec.kv_heads,
        token_nbytes=spec.token_nbytes,
        window_tokens=call.window.sink_tokens + call.window.recent_tokens,
        call_seconds=machine.exact_call_s,
        step_seconds=machine.step_s,
        retrieval=wanted.retrieval,
        bounded=wanted.missed_mass_max is not None,
        estimate_tail=wanted.estimate_tail,
        hints=wanted.hints,
    )


def _part_facts(call: Call, part: Part) -> PartFacts:
    machine, spec = call.machine, call.spec
    retrieval = call.wanted.retrieval or Dipr()
    heads = _heads(call, part)
    operations = 2.0 * part.visible * spec.q_heads * call.new * spec.head_dim
    return PartFacts(
        name=part.name,
        visible=part.visible,
        stored=part.stored,
        tier=call.tier,
        seconds=machine.exact_seconds(part.visible * spec.token_nbytes, operations) - machine.exact_call_s,
        begin=part.span.begin,
        end=part.span.end,
        indexes=tuple(_index_facts(call, index, part.span.tokens, retrieval, heads) for index in part.kinds.values()),
        heads=heads,
        fresh=part.segment is None,
    )


def _index_facts(call: Call, index: Index, tokens: int, retrieval: Retrieval, heads: tuple[HeadFacts, ...]) -> IndexFacts:
    """heads: what is known of them; those that are not searched for long do not count."""
    machine, rows = call.machine, call.spec.q_heads // call.spec.kv_heads * call.new
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
