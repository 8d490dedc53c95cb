"""Gathers the facts of a call for the optimizer: numbers from segments, indexes, statistics and the machine."""

from dataclasses import dataclass
from math import log2
from typing import Any, TypedDict

import numpy as np

import kvdb.planning.gpu_facts as gpu_facts
from indexes.base import Cost, Index
from indexes.retrieval import Retrieval, TopK
from indexes.selectivity import GUESS
from kvdb.catalog.segments.tail import NAME as TAIL_NAME
from kvdb.config import WindowConfig
from kvdb.planning.parts import Part
from kvdb.types import LayerShape
from query_optimizer.cost import GpuMachine, Machine
from query_optimizer.diffuse import ESTIMATED
from query_optimizer.facts import Facts, FastMemory, HeadFacts, IndexFacts, PartFacts
from query_optimizer.query_options import QueryOptions
from query_optimizer.rule import DEFAULT

DENSE_SHARE_MAX = 0.5
"""If the search gave up a larger share of a KV head's queries, the head is read whole, so its numbers say nothing about a
search."""


COSTS_MAX = 256
"""How many costs of one layer are remembered."""
ESTIMATE_COST = 1.3
"""Cost of a search that estimates the tail, relative to one that does not; measured on clusters (benchmarks/README.md)."""


class _Quantizing(TypedDict, total=False):
    """Fields of PartFacts, none for a part that is not quantized."""

    format: str
    key_error: float
    value_error: float


Costs = dict[tuple[Any, ...], tuple[Cost, float, int]]


@dataclass(frozen=True)
class Call:
    """A call of `new` queries in one layer of so many that keep keys and values. costs: the costs of earlier calls of the layer,
    to which this one adds. gpu: the speeds of the GPU, None without one. fast: its free memory, None without one."""

    shape: LayerShape
    layers: int
    machine: Machine
    window: WindowConfig
    layer: int
    new: int
    options: QueryOptions
    costs: Costs
    gpu: GpuMachine | None = None
    fast: FastMemory | None = None

    @property
    def rows(self) -> int:
        """The number of queries that one KV head answers."""
        return self.shape.q_heads // self.shape.kv_heads * self.new


def operations_of(shape: LayerShape, tokens: int, new: int) -> float:
    """Multiplications of the exact answers of `new` queries over so many tokens."""
    return float(tokens) * shape.q_heads * new * (shape.head_dim + shape.value_dim)


def gather(call: Call, parts: list[Part]) -> Facts:
    """The facts of a call over these parts."""
    shape, machine = call.shape, call.machine
    own = sum(part.visible * part.token_nbytes(call.layer, shape) for part in parts)
    read = own * call.layers  # bytes read between two reads of this layer
    working_set = 2.0 ** read.bit_length()
    searches_cpu = any(part.kinds for part in parts) or not any(part.slots is not None for part in parts)
    return Facts(
        layer=call.layer,
        layers=call.layers,
        parts=tuple(_part_facts(call, part, working_set) for part in parts),
        new_tokens=call.new,
        kv_heads=shape.kv_heads,
        group=shape.q_heads // shape.kv_heads,
        token_nbytes=shape.token_nbytes,
        window_tokens=call.window.sink_tokens + call.window.recent_tokens,
        call_seconds=machine.exact_call_s,
        step_seconds=machine.step_seconds(working_set) if searches_cpu else 0.0,  # the searches of a GPU include its step
        fast=call.fast,
        options=call.options,
    )


def _part_facts(call: Call, part: Part, working_set: float) -> PartFacts:
    machine, shape = call.machine, call.shape
    token_nbytes = part.token_nbytes(call.layer, shape)
    heads: tuple[HeadFacts, ...] = ()
    if part.slots is not None and call.gpu is not None:
        seconds = gpu_facts.exact_seconds(shape, call.gpu, part.visible, call.new) - call.gpu.call_s
        indexes = gpu_facts.indexes(shape, call.gpu, call.options, part, call.new)
    else:
        heads = _heads(call, part)
        operations = operations_of(shape, part.visible, call.new)
        seconds = machine.exact_seconds(part.visible * token_nbytes, operations, working_set) - machine.exact_call_s
        indexes = tuple(_index_facts(call, part, index, heads, seconds, working_set) for index in part.kinds.values())
    return PartFacts(
        name=part.name,
        visible=part.visible,
        stored=part.stored,
        tier=part.tier,
        seconds=seconds,
        token_nbytes=token_nbytes,
        begin=part.span.begin,
        end=part.span.end,
        indexes=indexes,
        heads=heads,
        building=() if part.segment is None or part.slots is not None else part.segment.indexes.in_progress(),
        shift=part.shift,
        overlaid=part.overlaid,
        sessions=1 if part.segment is None else part.segment.usage.sessions,
        is_tail=part.name == TAIL_NAME,
        **_quantizing(part),
    )


def _quantizing(part: Part) -> _Quantizing:
    """How its keys and values are quantized, and what that changed."""
    if part.segment is None or not part.segment.format:
        return {}
    rounding = part.segment.rounding
    return {"format": part.segment.format, "key_error": rounding.key_error, "value_error": rounding.value_error}


def _index_facts(
    call: Call, part: Part, index: Index, heads: tuple[HeadFacts, ...], whole_seconds: float, working_set: float
) -> IndexFacts:
    """The facts of an index. heads: what is known about the KV heads. whole_seconds: the time to read the whole part."""
    tokens = part.span.tokens

    def seconds_of(retrieval: Retrieval, expected_tokens: float | None = None) -> tuple[Cost, float, int]:
        cost, seconds, nbytes = _cost(call, part.name, index, tokens, retrieval, expected_tokens, working_set)
        return cost, seconds + cost.given_up * whole_seconds, nbytes

    retrieval = call.options.retrieval or DEFAULT
    cost, seconds, kept_nbytes = _, sharp, _ = seconds_of(retrieval)
    # A query that was not answered counts as one that retrieved everything.
    answered = [
        (head.retrieved_tokens - head.dense_share * tokens) / (1 - head.dense_share)
        for head in heads
        if head.dense_share < DENSE_SHARE_MAX
    ]
    if answered:
        cost, seconds, _ = seconds_of(retrieval, _rounded(sum(answered) / len(answered)))
    tail = ESTIMATE_COST * seconds_of(ESTIMATED)[1] if index.estimates_tail else None
    return IndexFacts(index.kind, seconds, cost.nbytes, kept_nbytes, sharp, index.walks, tail)


def _cost(  # what a cost depends on
    call: Call,
    part: str,
    index: Index,
    tokens: int,
    retrieval: Retrieval,
    expected_tokens: float | None,
    working_set: float,
) -> tuple[Cost, float, int]:
    """The cost of a search, its seconds without the full read that follows where it gives up, and the memory of the index. All
    are remembered for later calls."""
    key = part, index.kind, tokens, call.rows, retrieval, expected_tokens, working_set
    known = call.costs.get(key)
    if known is None:
        machine = call.machine
        cost = index.cost(tokens, call.rows, retrieval, expected_tokens=expected_tokens)
        found = min(retrieval.k, tokens) if isinstance(retrieval, TopK) else GUESS if expected_tokens is None else expected_tokens
        values = found * call.rows * call.shape.token_nbytes / 2
        seconds = machine.search_seconds(cost, values, working_set)
        if len(call.costs) >= COSTS_MAX:
            call.costs.clear()
        known = call.costs[key] = cost, seconds, index.nbytes
    return known


def _rounded(tokens: float) -> float:
    """Round to half an octave, so that costs need not be computed anew for every average."""
    return float(2 ** (round(2 * log2(max(tokens, 1.0))) / 2))


def _heads(call: Call, part: Part) -> tuple[HeadFacts, ...]:
    """What is known about each KV head: the largest numbers of its query heads."""
    known = None if part.segment is None else part.segment.statistics.of(call.layer)
    if known is None:
        return ()
    kv_heads = call.shape.kv_heads
    measures = np.array([known.queries, known.retrieved, known.dense], np.float32)
    queries, retrieved, dense = measures.reshape(3, kv_heads, -1).max(axis=2).tolist()
    tokens = part.span.tokens
    return tuple(HeadFacts(seen, share * tokens, left) for seen, share, left in zip(queries, retrieved, dense, strict=True))
