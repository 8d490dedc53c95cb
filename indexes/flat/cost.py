"""The expected cost of a search of the flat index: follows `native/flat/`, from the thresholds to the exact scores.

The constants were fitted on the machine whose numbers are the defaults of `query_optimizer.cost.Machine`, over 4 thousand to a
million tokens of `benchmarks/workloads.py`. Operations are multiplications of the attention kernel; a tile is TILE rows of one
KV head, which share what they read.
"""

from math import ceil, sqrt

import indexes._native as _native
from indexes.base import Cost
from indexes.blocks import Blocks
from indexes.retrieval import Exact, Retrieval, TopP
from indexes.selectivity import Selectivity, rising

LENGTHS = 4
"""The number of lengths that are kept of each key."""
TILE = 4
"""Rows that share a read. A tile of fewer rows costs nearly as much."""
SAMPLE_JUMPS, SAMPLE_TILE_JUMPS = 720.0, 320.0
"""Jumps of each KV head, and of each of its tiles: a sample of keys is scored before the scan, and the found keys after it."""
LENGTH_NBYTES = 2.0
"""The bytes of a key's length."""
LENGTH_OPERATIONS, LENGTH_TILE_OPERATIONS = 38.0, 44.0
"""Operations of each key, and of each key and tile, where its length shows that it is out of range."""
CODE_OPERATIONS = 430.0
"""Operations of each key and tile where the length does not decide, so that the code must."""
FOUND_JUMPS = 1.4
"""Jumps of each key that a row of a diffuse head finds."""
FEW_TOKENS = 8192
"""Rows that see fewer tokens are always answered (`native/flat/density.cpp`)."""
LOOKED = 1 / 16
"""The share of the chunks whose codes are read to predict the cost of a search."""
PASSING_MAX, PASSING_POWER = 0.016, 2.0
"""Half of the diffuse heads are given up when their tile wants PASSING_MAX of the tokens, summed over its rows; the share is
small because codes let more keys pass than are in range. The power says how fast giving up becomes certain above it."""
RANKED_MAX = 0.08
"""The same share for the k largest, whose number is known beforehand; the kernel has the same rule."""
RANKED_FIRST = 16_384
"""The first keys are all scored: only after this many of them does the threshold of the k largest exclude any."""
RANKED_FIRST_OPERATIONS, RANKED_CODE_OPERATIONS = 2400.0, 480.0
"""Operations for each tile and each of those first keys, and for each tile and each later key."""
RANKED_FOUND_OPERATIONS = 5300.0
"""Operations of each key that is among a row's k largest so far when it is scanned; there are about sqrt(k * keys) of them."""


def of(blocks: Blocks, tokens: int, rows: int, heads: int, retrieval: Retrieval, expected_tokens: float | None) -> Cost:
    """The cost of one search by `rows` queries of each of `heads` KV heads. expected_tokens: as `Index.cost` takes it."""
    d, key_nbytes = blocks.head_dim, blocks.key_nbytes
    keys = float(tokens * heads)
    if isinstance(retrieval, Exact):
        return Cost(keys * key_nbytes, 2 * keys * rows * d)
    selectivity = Selectivity.of(retrieval, tokens, expected_tokens)
    tiles = ceil(rows / TILE)
    cost = _by_rank(selectivity, rows, key_nbytes, d) if selectivity.alpha is None else _by_range(selectivity, rows, d)
    again = 2 if isinstance(retrieval, TopP) else 1  # a guess: all codes are read to bound the mass, often for two ranges
    jumps = (SAMPLE_JUMPS + tiles * SAMPLE_TILE_JUMPS + cost.jumps) * again * heads / _native.threads()
    return Cost(cost.nbytes * again * heads, cost.operations * again * heads, jumps, cost.given_up)


def _by_range(selectivity: Selectivity, rows: int, d: int) -> Cost:
    """The cost of a range for one KV head. Lengths alone answer sharp heads; diffuse heads need all codes, or some of them to see
    that a search does not pay."""
    n, tiles = selectivity.tokens, ceil(rows / TILE)
    share = selectivity.expected_tokens / max(n, 1) * min(rows, TILE)
    dropped = rising(share, PASSING_MAX, PASSING_POWER) if n >= FEW_TOKENS else 0.0
    coded = selectivity.spread * (1 - dropped * (1 - LOOKED)) * n * tiles
    # Where a row wants most of the keys, many of them are read for other rows anyway.
    found = selectivity.spread * (1 - dropped) * rows * min(selectivity.expected_tokens, n / 3)
    return Cost(
        nbytes=LENGTH_NBYTES * n + coded * (d / 2 + 2 * LENGTHS),
        operations=(LENGTH_OPERATIONS + LENGTH_TILE_OPERATIONS * tiles) * n + coded * CODE_OPERATIONS * _width(rows) * d / 128,
        jumps=found * FOUND_JUMPS,
        given_up=max(selectivity.spread * dropped, selectivity.crowded),
    )


def _by_rank(selectivity: Selectivity, rows: int, key_nbytes: float, d: int) -> Cost:
    """The cost of the k largest for one KV head. Thresholds rise during the scan, so the first keys are all scored."""
    n, tiles = selectivity.tokens, ceil(rows / TILE)
    if n >= FEW_TOKENS and selectivity.expected_tokens * min(rows, TILE) > RANKED_MAX * n:
        return Cost(0.0, 0.0, 0.0, 1.0)
    first = float(min(n, RANKED_FIRST))
    codes = d / 2 + 2 * LENGTHS
    operations = (RANKED_FIRST_OPERATIONS * first + RANKED_CODE_OPERATIONS * (n - first)) * _width(rows) * d / 128
    return Cost(
        nbytes=tiles * (first * key_nbytes + (n - first) * codes),
        operations=tiles * operations + rows * RANKED_FOUND_OPERATIONS * sqrt(selectivity.expected_tokens * n),
        given_up=selectivity.crowded,
    )


def _width(rows: int) -> float:
    """The cost of a tile of `rows` rows, relative to a full one."""
    return (rows / ceil(rows / TILE) + TILE) / (2 * TILE)
