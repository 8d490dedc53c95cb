"""The links between keys: hnswlib builds them, for one KV head at a time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from indexes.base import Float32

Links = npt.NDArray[np.uint32]
NO_LINK = np.uint32(0xFFFFFFFF)
STEP = 2048
"""Keys that are linked in one step: about a tenth of a second."""


class HnswlibMissing(ModuleNotFoundError):
    """hnswlib is not installed; only building needs it."""


def link_steps(keys: Float32, into: Links, width: int, threads: int) -> Iterator[float]:
    """Links of `keys`, `[n, head_dim]`, as HNSW (arXiv 1603.09320) has them on its level 0; yields the share that is linked.

    into: uint32 `[n, 2 * M]`, filled at the end; shorter lists end in NO_LINK. By L2 distance, which a constant offset of all
    keys does not change. width: efConstruction. Of what hnswlib keeps, vectors and upper levels are dropped. Raises
    HnswlibMissing.
    """
    n, head_dim = keys.shape
    if n == 0:
        return
    graph = _hnswlib().Index("l2", head_dim)
    graph.init_index(n, M=into.shape[1] // 2, ef_construction=width)
    for begin in range(0, n, STEP):
        graph.add_items(keys[begin : begin + STEP], num_threads=threads)
        yield min(begin + STEP, n) / n
    state = _state(graph)
    rows = state["data_level0"].view(np.uint8).reshape(-1, state["size_data_per_element"])[:n]
    most, at = state["max_M0"], state["label_offset"]
    labels = np.ascontiguousarray(rows[:, at : at + 8]).view(np.uint64)[:, 0].astype(np.uint32)
    level0 = np.ascontiguousarray(rows[:, : 4 * most + 4]).view(np.uint32)
    used = np.arange(most) < (level0[:, :1] & 0xFFFF)
    into[labels] = np.where(used, labels[np.where(used, level0[:, 1:], 0)], NO_LINK)


def _state(graph: Any) -> dict[str, Any]:
    state = graph.__getstate__()
    return state if isinstance(state, dict) else state[0]


def _hnswlib() -> Any:
    try:
        import hnswlib  # heavy, and only building needs it
    except ImportError as error:
        raise HnswlibMissing("building a graph index needs hnswlib: pip install kvdb[hnsw]") from error
    return hnswlib
