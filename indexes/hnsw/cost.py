"""The expected cost of a walk: reads of codes, links and keys, one after the other, hardly more of them for more tokens.

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
"""Up to so many visible tokens are all looked at, without a walk (`native/graph/search.cpp`)."""
NEAR = 1024
"""Tokens whose codes and links stay in caches. The more tokens there are beyond these, the slower is each read."""
WALK_ROWS = 1.1
"""A walk has a fixed cost, that of so many more rows."""
WALK_JUMPS, FOUND_JUMPS = 39.0, 0.62
"""Jumps of each row for each doubling of the tokens beyond NEAR: of any walk, and of each token that is found."""
RANKED_JUMPS = 40.0
"""The same for a walk to the k nearest, times the root of k."""
WALK_FOUND_MAX = 120.0
"""A walk of a diffuse head that finds more tokens gives up as often as not; one that finds many more costs no more."""
GIVE_UP_POWER = 2.0
"""How fast giving up becomes sure beyond WALK_FOUND_MAX."""
USUAL_ROWS = 4
"""Rows of a KV head for which WALK_FOUND_MAX holds. One row that gives up is enough for the head."""
HIDDEN_MAX = 2.0
"""Hidden tokens make a walk longer, up to so many times as many tokens as are visible; a guess."""
SCAN_OPERATIONS = 130.0
"""Operations of each token and row where all tokens are looked at."""
RANKED_SCAN_OPERATIONS = 8500.0
"""Operations of each token that a row takes in while the threshold of its rank rises: about the root of k times all tokens."""
KEPT_OPERATIONS = 4500.0
"""Operations of each token that a row finds in a scan of all."""
RANKED_AT_ONCE = 24_576 * 64
"""Tokens times k beyond which a walk to the k nearest passes its budget as often as not."""


def of(
    blocks: Blocks, settings: Settings, shape: tuple[int, int, int], retrieval: Retrieval, expected_tokens: float | None
) -> Cost:
    """The cost of one search. shape: visible tokens, rows of each KV head, KV heads. expected_tokens: see `Index.cost`."""
    tokens, rows, heads = shape
    d, n = blocks.head_dim, blocks.tokens
    if isinstance(retrieval, Exact):
        keys = float(tokens * heads)
        return Cost(keys * blocks.token_nbytes / 2, 2 * keys * rows * d)
    selectivity = Selectivity.of(retrieval, tokens, expected_tokens)
    by_rank = selectivity.alpha is None
    code_nbytes = ceil(d / 64) * 64
    again = 2 if isinstance(retrieval, TopP) else 1  # a guess: a second range, where the first has too little of the mass
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
