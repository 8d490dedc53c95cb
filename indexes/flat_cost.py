"""What a search of the flat index is expected to take: follows `native/flat/`, from the thresholds to the exact scores.

The constants were fitted on the machine whose numbers are the defaults of `query_optimizer.cost.Machine`, over 4 thousand to a
million tokens of `benchmarks/workloads.py`. Operations are multiplications of the attention kernel.
"""

from math import ceil, sqrt

import indexes._native as _native
from indexes.base import Cost
from indexes.blocks import Blocks
from indexes.demand import Demand, rising
from indexes.retrieval import Exact, Retrieval, TopP

LENGTHS = 4
"""Planes of lengths that are kept of a chunk's keys."""
TILE = 4
"""Rows that share a read; a tile of fewer costs nearly as much."""
SAMPLE_JUMPS, SAMPLE_TILE_JUMPS = 720.0, 320.0
"""Of each KV head, and of each of its tiles: keys drawn and scored before the scan, and what is found and scored behind it."""
LENGTH_NBYTES = 2.0
LENGTH_OPERATIONS, LENGTH_TILE_OPERATIONS = 38.0, 44.0
"""Of each key, and again for each tile, where lengths tell that it is not wanted."""
CODE_OPERATIONS = 430.0
"""Of each key and tile, where lengths do not tell and codes must."""
FOUND_JUMPS = 1.4
"""Of each key that a row of a diffuse head finds."""
FEW_TOKENS = 8192
"""Rows that see fewer are always answered (`native/flat/demand.cpp`)."""
LOOKED = 1 / 16
"""Of the chunks, those whose codes are read to tell what a search would cost."""
PASSING_MAX, PASSING_POWER = 0.016, 2.0
"""Of the tokens, summed over a tile's rows: diffuse heads that want this share are given up as often as not, because codes let
pass more than is wanted."""
RANKED_MAX = 0.08
"""The same where the number wanted is known beforehand: then the rule is that of the kernel."""
RANKED_FIRST = 16_384
"""Keys that are all scored, until the threshold of a rank is good for anything."""
RANKED_FIRST_OPERATIONS, RANKED_CODE_OPERATIONS = 2400.0, 480.0
"""Of each such key and tile, and of each one behind them."""
RANKED_FOUND_OPERATIONS = 5300.0
"""Of each key that a row takes in while its rank's threshold rises: about the root of the wanted times all."""


def of(blocks: Blocks, tokens: int, rows: int, heads: int, retrieval: Retrieval, wanted: float | None) -> Cost:
    """Of one search by `rows` queries of each of `heads` KV heads."""
    d, key_nbytes = blocks.head_dim, blocks.token_nbytes / 2
    keys = float(tokens * heads)
    if isinstance(retrieval, Exact):
        return Cost(keys * key_nbytes, 2 * keys * rows * d)
    demand = Demand.of(retrieval, tokens, wanted)
    tiles = ceil(rows / TILE)
    cost = _by_rank(demand, rows, key_nbytes, d) if demand.alpha is None else _by_range(demand, rows, d)
    again = 2 if isinstance(retrieval, TopP) else 1  # a guess: the mass is bounded by all codes, and often for two ranges
    jumps = (SAMPLE_JUMPS + tiles * SAMPLE_TILE_JUMPS + cost.jumps) * again * heads / _native.threads()
    return Cost(cost.nbytes * again * heads, cost.operations * again * heads, jumps, cost.given_up)


def _by_range(demand: Demand, rows: int, d: int) -> Cost:
    """Of one KV head. Lengths alone answer sharp heads; of diffuse ones codes are read, or some to see that it does not pay."""
    n, tiles = demand.tokens, ceil(rows / TILE)
    share = demand.wanted / max(n, 1) * min(rows, TILE)
    dropped = rising(share, PASSING_MAX, PASSING_POWER) if n >= FEW_TOKENS else 0.0
    coded = demand.spread * (1 - dropped * (1 - LOOKED)) * n * tiles
    # Of a row that wants most of the keys many come with those that other rows want.
    found = demand.spread * (1 - dropped) * rows * min(demand.wanted, n / 3)
    return Cost(
        nbytes=LENGTH_NBYTES * n + coded * (d / 2 + 2 * LENGTHS),
        operations=(LENGTH_OPERATIONS + LENGTH_TILE_OPERATIONS * tiles) * n + coded * CODE_OPERATIONS * _width(rows) * d / 128,
        jumps=found * FOUND_JUMPS,
        given_up=max(demand.spread * dropped, demand.crowded),
    )


def _by_rank(demand: Demand, rows: int, key_nbytes: float, d: int) -> Cost:
    """Of one KV head: thresholds rise as keys come, so that the first are all scored."""
    n, tiles = demand.tokens, ceil(rows / TILE)
    if n >= FEW_TOKENS and demand.wanted * min(rows, TILE) > RANKED_MAX * n:
        return Cost(0.0, 0.0, 0.0, 1.0)
    first = float(min(n, RANKED_FIRST))
    codes = d / 2 + 2 * LENGTHS
    operations = (RANKED_FIRST_OPERATIONS * first + RANKED_CODE_OPERATIONS * (n - first)) * _width(rows) * d / 128
    return Cost(
        nbytes=tiles * (first * key_nbytes + (n - first) * codes),
        operations=tiles * operations + rows * RANKED_FOUND_OPERATIONS * sqrt(demand.wanted * n),
        given_up=demand.crowded,
    )


def _width(rows: int) -> float:
    """What a tile of so many rows takes, of what a full one does."""
    return (rows / ceil(rows / TILE) + TILE) / (2 * TILE)
