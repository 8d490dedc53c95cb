"""How long do the parts of an index build take that the card does: exact neighbours, and clusters?

From arrays in main memory to arrays in main memory, as a build sees it; one layer of sharp heads.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.card import Card
from benchmarks.gpu.results import Results, Wrong
from benchmarks.gpu.sharp import sharp
from indexes.accelerate import KMeans
from kvdb.gpu.device import open_device
from kvdb.gpu.index_build.accelerator import DeviceAccelerator

WIDTH, SEGMENT, PAGE, ITERATIONS, FAR = 64, 8192, 32, 10, 0.5
"""Sizes that `indexes.hnsw.settings` and `indexes.coarse.clusters` have."""
SMALL_WIDTH, SMALL_SEGMENT, SMALL_PAGE = 8, 64, 16
NEIGHBOURS_MS, CLUSTERS_MS = 500.0, 100.0
CHECKED = 64
"""Rows of a head whose neighbours are compared with all keys."""
ROUNDING = 1e-5
"""The error of a distance relative to the lengths of both keys, which their product in float32 has."""
INERTIA_MAX = 1.02
"""The largest inertia, relative to that of the same rounds in float64. Ties may fall either way, and both go on from there."""
CALLS = 5


def run(card: Card, results: Results, seed: int) -> None:
    sizes = card.sizes
    width, segment, page = (SMALL_WIDTH, SMALL_SEGMENT, SMALL_PAGE) if card.small else (WIDTH, SEGMENT, PAGE)
    tokens = sizes.tokens // segment * segment
    k = sharp(card, seed, tokens)[0].cpu()
    heads = list(k.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    accelerator = DeviceAccelerator(open_device("interpreter" if card.interpreted else "cuda"))
    how = KMeans.of(segment, segment // page, ITERATIONS, FAR)
    found: dict[str, list[npt.NDArray[np.generic]]] = {}

    def neighbours() -> None:
        found["neighbours"] = list(accelerator.nearest_before(heads, width))

    def clusters() -> None:
        found["clusters"] = list(accelerator.clusters(heads, how))

    timed: list[tuple[str, Callable[[], None], float]] = [
        ("neighbours", neighbours, NEIGHBOURS_MS),
        ("clusters", clusters, CLUSTERS_MS),
    ]
    for what, once, most in timed:
        once()
        for head in (0, sizes.kv_heads - 1):
            keys = k[head].to(card.device).double()
            if what == "neighbours":
                check_neighbours(keys, found[what][head], width, seed)
            else:
                check_clusters(keys[:segment], found[what][head][0], how)
        ms = card.wall(once, calls=CALLS)
        held = {} if ms is None else {"holds": ms <= most}
        case = f"{tokens:,} keys x {sizes.kv_heads} heads"
        results.add(case, what, ms=ms, reach=f"<= {most:.0f} ms", **held, note="right, by float64")


def check_neighbours(keys: torch.Tensor, found: npt.NDArray[np.generic], width: int, seed: int) -> None:
    """keys: float64 `[n, head_dim]`. found: int32 `[n, width]`. Raises Wrong unless these are the nearest of the keys before, -1
    where there are no more, of the rows that are looked at."""
    n = len(keys)
    rows = np.unique([*range(min(width + 2, n)), n - 1, *np.random.default_rng(seed).integers(0, n, CHECKED)])
    for row in rows.tolist():
        mine = torch.from_numpy(found[row].astype(np.int64)).to(keys.device)
        count = min(row, width)
        if not bool((mine[:count] >= 0).all() and (mine[count:] == -1).all() and len(mine[:count].unique()) == count):
            raise Wrong(f"neighbours of key {row}: {count} are there before it, found were {mine.tolist()}")
        if count:
            distances = (keys[:row] - keys[row]).square().sum(1)
            if not bool((mine[:count] < row).all()):
                raise Wrong(f"neighbours of key {row}: {mine.tolist()} are not all before it")
            allowed = distances.sort().values[count - 1] + ROUNDING * (keys[row].square().sum() + keys.square().sum(1).amax())
            if not bool(distances[mine[:count]].max() <= allowed):
                raise Wrong(
                    f"neighbours of key {row}: one at {float(distances[mine[:count]].max()):.6g}, allowed is {float(allowed):.6g}"
                )


def check_clusters(keys: torch.Tensor, found: npt.NDArray[np.generic], how: KMeans) -> None:
    """keys: float64 `[tokens, head_dim]` of one segment. found: the cluster of each. Raises Wrong unless it is as good as that of
    the same rounds in float64."""
    mine = torch.from_numpy(found.astype(np.int64)).to(keys.device)
    if int(mine.max()) >= how.count:
        raise Wrong(f"a cluster {int(mine.max())} of {how.count}")
    ratio = float(inertia(keys, mine, how.count) / inertia(keys, lloyd(keys, how), how.count))
    if not ratio <= INERTIA_MAX:
        raise Wrong(f"the clusters' inertia is {ratio:.4g} times that of float64; at most {INERTIA_MAX:g} is right")


def means(keys: torch.Tensor, belongs: torch.Tensor, count: int, empty: torch.Tensor | None = None) -> torch.Tensor:
    """The mean of each cluster; where it has no token, that of `empty`."""
    sums = torch.zeros(count, keys.shape[1], dtype=keys.dtype, device=keys.device).index_add_(0, belongs, keys)
    counts = torch.bincount(belongs, minlength=count)[:, None]
    return torch.where(counts > 0, sums / counts.clamp(min=1), sums if empty is None else empty)


def inertia(keys: torch.Tensor, belongs: torch.Tensor, count: int) -> torch.Tensor:
    return (keys - means(keys, belongs, count)[belongs]).square().sum()


def lloyd(keys: torch.Tensor, how: KMeans) -> torch.Tensor:
    """The rounds that KMeans describes, by distance, in float64."""
    keys = keys - keys.mean(0)
    centres = keys[torch.from_numpy(how.seeds).to(keys.device)]
    for number in range(how.iterations):
        least, belongs = torch.cdist(keys, centres).min(1)
        centres = means(keys, belongs, len(centres), centres)
        if number == 0:
            far = least.topk(how.count - len(centres)).indices
            centres = torch.cat([centres, keys[far]])
    return torch.cdist(keys, centres).argmin(1)
