"""What does a decode step over quantized blocks cost, exact and by each kind of index, and how wrong is it?

    python -m benchmarks.quantized_search [--tokens 16384 65536] [--kinds flat clusters hnsw] [--formats int8 int4] [--rounds 24]

A line for each length, format and way. What is timed are decode steps of a session (`session.attend`, as `benchmarks.retrieve`
does), each behind a timed read of all of bfloat16's keys and values, which leaves the caches cold; all formats and ways in turns,
medians. `of_bfloat16` is the same way's step over bfloat16 in the same turns, `faster` the exact step over the same blocks.
`error` is that of the output beside exact attention over bfloat16, in one norm over all rows; `stored_error` beside exact
attention over what is stored, so that the first holds what the format changed and the second only what the search left out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.decoding import Decoding, read_seconds
from benchmarks.harness import argument_parser, machine, report
from benchmarks.kinds import KINDS, build
from benchmarks.layer import Layer
from benchmarks.workloads import Shape, Workload, generate
from indexes.base import Index
from indexes.oracle import Oracle
from indexes.retrieval import Dipr
from kvdb import _native
from kvdb.codecs.registry import CODECS

WARM_UP = 4
RAW = "bfloat16"


@dataclass(frozen=True)
class Way:
    """One way to answer over one layer. index: None reads everything. out: `[q_heads, queries, head_dim]`."""

    stored: str
    kind: str
    layer: Layer
    index: Index | None
    decoding: Decoding
    out: np.ndarray
    scanned: float
    retrieved: float


def main() -> None:
    given = arguments()
    report("machine", **machine(), isa=_native.isa(), threads=_native.threads())
    for tokens in given.tokens:
        measured(generate(given.workload, Shape(tokens), given.queries, cache=given.cache), given)


def measured(workload: Workload, given: argparse.Namespace) -> None:
    """The lines of one length."""
    layers = {RAW: Layer(workload)} | {name: Layer(workload, name) for name in given.formats}
    ways = [way(name, kind, layer, given.cache) for name, layer in layers.items() for kind in ("exact", *given.kinds)]
    oracles = {name: Oracle(layer.blocks, layer.queries(), layer.window) for name, layer in layers.items()}
    steps, searches, read = timed(ways, layers[RAW], given.rounds)
    for number, one in enumerate(ways):
        same = next(i for i, other in enumerate(ways) if other.stored == RAW and other.kind == one.kind)
        exact = next(i for i, other in enumerate(ways) if other.stored == one.stored and other.kind == "exact")
        report(
            "quantized_search",
            tokens=one.layer.tokens,
            workload=workload.name,
            format=one.stored,
            way=one.kind,
            ms=1e3 * steps[number],
            search_ms=None if one.index is None else 1e3 * searches[number],
            read_ms=1e3 * read,
            of_bfloat16=steps[number] / steps[same],
            faster=steps[exact] / steps[number],
            error=oracles[RAW].error_of_all(one.out),
            stored_error=oracles[one.stored].error_of_all(one.out),
            scanned=one.scanned,
            retrieved=one.retrieved,
            native_share=one.decoding.native / one.decoding.steps,
        )


def way(stored: str, kind: str, layer: Layer, cache: Path | None) -> Way:
    """A way of answering, its index built, and what it answers to all queries."""
    queries = [layer.query(i) for i in range(layer.workload.queries.shape[1])]
    if kind == "exact":
        outs = [layer.exact(q) for q in queries]
        return Way(stored, kind, layer, None, Decoding(layer, None, Dipr()), joined(outs), layer.tokens, layer.tokens)
    index = build(kind, layer, None if cache is None else cache / stored).index
    answers = [layer.sparse(index, q, Dipr()) for q in queries]
    scanned = sum(answer.found.scanned for answer in answers) / len(answers) / layer.kv_heads
    rows = sum(len(answer.found.offsets) - 1 for answer in answers)
    retrieved = sum(len(answer.found.ids) for answer in answers) / rows
    decoding = Decoding(layer, index, Dipr())
    return Way(stored, kind, layer, index, decoding, joined([answer.out for answer in answers]), scanned, retrieved)


def joined(outs: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([out.astype(np.float32) for out in outs], axis=1)


def timed(ways: list[Way], raw: Layer, rounds: int) -> tuple[list[float], list[float], float]:
    """Median seconds of each way's steps, of its searches alone, and of a read of everything in bfloat16."""
    queries = [raw.query(i) for i in range(raw.workload.queries.shape[1])]
    for q in queries[:WARM_UP]:
        for one in ways:
            one.decoding.step(q)
    steps: list[list[float]] = [[] for _ in ways]
    searches: list[list[float]] = [[] for _ in ways]
    reads = []
    for number in range(rounds):
        q = queries[number % len(queries)]
        for at, one in enumerate(ways):
            reads.append(read_seconds(raw))
            if one.index is not None:
                searches[at].append(one.layer.sparse(one.index, q, Dipr()).search_s)
                reads.append(read_seconds(raw))
            steps[at].append(one.decoding.step(q))
    return [median(taken) for taken in steps], [median(taken) if taken else 0.0 for taken in searches], median(reads)


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 65_536])
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=["flat", "clusters", "hnsw"])
    parser.add_argument("--formats", nargs="*", choices=[name for name in CODECS if name], default=["int8", "int4"])
    parser.add_argument("--workload", choices=["sharp", "diffuse"], default="sharp")
    parser.add_argument("--queries", type=int, default=8, help="decode steps of each workload (default 8)")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--cache", type=Path, help="folder that keeps workloads and indexes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
