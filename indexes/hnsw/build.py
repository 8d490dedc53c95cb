"""The links between keys, built one KV head at a time: by hnswlib, or chosen among exact neighbours."""

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import indexes._native as _native
from indexes.accelerate import Accelerator, AcceleratorLost
from indexes.base import Float32, Int32
from indexes.blocks import Blocks

Links = npt.NDArray[np.uint32]
NO_LINK = np.uint32(0xFFFFFFFF)
STEP = 2048
"""The number of keys that are linked in one step, which takes about a tenth of a second."""
CHOOSE_STEP = 32_768
"""The number of keys whose links are chosen in one step, which takes about half a second."""


class HnswlibMissing(ModuleNotFoundError):
    """hnswlib is not installed; only building an index needs it."""


def link_steps(keys: Float32, into: Links, width: int, threads: int) -> Iterator[float]:
    """Link `keys`, `[n, head_dim]`, as HNSW (arXiv 1603.09320) does on its level 0; yields the share that is linked.

    into: uint32 `[n, 2 * M]`, filled at the end; shorter lists end in NO_LINK. width: efConstruction. Keys are near by L2
    distance, which a constant offset of all keys does not change. hnswlib's vectors and upper levels are dropped. Raises
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


def accelerated_steps(
    accelerator: Accelerator, blocks: Blocks, graph: _native.Graph, links: Links, most: int, width: int
) -> Generator[float, None, int]:
    """Link the keys of all KV heads. Yields the share of the heads that is linked; returns how many heads are, fewer than all
    where the accelerator was lost.

    links: uint32 `[kv_heads, tokens, degree]`, those of the graph; the first `most` of each list are written. They are the links
    that HNSW's insertion (arXiv 1603.09320) makes if its search for the `width` nearest of the earlier keys never misses one:
    each key is linked to those that the rule keeps (algorithm 4); when later keys link to it, the rule chooses again among all of
    its links.
    """
    heads, done = blocks.kv_heads, 0
    try:
        for nearest in accelerator.nearest_before((blocks.stored_keys(head) for head in range(heads)), width):
            for share in _choose_steps(blocks, graph, done, nearest, links[done, :, :most]):
                yield (done + share) / heads
            done += 1
    except AcceleratorLost:
        pass
    return done


def _choose_steps(blocks: Blocks, graph: _native.Graph, kv_head: int, nearest: Int32, into: Links) -> Iterator[float]:
    """Choose the links of one KV head; yields the share that is done. nearest: int32 `[n, width]`, -1 for none. into: uint32
    `[n, most]`."""
    n, most = into.shape
    offsets = np.arange(n + 1, dtype=np.int64) * nearest.shape[1]
    chosen = np.empty((n, most), np.uint32)
    for begin in range(0, n, CHOOSE_STEP):
        part = chosen[begin : begin + CHOOSE_STEP]
        here = offsets[begin : begin + len(part) + 1]
        _native.graph_choose_links(graph, blocks.native, kv_head, begin, here, nearest.reshape(-1), part)
        yield min(begin + CHOOSE_STEP, n) / n / 2
    offsets, both = _both_ways(chosen)
    for begin in range(0, n, CHOOSE_STEP):
        part = np.empty((min(CHOOSE_STEP, n - begin), most), np.uint32)
        here = offsets[begin : begin + len(part) + 1]
        _native.graph_choose_links(graph, blocks.native, kv_head, begin, here, both, part)
        into[begin : begin + len(part)] = part
        yield (1 + min(begin + CHOOSE_STEP, n) / n) / 2


def _both_ways(links: Links) -> tuple[npt.NDArray[np.int64], Int32]:
    """The links in both directions: tokens[offsets[i] : offsets[i + 1]] link to i, or i to them. Returns offsets and tokens."""
    source, place = np.nonzero(links != NO_LINK)
    target = links[source, place]
    ends = np.concatenate([source, target])
    tokens = np.concatenate([target, source])[np.argsort(ends, kind="stable")]
    return np.append(0, np.cumsum(np.bincount(ends, minlength=len(links)))), tokens.astype(np.int32)


def _state(graph: Any) -> dict[str, Any]:
    state = graph.__getstate__()
    return state if isinstance(state, dict) else state[0]


def _hnswlib() -> Any:
    try:
        import hnswlib  # heavy, and only building needs it
    except ImportError as error:
        raise HnswlibMissing("building a graph index needs hnswlib: pip install kvdb[hnsw]", name="hnswlib") from error
    return hnswlib
