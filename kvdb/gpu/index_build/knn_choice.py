"""The choice of a search for nearest neighbours: ours, or that of faiss where faiss has GPU support and measures faster."""

import logging
from time import perf_counter
from typing import Any

import torch

from kvdb.gpu.index_build.knn import KnnSearch, knn_search

log = logging.getLogger(__name__)
KEYS, QUERIES, K = 16_384, 2048, 64
"""Sizes of the measurement: a tile of 128 MiB of scores."""
ROUNDS = 3
"""Timed rounds; the fastest counts."""
K_MAX = 1024
"""The largest k that every version of faiss selects on a GPU."""
MEMORY_NBYTES = 256 << 20
"""Bytes that faiss keeps on the device."""
_chosen: dict[tuple[torch.device, torch.dtype, int], KnnSearch] = {}


def fastest_knn_search(device: torch.device, dtype: torch.dtype, width: int) -> KnnSearch:
    """The faster search for keys of `width` channels. It is measured once for each device, dtype and width of the process."""
    key = device, dtype, width
    if key not in _chosen:
        _chosen[key] = _measure(*key)
    return _chosen[key]


def _measure(device: torch.device, dtype: torch.dtype, width: int) -> KnnSearch:
    faiss = _import_faiss()
    if faiss is None:
        return knn_search
    faiss_search = _faiss_search(faiss)
    drawn = torch.randn((KEYS, width), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    try:
        seconds, seconds_faiss = _seconds(knn_search, drawn), _seconds(faiss_search, drawn)
    except (AttributeError, TypeError, AssertionError) as error:
        log.info("faiss cannot search %s here (%s)", dtype, error)
        return knn_search
    log.info("searching %d keys took %.2f ms, faiss %.2f ms", KEYS, 1e3 * seconds, 1e3 * seconds_faiss)
    return faiss_search if seconds_faiss < seconds else knn_search


def _import_faiss() -> Any | None:
    """The module faiss, None where it is not installed or cannot use a GPU."""
    try:
        import faiss  # nobody needs it

        if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() < 1:
            return None
        import faiss.contrib.torch_utils  # lets faiss take tensors where they are, and use torch's stream
    except (ImportError, OSError):  # not installed, or without libraries of its own
        return None
    return faiss


def _faiss_search(faiss: Any) -> KnnSearch:
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(MEMORY_NBYTES)

    def faiss_search(queries: torch.Tensor, keys: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        if k > K_MAX:
            return knn_search(queries, keys, k)
        result: tuple[torch.Tensor, torch.Tensor] = faiss.knn_gpu(
            resources,
            queries.contiguous(),
            keys.contiguous(),
            k,
            metric=faiss.METRIC_INNER_PRODUCT,
        )
        return result

    return faiss_search


def _seconds(tile_search: KnnSearch, keys: torch.Tensor) -> float:
    """Seconds of the fastest round. A first round warms up."""
    seconds = []
    for _ in range(ROUNDS + 1):
        _wait(keys.device)
        began = perf_counter()
        tile_search(keys[:QUERIES], keys, K)
        _wait(keys.device)
        seconds.append(perf_counter() - began)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
