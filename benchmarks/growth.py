"""What does a step take from a thousand to four million tokens, and does the model of docs/performance.md say so?

    python -m benchmarks.growth [--tokens 1024 16384 262144] [--kinds flat clusters] [--kv-heads 2] [--cache DIR]

One layer of sharp heads, bfloat16, head_dim 128, 4 query heads for each KV head. For each length and way: what the formulas of
`indexes` say a step costs (bytes, multiplications and reads that are in no cache, for each token and KV head), what it did read,
and predicted and measured milliseconds of a decode step of a session, `session.attend` by native code, behind an exact one. The
machine is calibrated first. The graph is built up to --walk-max tokens, as that takes 45 s for a million keys; four million
tokens of two KV heads want 13 GiB. --cache keeps the layer and the indexes, so that a second run builds nothing.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from benchmarks.cost import exact_seconds, step_seconds, timed, wanted_tokens
from benchmarks.harness import argument_parser, report
from benchmarks.harness import machine as machine_facts
from benchmarks.kinds import USUAL, build
from benchmarks.layer import Layer
from benchmarks.workloads import Shape, generate
from indexes.base import Index
from indexes.retrieval import Dipr, Retrieval, TopK
from kvdb import _native
from kvdb.hardware.calibrate import calibrate
from query_optimizer.cost import Machine

TOKENS = [1 << bits for bits in range(10, 23, 2)]
KINDS = ("flat", "quantized", "clusters", "hnsw")
RETRIEVALS: dict[str, Retrieval] = {"quantized": TopK(64)}
"""Retrievals of the kinds that are not asked for a range."""
ROUNDS = 8


def main() -> None:
    given = arguments()
    machine = calibrate().machine
    report("machine", **machine_facts(), isa=_native.isa(), threads=_native.threads(), **machine.to_dict())
    for tokens in given.tokens:
        kinds = [kind for kind in given.kinds if kind != "hnsw" or tokens <= given.walk_max]
        measured(Layer(generate("sharp", Shape(tokens, given.kv_heads), cache=given.cache)), kinds, machine, given.cache)


def measured(layer: Layer, kinds: list[str], machine: Machine, cache: Path | None) -> None:
    """One line for the exact step and one for each kind."""
    keys = layer.tokens * layer.kv_heads
    queries = [layer.query(i % layer.workload.queries.shape[1]) for i in range(ROUNDS)]
    expected = wanted_tokens(layer, queries)
    exact_ms = []
    for kind in kinds:
        started = time.perf_counter()
        index = build(kind, layer, cache).index
        built_s = time.perf_counter() - started
        retrieval = RETRIEVALS.get(kind, Dipr())
        seconds = timed(layer, {kind: index}, queries, retrieval)
        exact_ms.append(1e3 * seconds["exact"])
        nbytes = [layer.sparse(index, q, retrieval).stats.nbytes for q in queries]
        predicted = step_seconds(machine, layer, index, retrieval, expected.get(retrieval))
        report(
            "growth",
            tokens=layer.tokens,
            way=kind,
            retrieval=str(retrieval),
            **modelled(layer, index, retrieval, expected.get(retrieval)),
            read_bytes_a_token=sum(nbytes) / len(nbytes) / keys,
            ms=1e3 * seconds[kind],
            predicted_ms=1e3 * predicted,
            of_exact=seconds[kind] / seconds["exact"],
            built_s=built_s,
            index_bytes_a_token=index.nbytes / keys,
        )
    report(
        "growth",
        tokens=layer.tokens,
        way="exact",
        bytes_a_token=layer.blocks.token_nbytes,
        operations_a_token=2.0 * layer.blocks.head_dim * len(layer.workload.queries) / layer.kv_heads,
        jumps_a_head=0.0,
        ms=median(exact_ms) if exact_ms else None,
        predicted_ms=1e3 * exact_seconds(machine, layer),
    )


def modelled(layer: Layer, index: Index, retrieval: Retrieval, expected_tokens: float | None) -> dict[str, float]:
    """What the formulas say of one search, for each token and KV head; jumps for each KV head, one after the other."""
    visible, rows = layer.end - layer.begin, len(layer.workload.queries) // layer.kv_heads
    cost = index.cost(visible, rows, retrieval, expected_tokens=expected_tokens)
    keys = max(visible * layer.kv_heads, 1)
    return {
        "bytes_a_token": cost.nbytes / keys,
        "operations_a_token": cost.operations / keys,
        "jumps_a_head": cost.jumps * _native.threads() / layer.kv_heads,
        "given_up": cost.given_up,
    }


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths (default %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=USUAL, default=list(KINDS), help="indexes (default %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--walk-max", type=int, default=1 << 18, help="tokens up to which a graph is built (default %(default)s)")
    parser.add_argument("--cache", type=Path, help="folder that keeps workloads and indexes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
