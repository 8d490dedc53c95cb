"""Learning from sample queries: links between their nearest keys, and tokens where walks begin.

Decode queries and keys have different distributions: the keys nearest to a query need not be near each other, and then a graph of
the keys alone has no path between them. RoarGraph (arXiv 2408.08933) projects the graph of sample queries and their nearest keys
onto the keys: a query's nearest key, the pivot, is linked to the others. Many attention queries share a pivot, so the lists of
all queries are merged before they are pruned.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from indexes.accelerate import Accelerator, AcceleratorLost
from indexes.base import Float32, Int32, Int64
from indexes.blocks import Blocks

CHUNK = 8192
"""The number of keys that are multiplied at a time."""
TOP = 4
"""The number of nearest keys of each query at which walks may begin."""


def check_query_samples(blocks: Blocks, query_samples: Float32) -> None:
    """Raises ValueError unless these are float32 `[q_heads, m, head_dim]`, finite, for the KV heads of the blocks."""
    heads, d = blocks.kv_heads, blocks.head_dim
    if query_samples.ndim != 3 or query_samples.shape[0] % heads or not query_samples.size or query_samples.shape[2] != d:
        raise ValueError(f"samples have shape {list(query_samples.shape)}; expected [{heads} x any, m, {d}], m at least 1")
    if not np.isfinite(query_samples).all():
        raise ValueError("samples hold NaN or infinity; expected finite numbers")


def nearest_keys(blocks: Blocks, kv_head: int, queries: Float32, count: int) -> Int32:
    """The tokens with the largest q.k for each of `queries`, `[m, head_dim]`: int32 `[m, min(count, tokens)]`, largest first.

    It is exact, by matrix products in float32; the product of 1,024 queries and CHUNK keys takes 32 MiB.
    """
    count = min(count, blocks.tokens)
    m = len(queries)
    every = np.arange(m)
    rows, scores, tokens = every[:0], np.empty(0, np.float32), np.empty(0, np.int32)
    least = np.full((m, 1), -np.inf, np.float32)
    for begin in range(0, blocks.tokens, CHUNK):
        product = queries @ blocks.keys(kv_head, begin, min(begin + CHUNK, blocks.tokens)).T
        if begin == 0 and product.shape[1] > count:
            least = -np.partition(-product, count - 1, axis=1)[:, count - 1 : count]
        row, column = np.nonzero(product >= least)
        rows = np.concatenate([rows, row])
        scores = np.concatenate([scores, product[row, column]])
        tokens = np.concatenate([tokens, (begin + column).astype(np.int32)])
        order = np.lexsort((-scores, rows))
        place = np.arange(len(rows)) - np.searchsorted(rows[order], every)[rows[order]]
        order = order[place < count]
        rows, scores, tokens = rows[order], scores[order], tokens[order]
        if len(rows) == m * count:
            least = scores.reshape(m, count)[:, -1:]
    return tokens.reshape(m, count)


def nearest_of_heads(blocks: Blocks, groups: Float32, count: int, accelerator: Accelerator | None) -> Iterator[Int32]:
    """`nearest_keys` of each KV head for queries `[kv_heads, m, head_dim]`; the accelerator computes them until it is lost."""
    done = 0
    if accelerator is not None:
        heads = ((blocks.stored_keys(head), queries) for head, queries in enumerate(groups))
        try:
            for nearest in accelerator.neighbours(heads, count):
                done += 1
                yield nearest
        except AcceleratorLost:
            pass
    for head in range(done, blocks.kv_heads):
        yield nearest_keys(blocks, head, groups[head], count)


def merged_lists(nearest: Int32) -> tuple[Int32, Int64, Int32]:
    """Pivots, offsets and candidates: pivots[i] may be linked to candidates[offsets[i] : offsets[i + 1]].

    A query's nearest key, its pivot, may be linked to its other nearest keys, and each of these to the next: a chain that a walk
    can follow where the pivot's links are full.
    """
    pivot = np.repeat(nearest[:, :1], max(nearest.shape[1] - 1, 0), axis=1)
    pairs = np.concatenate([np.stack([pivot, nearest[:, 1:]], -1), np.stack([nearest[:, :-1], nearest[:, 1:]], -1)])
    keys = pairs.reshape(-1, 2).astype(np.int64)
    merged = np.unique(keys[:, 0] << 32 | keys[:, 1])
    pivots, begins = np.unique(merged >> 32, return_index=True)
    offsets = np.append(begins, len(merged)).astype(np.int64)
    return pivots.astype(np.int32), offsets, (merged & 0xFFFFFFFF).astype(np.int32)


def starts(nearest: Int32, most: int) -> npt.NDArray[np.int32]:
    """Up to `most` tokens that are among the TOP nearest of some query, those that the most queries share first."""
    tokens, counts = np.unique(nearest[:, :TOP], return_counts=True)
    return tokens[np.argsort(-counts, kind="stable")[:most]].astype(np.int32)
