"""How long does a decode step take, exact and by each way of searching, as a caller sees it: through `session.attend`?

    python -m benchmarks.step                         # synthetic diffuse heads
    python -m benchmarks.step --heads FOLDER/         # and real ones; FOLDER/keys.npy and so on, see below

Two shapes: that of SmolLM2-135M (9 query heads on 3 KV heads of 64) at 15,000 tokens, and 32 on 8 of 128 at 32,768. Each round
answers one token in every layer, exactly and by each way, in turns; the layers together are larger than the caches. FOLDER holds
float32 keys and values `[layers, kv_heads, n, head_dim]` and queries `[layers, q_heads, m, head_dim]`, as a model stored them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import ml_dtypes
import numpy as np

import kvdb
from benchmarks.harness import argument_parser, machine, report
from benchmarks.workloads import Shape, generate

WAYS: dict[str, kvdb.QueryOptions] = {
    "exact": kvdb.QueryOptions(kvdb.Exact()),
    "quantized top_k(16)": kvdb.QueryOptions(kvdb.TopK(16), estimate_tail=True, hints=kvdb.Hints(index="quantized")),
    "quantized top_k(64)": kvdb.QueryOptions(kvdb.TopK(64), estimate_tail=True, hints=kvdb.Hints(index="quantized")),
    "flat dipr(0.012)": kvdb.QueryOptions(kvdb.Dipr(0.012), hints=kvdb.Hints(index="flat")),
    "coarse-clusters top_k(64)": kvdb.QueryOptions(kvdb.TopK(64), estimate_tail=True, hints=kvdb.Hints(index="coarse-clusters")),
}
WARM_UP, ROUNDS = 3, 25


@dataclass
class Work:
    """One layer after the other of keys and values `[kv_heads, n, head_dim]`, and queries `[layers, q_heads, m, head_dim]`."""

    name: str
    layers: list[tuple[np.ndarray, np.ndarray]]
    queries: np.ndarray

    @property
    def spec(self) -> kvdb.ModelSpec:
        kv_heads, _, head_dim = self.layers[0][0].shape
        return kvdb.ModelSpec(self.name, len(self.layers), self.queries.shape[1], kv_heads, head_dim, "bfloat16")


def main() -> None:
    given = arguments()
    report("machine", **machine())
    for work in works(given.heads):
        measured(work, [way for way in WAYS if way in given.ways] if given.ways else list(WAYS))


def measured(work: Work, ways: list[str]) -> None:
    """One line for each way: the time of a layer's step, what it is of the exact one, and the error of its output."""
    spec, n = work.spec, work.layers[0][0].shape[1]
    kinds = {index for way in ways if (index := WAYS[way].hints.index) is not None}
    with kvdb.connect() as db:
        ids = np.arange(n)
        db.import_context(spec, ids, work.layers, name="doc")
        for kind in sorted(kinds):
            db.build_index("doc", kind)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        kernel: dict[str, list[float]] = {way: [] for way in ways}
        errors: dict[str, list[float]] = {way: [] for way in ways}
        sessions = {way: db.create_session(spec, ids) for way in ways}
        for number in range(WARM_UP + ROUNDS):
            outs = {}
            for way, session in sessions.items():
                step = step_of(work, number)
                before, started = session.stats().kernel_seconds, perf_counter()
                outs[way] = [session.attend(layer, q, k, v, options=WAYS[way]) for layer, (q, k, v) in enumerate(step)]
                spent = perf_counter() - started
                if number >= WARM_UP:
                    seconds[way].append(spent / spec.layers)
                    kernel[way].append((session.stats().kernel_seconds - before) / spec.layers)
            for way, out in outs.items():
                errors[way] += [distance(one, exact) for one, exact in zip(out, outs["exact"], strict=True)]
        for way in ways:
            times = {
                "layer_us": median(seconds[way]) * 1e6,
                "beyond_kernel_us": median(seconds[way]) * 1e6 - median(kernel[way]) * 1e6,
            }
            share = median(a / b for a, b in zip(seconds[way], seconds["exact"], strict=True))
            report(
                "step",
                heads=work.name,
                tokens=n,
                way=way,
                share_of_exact=share,
                **times,
                error_median=median(errors[way]),
                error_p95=float(np.quantile(errors[way], 0.95)),
            )


def step_of(work: Work, number: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The query, and a new key and value near to stored ones, of each layer."""
    turns = []
    for (k, v), queries in zip(work.layers, work.queries, strict=True):
        at = number * 97 % k.shape[1]
        q = queries[:, number % queries.shape[1]][:, None].astype(ml_dtypes.bfloat16)
        turns.append((np.ascontiguousarray(q), np.ascontiguousarray(k[:, at : at + 1]), np.ascontiguousarray(v[:, at : at + 1])))
    return turns


def distance(out: np.ndarray, exact: np.ndarray) -> float:
    difference = out.astype(np.float32) - exact.astype(np.float32)
    return float(np.linalg.norm(difference) / np.linalg.norm(exact.astype(np.float32)))


def works(folder: str | None) -> Iterator[Work]:
    if folder is not None:
        yield real(folder)
    for name, layers, shape in (
        ("as SmolLM2-135M", 30, Shape(15_000, kv_heads=3, group=3, head_dim=64)),
        ("8 x 4 of 128", 4, Shape(32_768, kv_heads=8, group=4, head_dim=128)),
    ):
        made = generate("diffuse", shape, queries=16, query_samples=8)
        rolled = [(np.roll(made.k, layer, axis=1), np.roll(made.v, layer, axis=1)) for layer in range(layers)]
        yield Work(name, rolled, np.stack([made.queries] * layers))


def real(prefix: str) -> Work:
    keys, values, queries = (np.load(f"{prefix}{name}.npy", mmap_mode="r") for name in ("keys", "values", "queries"))
    layers = [(k.astype(ml_dtypes.bfloat16), v.astype(ml_dtypes.bfloat16)) for k, v in zip(keys, values, strict=True)]
    return Work("real", layers, np.asarray(queries))


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--heads", help="what the names of the files of real heads begin with")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), help="the ways to measure, exact among them (default all)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
