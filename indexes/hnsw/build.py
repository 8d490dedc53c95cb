"""The links between keys: hnswlib builds them, for one KV head at a time."""

from typing import Any

import numpy as np
import numpy.typing as npt

from indexes.base import Float32

Links = npt.NDArray[np.uint32]
NO_LINK = np.uint32(0xFFFFFFFF)


class HnswlibMissing(ModuleNotFoundError):
    """hnswlib is not installed; only building needs it."""


def links_of(keys: Float32, links: int, width: int, threads: int) -> Links:
    """uint32 `[n, 2 * links]`: what HNSW (arXiv 1603.09320) links each of `keys`, `[n, head_dim]`, to on its level 0.

    Shorter lists end in NO_LINK. By L2 distance, which a constant offset of all keys does not change. links: M of the paper;
    width: its efConstruction. Of what hnswlib keeps, vectors and upper levels are dropped. Raises HnswlibMissing.
    """
    n, head_dim = keys.shape
    if n == 0:
        return np.empty((0, 2 * links), np.uint32)
    graph = _hnswlib().Index("l2", head_dim)
    graph.init_index(n, M=links, ef_construction=width)
    graph.add_items(keys, num_threads=threads)
    state = _state(graph)
    rows = state["data_level0"].view(np.uint8).reshape(-1, state["size_data_per_element"])[:n]
    most, at = state["max_M0"], state["label_offset"]
    labels = np.ascontiguousarray(rows[:, at : at + 8]).view(np.uint64)[:, 0].astype(np.uint32)
    level0 = np.ascontiguousarray(rows[:, : 4 * most + 4]).view(np.uint32)
    used = np.arange(most) < (level0[:, :1] & 0xFFFF)
    out = np.full((n, 2 * links), NO_LINK, np.uint32)
    out[labels[:, None], np.arange(most)] = np.where(used, labels[np.where(used, level0[:, 1:], 0)], NO_LINK)
    return out


def _state(graph: Any) -> dict[str, Any]:
    state = graph.__getstate__()
    return state if isinstance(state, dict) else state[0]


def _hnswlib() -> Any:
    try:
        import hnswlib  # heavy, and only building needs it
    except ImportError as error:
        raise HnswlibMissing("building a graph index needs hnswlib: pip install kvdb[hnsw]") from error
    return hnswlib
