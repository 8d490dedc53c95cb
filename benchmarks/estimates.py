"""What estimates of the unread rest cost, and how wrong they are: every way of answering, by bytes read and error of the output.

    python -m benchmarks.estimates                       # synthetic heads, diffuse and sharp
    python -m benchmarks.estimates --heads FOLDER/       # real ones: FOLDER/keys.npy and so on, as a model stored them

FOLDER holds float32 keys and values `[layers, kv_heads, n, head_dim]`, tail_keys and tail_values of the decode steps behind them,
and queries `[layers, q_heads, m, head_dim]`, one for each step. The error is that of a layer: the L2 norm of the difference over
all query heads, relative to exact attention. Bytes are those of the stored tokens, relative to reading all of them in bfloat16;
WINDOW tokens at the end and SINKS at the beginning are read in any case and counted. Ways named after a kind of index are
measured with it, and have a speed, relative to exact attention in turns; the others are computed in numpy.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from benchmarks.estimates_speed import speeds
from benchmarks.estimators import WINDOW, Head, clusters, codes, errors, kept, layer_error, sampled
from benchmarks.harness import report
from benchmarks.workloads import Shape, generate

QUERIES = 6
LAYERS = 7


def main() -> None:
    given = arguments()
    layers = list(real(given.heads, given.layers) if given.heads else synthetic(given.tokens))
    for name in {name for name, _ in layers}:
        table(name, [heads for other, heads in layers if other == name])
    if not given.no_speed:
        for name, heads in layers[:: max(len(layers) // 2, 1)]:
            for way, figures in speeds(heads).items():
                report("estimates.speed", heads=name, tokens=heads[0].tokens, way=way, **figures)


def table(name: str, layers: list[list[Head]]) -> None:
    """One line for each way, the fewest bytes first."""
    bytes_of: dict[str, list[float]] = defaultdict(list)
    error_of: dict[str, list[np.ndarray]] = defaultdict(list)
    for heads in layers:
        ways: dict[str, list[tuple[np.ndarray, float]]] = defaultdict(list)
        for head in heads:
            for family in (kept, codes, clusters, sampled):
                for way, answer in family(head):
                    ways[way].append(answer)
        for way, answers in ways.items():
            bytes_of[way].append(float(np.mean([share for _, share in answers])))
            error_of[way].append(layer_error(heads, [out for out, _ in answers]))
    for way in sorted(bytes_of, key=lambda way: float(np.mean(bytes_of[way]))):
        share, error = float(np.mean(bytes_of[way])), np.concatenate(error_of[way])
        report("estimates", heads=name, tokens=layers[0][0].tokens, way=way, bytes_share=round(share, 3), **errors(error))


def synthetic(tokens: int) -> Iterator[tuple[str, list[Head]]]:
    """Layers of 3 KV heads with 3 query heads each, head_dim 64, as the real model has them."""
    for kind in ("diffuse", "sharp"):
        work = generate(kind, Shape(tokens, kv_heads=3, group=3, head_dim=64), queries=QUERIES, query_samples=8)
        k, v = work.k.astype(np.float32), work.v.astype(np.float32)
        yield kind, [Head(work.queries[3 * h : 3 * h + 3], k[h], v[h], tokens - WINDOW) for h in range(3)]


def real(prefix: str, count: int) -> Iterator[tuple[str, list[Head]]]:
    """Some layers of a model, from the first to the last, rounded to bfloat16 as they are stored."""
    k, v, tail_k, tail_v, q = (
        np.load(f"{prefix}{name}.npy", mmap_mode="r") for name in ("keys", "values", "tail_keys", "tail_values", "queries")
    )
    layers, kv_heads, n, _ = k.shape
    group, steps = q.shape[1] // kv_heads, np.linspace(0, q.shape[2] - 1, QUERIES).astype(int)
    for layer in np.linspace(0, layers - 1, count).astype(int):
        heads = []
        for h in range(kv_heads):
            keys, values = (
                np.concatenate([a[layer, h], b[layer, h]]).astype(ml_dtypes.bfloat16).astype(np.float32)
                for a, b in ((k, tail_k), (v, tail_v))
            )
            asked = np.asarray(q[layer, h * group : (h + 1) * group])[:, steps]
            heads.append(Head(asked, keys, values, n - WINDOW, n + steps + 1))
        yield "real", heads


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", help="where a model's keys.npy and so on begin, with the separator (default: synthetic heads)")
    parser.add_argument("--layers", type=int, default=LAYERS, help="how many layers of it (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="of synthetic heads (default %(default)s)")
    parser.add_argument("--no-speed", action="store_true", help="do not time the kinds of index")
    return parser.parse_args()


if __name__ == "__main__":
    main()
