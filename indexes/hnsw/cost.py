"""The expected cost of a walk: it reads codes, links and keys, one after the other, and hardly more of them in longer contexts.

The constants were fitted on the machine whose numbers are the defaults of `query_optimizer.cost.Machine`, over 4 thousand to a
million tokens of `benchmarks/workloads.py`. Operations are multiplications of the attention kernel.
"""

from math import ceil, log2, sqrt

import indexes._native as _native
from indexes.base import Cost
from indexes.blocks import Blocks
from indexes.hnsw.settings import Settings
from indexes.retrieval import Exact, Retrieval, TopP
from indexes.selectivity import Selectivity, rising

SCAN_MAX = 4096
"""Up to this number of visible tokens, all are looked at, without a walk (`native/graph/search.cpp`)."""
NEAR = 1024
"""The number of tokens whose codes and links stay in caches. Each read gets slower the more tokens there are beyond them."""
WALK_ROWS = 1.1
"""The fixed cost of a walk, in rows."""
WALK_JUMPS, FOUND_JUMPS = 39.0, 0.62
"""Jumps of each row for each doubling of the tokens beyond NEAR: those of the walk itself, and those of each token found."""
RANKED_JUMPS = 40.0
"""The same for a walk to the k nearest, to be multiplied by sqrt(k)."""
WALK_FOUND_MAX = 120.0
"""Half of the walks of diffuse heads that find this many tokens give up; those that would find many more cost no more."""
GIVE_UP_POWER = 2.0
"""How fast giving up becomes certain beyond WALK_FOUND_MAX."""
USUAL_ROWS = 4
"""The number of rows of a KV head for which WALK_FOUND_MAX holds. A head is given up as soon as one of its rows is."""
HIDDEN_MAX = 2.0
"""Hidden tokens make a walk longer, at most by this factor; a guess."""
SCAN_OPERATIONS = 130.0
"""Operations for each token and row where all tokens are looked at."""
RANKED_SCAN_OPERATIONS = 8500.0
"""Operations for each token that is among a row's k largest so far when it is looked at; there are about sqrt(k * tokens) of
them."""
KEPT_OPERATIONS = 4500.0
"""Operations for each token that a row finds in a scan of all tokens."""
RANKED_AT_ONCE = 24_576 * 64
"""Half of the walks to the k nearest pass their budget when tokens times k reach this number."""


def of(
    blocks: Blocks, settings: Settings, shape: tuple[int, int, int], retrieval: Retrieval, expected_tokens: float | None
) -> Cost:
    """The cost of one search. shape: visible tokens, rows of each KV head, KV heads. expected_tokens: see `Index.cost`."""
    tokens, rows, heads = shape
    d, n = blocks.head_dim, blocks.tokens
    if isinstance(retrieval, Exact):
        keys = float(tokens * heads)
        return Cost(keys * blocks.key_nbytes, 2 * keys * rows * d)
    selectivity = Selectivity.of(retrieval, tokens, expected_tokens)
    by_rank = selectivity.alpha is None
    code_nbytes = ceil(d / 64) * 64
    again = 2 if isinstance(retrieval, TopP) else 1  # a guess: a second range is searched where the first has too little mass
    if tokens <= SCAN_MAX or (by_rank and selectivity.expected_tokens > settings.dense * tokens):
        taken = (
            RANKED_SCAN_OPERATIONS * sqrt(selectivity.expected_tokens * tokens)
            if by_rank
            else KEPT_OPERATIONS * selectivity.expected_tokens
        )
        operations = rows * (SCAN_OPERATIONS * tokens * d / 128 + taken)
        return Cost(tokens * code_nbytes * heads * again, operations * heads * again, 0.0, selectivity.crowded)
    probes = settings.random + settings.starts
    hidden = min(max(n / max(tokens, 1), 1.0), HIDDEN_MAX)  # hidden tokens lie on the way to visible ones
    far = max(1.0, log2(max(n, tokens) / NEAR)) * sqrt(hidden)
    if by_rank:
        jumps = RANKED_JUMPS * sqrt(selectivity.expected_tokens)
        given_up = rising(selectivity.expected_tokens * tokens, RANKED_AT_ONCE, 1.0)
    else:
        jumps = WALK_JUMPS + FOUND_JUMPS * min(selectivity.expected_tokens, WALK_FOUND_MAX)
        few = selectivity.spread * rising(selectivity.expected_tokens, WALK_FOUND_MAX, GIVE_UP_POWER)
        given_up = max(1 - (1 - few) ** (rows / USUAL_ROWS), selectivity.crowded)
    walks = ceil(heads / _native.threads())
    nbytes = probes * code_nbytes * heads
    return Cost(nbytes * again, probes * rows * d * heads * again, jumps * far * (rows + WALK_ROWS) * walks * again, given_up)
