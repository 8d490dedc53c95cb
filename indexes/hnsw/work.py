"""What a walk is expected to take: reads of codes, links and keys, one after the other, hardly more of them for more tokens.

The constants were fitted on the machine whose numbers are the defaults of `query_optimizer.cost.Machine`, over 4 thousand to a
million tokens of `benchmarks/workloads.py`. Operations are multiplications of the attention kernel.
"""

from math import ceil, log2, sqrt

import indexes._native as _native
from indexes.base import Cost
from indexes.blocks import Blocks
from indexes.demand import Demand, rising
from indexes.hnsw.settings import Settings
from indexes.retrieval import Exact, Retrieval, TopP

SCAN_MAX = 4096
"""Fewer visible tokens are all looked at, without a walk (`native/graph/search.cpp`)."""
NEAR = 1024
"""Tokens whose codes and links stay in caches; how far apart the others lie makes each read slower."""
WALK_ROWS = 1.1
"""A walk costs as if it were made for so many more rows."""
WALK_JUMPS, FOUND_JUMPS = 39.0, 0.62
"""Of each row, for each doubling of the tokens beyond NEAR: of any walk, and of each token that is found."""
RANKED_JUMPS = 40.0
"""The same of a walk to the k nearest, times the root of k."""
WALK_FOUND_MAX = 120.0
"""A walk of a diffuse head that finds more gives up as often as not; one that finds much more costs no more."""
GIVE_UP_POWER = 2.0
USUAL_ROWS = 4
"""Of a KV head, for which that holds; one row that gives up is enough for the head."""
HIDDEN_MAX = 2.0
"""How many times as many tokens as are visible a walk may have to go among before they cost no more; a guess."""
SCAN_OPERATIONS = 130.0
"""Of each token and row, where all are looked at."""
RANKED_SCAN_OPERATIONS = 8500.0
"""Of each token that a row takes in while the threshold of its rank rises: about the root of the wanted times all."""
KEPT_OPERATIONS = 4500.0
"""Of each token that a row finds of all of them."""
RANKED_AT_ONCE = 24_576 * 64
"""Tokens times k, beyond which a walk to the k nearest meets more than its budget as often as not."""


def cost(blocks: Blocks, settings: Settings, asked: tuple[int, int, int], retrieval: Retrieval, wanted: float | None) -> Cost:
    """Of one search. asked: tokens, rows of each KV head, KV heads."""
    tokens, rows, heads = asked
    d, n = blocks.head_dim, blocks.tokens
    if isinstance(retrieval, Exact):
        keys = float(tokens * heads)
        return Cost(keys * blocks.token_nbytes / 2, 2 * keys * rows * d)
    demand = Demand.of(retrieval, tokens, wanted)
    by_rank = demand.alpha is None
    code_nbytes = ceil(d / 64) * 64
    again = 2 if isinstance(retrieval, TopP) else 1  # a guess: a second range, where the first has too little of the mass
    if tokens <= SCAN_MAX or (by_rank and demand.wanted > settings.dense * tokens):
        taken = RANKED_SCAN_OPERATIONS * sqrt(demand.wanted * tokens) if by_rank else KEPT_OPERATIONS * demand.wanted
        operations = rows * (SCAN_OPERATIONS * tokens * d / 128 + taken)
        return Cost(tokens * code_nbytes * heads * again, operations * heads * again, 0.0, demand.crowded)
    probes = settings.random + settings.starts
    hidden = min(max(n / max(tokens, 1), 1.0), HIDDEN_MAX)  # they lie on the way to those that are seen
    far = max(1.0, log2(max(n, tokens) / NEAR)) * sqrt(hidden)
    if by_rank:
        jumps = RANKED_JUMPS * sqrt(demand.wanted)
        given_up = rising(demand.wanted * tokens, RANKED_AT_ONCE, 1.0)
    else:
        jumps = WALK_JUMPS + FOUND_JUMPS * min(demand.wanted, WALK_FOUND_MAX)
        few = demand.spread * rising(demand.wanted, WALK_FOUND_MAX, GIVE_UP_POWER)
        given_up = max(1 - (1 - few) ** (rows / USUAL_ROWS), demand.crowded)
    walks = ceil(heads / _native.threads())
    nbytes = probes * code_nbytes * heads
    return Cost(nbytes * again, probes * rows * d * heads * again, jumps * far * (rows + WALK_ROWS) * walks * again, given_up)
