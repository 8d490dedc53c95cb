"""What an index learns from sample queries: their nearest keys, links between those, and where walks may begin.

Decode queries come from another distribution than keys: what is nearest to a query is not near to each other, so that a graph of
keys alone has no way between. RoarGraph (arXiv 2408.08933) projects the bipartite graph of sample queries and their nearest
keys onto the keys: each query's nearest key, the pivot, is linked to its others. Attention queries are many to a pivot, so the
lists of all queries are merged before they are pruned.
"""

import numpy as np
import numpy.typing as npt

from indexes.base import Float32, Int32, Int64
from indexes.blocks import Blocks

CHUNK = 8192  # keys multiplied at a time


def nearest_keys(blocks: Blocks, kv_head: int, queries: Float32, count: int) -> Int32:
    """int32 `[m, count]`: of each of `queries`, `[m, head_dim]`, the tokens with the largest q.k, largest first.

    Fewer where there are fewer tokens. Exact, by matrix products in float32.
    """
    m = len(queries)
    count = min(count, blocks.tokens)
    scores = np.empty((m, 0), np.float32)
    tokens = np.empty((m, 0), np.int32)
    for begin in range(0, blocks.tokens, CHUNK):
        product = queries @ blocks.keys(kv_head, begin, min(begin + CHUNK, blocks.tokens)).T
        if scores.shape[1] >= count:
            product = _above(product, scores[:, -1], begin)
            if product is None:
                continue
        ids = np.broadcast_to(np.arange(begin, begin + product.shape[1], dtype=np.int32), product.shape)
        scores, tokens = _largest(np.hstack([scores, product]), np.hstack([tokens, ids]), count)
    return tokens
