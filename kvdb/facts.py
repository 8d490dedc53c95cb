"""What the optimizer is told of a call: numbers, gathered from segments, indexes, statistics and the machine."""

from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np

import kvdb.gpu_facts as gpu_facts
from indexes.base import Cost, Index
from indexes.demand import GUESS
from indexes.retrieval import Retrieval, TopK
from kvdb.config import WindowConfig
from kvdb.parts import Part
from kvdb.tail import NAME as TAIL_NAME
from kvdb.types import ModelSpec
from query_optimizer.cost import GpuMachine, Machine
from query_optimizer.diffuse import ESTIMATED
from query_optimizer.facts import Facts, FastMemory, HeadFacts, IndexFacts, PartFacts
from query_optimizer.rule import DEFAULT
from query_optimizer.wanted import Wanted

DENSE = 0.5
"""A KV head of which a larger share of the queries wants too much is not searched; what it wants says nothing of the others."""


COSTS_MAX = 256
TAIL = 1.3
"""Times as much as without takes a search with an estimate of the rest; measured on clusters (benchmarks/README.md)."""


Costs = dict[tuple[Any, ...], tuple[Cost, float, int]]


@dataclass(frozen=True)
class Call:
    """A call of `new` queries in one layer. costs: remembers those of earlier calls of the layer. gpu, fast: what the GPU does in
    a second and what is free of its memory, None without one."""

    spec: ModelSpec
    machine: Machine
    window: WindowConfig
    layer: int
    new: int
    wanted: Wanted
    costs: Costs
    gpu: GpuMachine | None = None
    fast: FastMemory | None = None

    @property
    def rows(self) -> int:
        """Queries of one KV head."""
        return self.spec.q_heads // self.spec.kv_heads * self.new


def gather(call: Call, parts: list[Part]) -> Facts:
    """What the optimizer sees of a call over these parts."""
    spec, machine, wanted = call.spec, call.machine, call.wanted
    read = sum(part.visible for part in parts) * spec.token_nbytes * spec.layers  # before this layer is read again
    among = 2.0 ** read.bit_length()
    searches_here = any(part.kinds for part in parts) or not any(part.slots is not None for part in parts)
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
        step_seconds=machine.step_seconds(among) if searches_here else 0.0,  # what the GPU takes is in its searches
        fast=call.fast,
        retrieval=wanted.retrieval,
        bounded=wanted.missed_mass_max is not None,
        estimate_tail=wanted.estimate_tail,
        hints=wanted.hints,
    )


def _part_facts(call: Call, part: Part, among: float) -> PartFacts:
    machine, spec = call.machine, call.spec
    heads: tuple[HeadFacts, ...] = ()
    if part.slots is not None and call.gpu is not None:
        seconds = gpu_facts.exact_seconds(spec, call.gpu, part.visible, call.new) - call.gpu.call_s
        indexes = gpu_facts.indexes(spec, call.gpu, call.wanted, part, call.new)
    else:
        heads = _heads(call, part)
        operations = 2.0 * part.visible * spec.q_heads * call.new * spec.head_dim
        seconds = machine.exact_seconds(part.visible * spec.token_nbytes, operations, among) - machine.exact_call_s
        indexes = tuple(_index_facts(call, part, index, heads, seconds, among) for index in part.kinds.values())
    return PartFacts(
        name=part.name,
        visible=part.visible,
        stored=part.stored,
        tier=part.tier,
        seconds=seconds,
        begin=part.span.begin,
        end=part.span.end,
        indexes=indexes,
        heads=heads,
        building=() if part.segment is None or part.slots is not None else part.segment.indexes.under_way(),
        shift=part.shift,
        overlaid=part.overlaid,
        sessions=1 if part.segment is None else part.segment.use.sessions,
        fresh=part.name == TAIL_NAME,
    )


def _index_facts(
    call: Call, part: Part, index: Index, heads: tuple[HeadFacts, ...], whole_seconds: float, among: float
) -> IndexFacts:
    """heads: what is known of them; those that are not searched for long do not count. whole_seconds: of reading the part."""
    tokens = part.span.tokens

    def seconds_of(retrieval: Retrieval, wanted: float | None = None) -> tuple[Cost, float, int]:
        cost, seconds, kept = _cost(call, part.name, index, tokens, retrieval, wanted, among)
        return cost, seconds + cost.given_up * whole_seconds, kept

    retrieval = call.wanted.retrieval or DEFAULT
    cost, seconds, kept = _, sharp, _ = seconds_of(retrieval)
    # A query that was not answered counts as one that retrieved everything.
    answered = [(head.retrieved - head.dense * tokens) / (1 - head.dense) for head in heads if head.dense < DENSE]
    if answered:
        cost, seconds, _ = seconds_of(retrieval, _rounded(sum(answered) / len(answered)))
    tail = TAIL * seconds_of(ESTIMATED)[1] if index.estimates_tail else None
    return IndexFacts(index.kind, seconds, cost.nbytes, kept, sharp, index.walks, tail)


def _cost(  # what a cost depends on
    call: Call, part: str, index: Index, tokens: int, retrieval: Retrieval, wanted: float | None, among: float
) -> tuple[Cost, float, int]:
    """What a search takes, in seconds too, without the reading of what it gives up, and what the index keeps.

    What was asked before is remembered."""
    key = part, index.kind, tokens, call.rows, retrieval, wanted, among
    known = call.costs.get(key)
    if known is None:
        machine = call.machine
        cost = index.cost(tokens, call.rows, retrieval, wanted=wanted)
        found = min(retrieval.k, tokens) if isinstance(retrieval, TopK) else GUESS if wanted is None else wanted
        values = (1 - cost.given_up) * found * call.rows * call.spec.token_nbytes / 2
        seconds = machine.search_s + machine.seconds(cost, among) + machine.values_seconds(values, among)
        if len(call.costs) >= COSTS_MAX:
            call.costs.clear()
        known = call.costs[key] = cost, seconds, index.nbytes
    return known


def _rounded(tokens: float) -> float:
    """To half an octave, so that costs need not be computed anew for every average."""
    return float(2 ** (round(2 * log2(max(tokens, 1.0))) / 2))


def _heads(call: Call, part: Part) -> tuple[HeadFacts, ...]:
    """What is known of each KV head; of its query heads, the one that wants most counts."""
    known = None if part.segment is None else part.segment.statistics.of(call.layer)
    if known is None:
        return ()
    kv_heads = call.spec.kv_heads
    measures = np.array([known.queries, known.retrieved, known.dense], np.float32)
    queries, retrieved, dense = measures.reshape(3, kv_heads, -1).max(axis=2).tolist()
    tokens = part.span.tokens
    return tuple(HeadFacts(seen, share * tokens, left) for seen, share, left in zip(queries, retrieved, dense, strict=True))
