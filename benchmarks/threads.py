"""What do more threads than cores cost, and what does each thread give?

    python -m benchmarks.threads [--threads 1 2 8] [--calls decode prefill] [--tokens 32768] [--turns 15]

One layer, bfloat16, 8 KV heads x 4 query heads, head_dim 128, sharp heads. Every turn runs each call with each number of threads,
in a random order: once to let threads start and fall asleep, then a few times in a row, of which the median counts. Without
--threads: one, half the cores, all of them, and four times as many. `over_cores` is the time beside that with as many threads as
cores, `speedup` what one thread takes beside it. Of the pool's counters stand beside them, for each call: how many workers took
part, the share of items that the busiest thread carried out, and how often a thread was woken.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from statistics import median
from time import perf_counter

import ml_dtypes
import numpy as np

import kvdb
from benchmarks.harness import argument_parser, machine, report
from benchmarks.kinds import build
from benchmarks.layer import Layer
from benchmarks.workloads import Shape, generate
from indexes.base import Queries
from indexes.retrieval import Dipr, TopK
from kvdb import _native

Call = Callable[[], object]
IN_A_ROW = 5
PREFILL_QUERIES, PREFILL_TOKENS = 256, 4096
SCAN_QUERIES, SCAN_TOKENS = 16, 4096
IMPORT_TOKENS = 16_384
SEARCHES = ("flat", "clusters", "hnsw")


def main() -> None:
    given = arguments()
    before = _native.threads()
    report("machine", **machine(), isa=_native.isa(), cpus_usable=_native.usable_cpus(), turns=given.turns)
    try:
        for name in given.calls:
            measured(name, CALLS[name](given.tokens), given.threads, given.turns)
    finally:
        _native.set_threads(before)


def measured(name: str, call: Call, counts: list[int], turns: int) -> None:
    """One line for each number of threads."""
    seconds: dict[int, list[float]] = {threads: [] for threads in counts}
    worked: dict[int, list[np.ndarray]] = {threads: [] for threads in counts}
    for _ in range(turns):
        for threads in random.sample(counts, len(counts)):
            _native.set_threads(threads)
            call()
            before = np.array(_native.pool_counters())
            taken = []
            for _ in range(IN_A_ROW):
                begin = perf_counter()
                call()
                taken.append(perf_counter() - begin)
            seconds[threads].append(median(taken))
            worked[threads].append((np.array(_native.pool_counters()) - before)[:threads] / IN_A_ROW)
    middle = {threads: median(values) for threads, values in seconds.items()}
    cores = min(counts, key=lambda threads: abs(threads - _native.usable_cpus()))
    for threads in counts:
        jobs, items, wakes, _ = np.mean(worked[threads], axis=0).T
        report(
            "threads",
            call=name,
            threads=threads,
            ms=1e3 * middle[threads],
            over_cores=middle[threads] / middle[cores],
            speedup=middle[min(counts)] / middle[threads],
            jobs=float(jobs[0]),
            workers_a_job=float(jobs[1:].sum() / max(jobs[0], 1e-9)),
            busiest_share=float(items.max() / max(items.sum(), 1e-9)),
            wakes_a_job=float(wakes.sum() / max(jobs[0], 1e-9)),
        )


def decode(tokens: int) -> Call:
    """Exact attention of one query, bound by memory."""
    layer = Layer(generate("sharp", Shape(tokens)))
    q = layer.query(0)
    return lambda: layer.exact(q)


def prefill(_: int) -> Call:
    """Exact attention of several queries over a few tokens, bound by arithmetic."""
    layer = Layer(generate("sharp", Shape(PREFILL_TOKENS), queries=1))
    shape = (len(layer.workload.queries), PREFILL_QUERIES, layer.workload.k.shape[2])
    q = np.random.default_rng(0).standard_normal(shape, np.float32).astype(layer.workload.k.dtype)
    return lambda: layer.exact(q)


def scan(_: int) -> Call:
    """A search of several queries over four-bit codes that lie in the caches, bound by arithmetic."""
    layer = Layer(generate("sharp", Shape(SCAN_TOKENS), queries=SCAN_QUERIES))
    index = build("quantized", layer).index
    queries = Queries.of(layer.workload.queries, layer.kv_heads, layer.scale, layer.tokens)
    return lambda: index.search(queries, TopK(64))


def search(kind: str, tokens: int) -> Call:
    """A DIPR step of one query."""
    layer = Layer(generate("sharp", Shape(tokens)))
    index, q = build(kind, layer).index, layer.query(0)
    return lambda: layer.sparse(index, q, Dipr())


def import_context(_: int) -> Call:
    """One layer becomes a context, in memory that was used before."""
    db = kvdb.connect()
    spec = kvdb.ModelSpec("threads", 1, 32, 8, 128, "bfloat16")
    ids = np.arange(IMPORT_TOKENS)
    k, v = (np.full((8, IMPORT_TOKENS, 128), value, ml_dtypes.bfloat16) for value in (0.5, 0.25))

    def store_and_drop() -> None:
        db.import_context(spec, ids, [(k, v)], name="doc")
        db.drop("doc")

    return store_and_drop


CALLS: dict[str, Callable[[int], Call]] = {
    "decode": decode,
    "prefill": prefill,
    "scan": scan,
    **{kind: lambda tokens, kind=kind: search(kind, tokens) for kind in SEARCHES},  # type: ignore[misc]
    "import": import_context,
}


def arguments() -> argparse.Namespace:
    cores = _native.usable_cpus()
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, max(1, cores // 2), cores, 4 * cores}))
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--tokens", type=int, default=32_768, help="of decode and of searches (default 32768)")
    parser.add_argument("--turns", type=int, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    main()
