"""What does attention by retrieval cost beside exact attention, how wrong is it, and what do other libraries find?

    python -m benchmarks.retrieve [--tokens 16384 131072] [--kinds flat hnsw] [--workloads sharp vault] [--cache DIR] [--quick]

One JSON line per measurement, a table at the end, plots into `benchmarks/plots`. What is timed are decode steps of a session,
`session.attend` by native code, each behind a timed read of all keys and values by all threads, the yardstick, which leaves
caches cold. `--cache` keeps workloads and indexes, so that the long builds can be done before (`--build-only`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import tables
from benchmarks.decoding import Decoding, read_seconds
from benchmarks.harness import argument_parser, machine, report
from benchmarks.kinds import KINDS, USUAL, Built, build
from benchmarks.layer import Answer, Layer, joined
from benchmarks.workloads import Shape, Workload, generate
from indexes.oracle import Oracle
from indexes.retrieval import Dipr
from kvdb import _native

TOKENS = [16_384, 32_768, 65_536, 131_072]
ALPHAS = (0.2, 0.05, 0.012, 0.003, 0.0005)
WARM_UP, ROUNDS, BUDGET_S = 6, 24, 40.0
Row = dict[str, object]


def main() -> None:
    given = arguments()
    report("machine", **machine(), isa=_native.isa(), threads=_native.threads())
    rows: list[Row] = []
    swept = max((n for n in given.tokens if n <= TOKENS[-1]), default=min(given.tokens))
    for tokens in given.tokens:
        for name in given.workloads:
            for workload in workloads(name, tokens, given.queries, given.cache):
                rows += layer_rows(workload, given, swept=tokens == swept)
    rows = [json.loads(line) for path in given.also for line in path.read_text().splitlines() if is_row(line)] + rows
    tables.show(rows, sys.stderr)
    for row in tables.growth(rows):
        report("retrieve.growth", **row)
    if given.plots is not None and rows:
        from benchmarks import plots  # needs matplotlib, which only a benchmark does

        plots.draw(rows, given.plots)


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths (default %(default)s)")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=USUAL, help="indexes (default %(default)s)")
    parser.add_argument("--workloads", nargs="+", choices=["sharp", "diffuse", "vault"], default=["sharp", "diffuse"])
    parser.add_argument("--queries", type=int, default=8, help="decode steps of each workload (default 8)")
    parser.add_argument(
        "--others", type=int, default=0, metavar="HEADS", help="KV heads on which other libraries run (default 0)"
    )
    parser.add_argument("--cache", type=Path, help="folder that keeps workloads and indexes")
    parser.add_argument("--plots", type=Path, help="folder for the plots")
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="lines of earlier runs, for table, growth and plots")
    parser.add_argument("--build-only", action="store_true", help="fill the cache and measure nothing")
    parser.add_argument("--quick", action="store_true", help="8,192 tokens alone")
    given = parser.parse_args()
    if given.quick:
        given.tokens = [8192]
    return given


def is_row(line: str) -> bool:
    return line.startswith(('{"benchmark": "retrieve"', '{"benchmark": "retrieve.others"'))


def workloads(name: str, tokens: int, queries: int, cache: Path | None) -> list[Workload]:
    started = time.perf_counter()
    if name == "vault":
        from benchmarks.traces import record  # needs torch and transformers

        made = record(tokens, queries, cache=cache)
    else:
        made = [generate(name, Shape(tokens), queries, cache=cache)]
    progress(f"{name}, {tokens} tokens: made in {time.perf_counter() - started:.1f} s")
    return made


def layer_rows(workload: Workload, given: argparse.Namespace, swept: bool) -> list[Row]:
    """Everything measured on one layer."""
    layer = Layer(workload)
    builts = []
    for kind in given.kinds:
        builts.append(build(kind, layer, given.cache))
        progress(f"{workload.name}, {layer.tokens} tokens: {kind} built in {builts[-1].build_s or math.nan:.1f} s")
    if given.build_only and not given.others:
        return []
    oracle = Oracle(layer.blocks, layer.queries(), layer.window)
    progress(f"{workload.name}, {layer.tokens} tokens: truth known")
    rows = [] if given.build_only else kind_rows(layer, builts, oracle, swept)
    if given.others and workload.name == "sharp":
        rows += other_rows(layer, oracle, given, rows)
    return rows


def kind_rows(layer: Layer, builts: list[Built], oracle: Oracle, swept: bool) -> list[Row]:
    common: Row = {"workload": layer.workload.name, "tokens": layer.tokens, "kv_heads": layer.kv_heads}
    times = timed(layer, builts)
    rows: list[Row] = []
    for built in builts:
        for alpha in ALPHAS if swept else (Dipr().alpha,):
            row: Row = {"benchmark": "retrieve", "kind": built.kind, **common, **judged(layer, built, oracle, Dipr(alpha))}
            if alpha == Dipr().alpha:
                row |= times[built.kind]
            row |= {"token_nbytes": built.token_nbytes(), "raw_token_nbytes": layer.blocks.token_nbytes}
            row |= {"build_s": built.build_s, "build_s_per_million_keys": built.build_s_per_million()}
            report(**row)  # type: ignore[arg-type]
            rows.append(row)
    return rows


def timed(layer: Layer, builts: list[Built]) -> dict[str, Row]:
    """Median milliseconds by kind of index: of a decode step, of an exact one, of a read of everything, and of the search alone;
    and the share of steps that native code carried out by itself. What searches comes behind what reads everything."""
    queries = [layer.query(i) for i in range(layer.workload.queries.shape[1])]
    decoding = {built.kind: Decoding(layer, built.index, Dipr()) for built in builts}
    exact = Decoding(layer, None, Dipr())
    for q in queries[:WARM_UP]:
        for one in (*decoding.values(), exact):
            one.step(q)
    taken = {kind: (one.steps, one.native) for kind, one in decoding.items()}
    spent: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in decoding}
    started = time.perf_counter()
    for number in range(max(ROUNDS, len(queries))):
        if number >= len(queries) and time.perf_counter() - started > BUDGET_S:
            break
        q = queries[number % len(queries)]
        for built in builts:
            own = spent[built.kind]
            own["exact_ms"].append(exact.step(q))
            own["search_ms"].append(layer.sparse(built.index, q, Dipr()).search_s)
            own["read_ms"].append(read_seconds(layer))
            own["ms"].append(decoding[built.kind].step(q))
    return {kind: summed(spent[kind], decoding[kind], *taken[kind]) for kind in decoding}


def summed(spent: dict[str, list[float]], decoding: Decoding, steps: int, native: int) -> Row:
    """The medians. steps, native: how many were taken before."""
    row: Row = {name: 1e3 * median(seconds) for name, seconds in spent.items()}
    own, exact, read = (median(spent[name]) for name in ("ms", "exact_ms", "read_ms"))
    share = (decoding.native - native) / (decoding.steps - steps)
    return row | {"faster": exact / own, "faster_than_reading": read / own, "native_share": share}


def judged(layer: Layer, built: Built, oracle: Oracle, retrieval: Dipr) -> Row:
    """How right attention by an index is, over all queries, and what it reads."""
    answers: list[Answer] = [layer.sparse(built.index, layer.query(i), retrieval) for i in range(layer.workload.queries.shape[1])]
    found = joined([answer.found for answer in answers])
    truth = oracle.judge(found, retrieval)
    out = np.concatenate([answer.out.astype(np.float32) for answer in answers], axis=1)
    whole = np.repeat([answer.whole for answer in answers], len(out)).reshape(len(answers), -1).T.reshape(-1)
    assert found.dense is not None
    searched = ~(whole | found.dense.reshape(-1))
    recall = truth.recall[searched] if searched.any() else np.ones(1)
    some = searched & (truth.missed > -np.inf)
    scanned = sum(answer.found.scanned for answer in answers) / len(answers) / layer.kv_heads
    return {
        "alpha": retrieval.alpha,
        "error": oracle.error_of_all(out),
        "error_max": float(oracle.error(out).max()),
        "recall": float(recall.mean()),
        "recall_min": float(recall.min()),
        "mass": float(truth.mass.mean()),
        "relevant": float(np.mean([len(ids) for ids in oracle.relevant_tokens(retrieval)])),
        "found": len(found.ids) / len(truth.recall),
        "scanned": scanned,
        "scanned_share": scanned / layer.tokens,
        "read_share": float(np.mean([answer.stats.nbytes for answer in answers])) / layer.nbytes,
        "read_mib": float(np.mean([answer.stats.nbytes for answer in answers])) / 2**20,
        "read_whole": float(1 - searched.mean()),
        "bound_valid": float(truth.bound_holds.mean()),
        "bound_ratio": middle_ratio(truth.missed_bound, truth.missed, some),
        "estimate_ratio": middle_ratio(truth.missed_estimate, truth.missed, some),
        "missed": float(oracle.share(truth.missed).mean()),
        "missed_bound": float(np.minimum(oracle.share(truth.missed_bound), 1).mean()),
    }


def middle_ratio(said: np.ndarray, truth: np.ndarray, rows: np.ndarray) -> float | None:
    """The median of exp(said - truth) over the rows; None where it is infinite, 1 where there are no rows."""
    if not rows.any():
        return 1.0
    with np.errstate(over="ignore"):
        ratio = float(np.median(np.exp(said[rows] - truth[rows])))
    return ratio if math.isfinite(ratio) else None


def other_rows(layer: Layer, oracle: Oracle, given: argparse.Namespace, ours: list[Row]) -> list[Row]:
    """The other libraries' points, and what each reaches in the time of our searches."""
    from benchmarks import others  # needs libraries that only this comparison does

    heads = min(given.others, layer.kv_heads)
    rows: list[Row] = []
    for name in others.OTHERS:
        for point in others.points(name, layer, oracle, heads, given.cache):
            row: Row = {"benchmark": "retrieve.others", "workload": layer.workload.name, "tokens": layer.tokens, **vars(point)}
            report(**row, heads_measured=heads, best_recall=others.exhaustive(oracle))  # type: ignore[arg-type]
            rows.append(row)
    for row in tables.equal_cost(ours, rows):
        report("retrieve.equal_cost", **row)
    return rows


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
