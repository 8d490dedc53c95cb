"""Which search among keys is used: ours, or that of faiss where it is installed for GPUs and turns out to be faster."""

import logging
from time import perf_counter
from typing import Any

import torch

from kvdb.gpu.neighbours import Search, search

log = logging.getLogger(__name__)
KEYS, QUERIES, K = 16_384, 2048, 64
"""Of the contest: a tile of 128 MiB of scores."""
ROUNDS = 3
K_MAX = 1024
"""That every faiss can select."""
MEMORY_NBYTES = 256 << 20
"""That faiss keeps on the device."""
_winners: dict[tuple[torch.device, torch.dtype, int], Search] = {}


def fastest_search(device: torch.device, dtype: torch.dtype, width: int) -> Search:
    """For keys of `width` channels; measured when first asked for, and kept while the process lives."""
    key = device, dtype, width
    if key not in _winners:
        _winners[key] = _measured(*key)
    return _winners[key]


def _measured(device: torch.device, dtype: torch.dtype, width: int) -> Search:
    faiss = _faiss()
    if faiss is None:
        return search
    theirs = _search_of(faiss)
    drawn = torch.randn((KEYS, width), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    try:
        seconds, seconds_faiss = _seconds(search, drawn), _seconds(theirs, drawn)
    except (AttributeError, TypeError, AssertionError) as error:
        log.info("faiss cannot search %s here (%s)", dtype, error)
        return search
    log.info("searching %d keys took %.2f ms, faiss %.2f ms", KEYS, 1e3 * seconds, 1e3 * seconds_faiss)
    return theirs if seconds_faiss < seconds else search


def _faiss() -> Any | None:
    """The module, where it can use a GPU."""
    try:
        import faiss  # nobody needs it

        if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() < 1:
            return None
        import faiss.contrib.torch_utils  # lets faiss take tensors where they are, and use torch's stream
    except (ImportError, OSError):  # not installed, or without libraries of its own
        return None
    return faiss


def _search_of(faiss: Any) -> Search:
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(MEMORY_NBYTES)

    def theirs(queries: torch.Tensor, keys: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        if k > K_MAX:
            return search(queries, keys, k)
        found: tuple[torch.Tensor, torch.Tensor] = faiss.knn_gpu(
            resources,
            queries.contiguous(),
            keys.contiguous(),
            k,
            metric=faiss.METRIC_INNER_PRODUCT,
        )
        return found

    return theirs


def _seconds(of_tile: Search, keys: torch.Tensor) -> float:
    """The fastest of some rounds, behind one that counts for nothing."""
    seconds = []
    for _ in range(ROUNDS + 1):
        _wait(keys.device)
        began = perf_counter()
        of_tile(keys[:QUERIES], keys, K)
        _wait(keys.device)
        seconds.append(perf_counter() - began)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
