"""The expected cost of a search of the quantized index: a scan of all codes, and a read of the tokens with the largest weights.

Operations are multiplications of the attention kernel, as in `indexes.flat.cost`; a tile is TILE rows of one KV head, which share
what they read. Codes of values count as read, because it is not known beforehand whether they are. The constants, and the figures
of `build_cost`, are what `python -m benchmarks.cost --fit quantized` says of the machine that `query_optimizer.cost.Machine`
describes.
"""

from math import ceil

import indexes._native as _native
from indexes.base import BuildCost, Cost
from indexes.blocks import Blocks
from indexes.chunk_codes import CHUNK
from indexes.retrieval import Exact, Retrieval, TopP
from indexes.selectivity import Selectivity, rising

TILE = 4
"""Rows that share a read."""
TILE_OPERATIONS, ROW_OPERATIONS = 0.0, 81.0
"""Operations of each token and tile of rows, and again of each row, at a head_dim of 128."""
SORTED_OPERATIONS = 11_500.0
"""Operations of each token and row where a share of the mass is asked for, because all tokens are sorted."""
FOUND_JUMPS = 1.4
"""Jumps of each key that a row finds."""
CANDIDATES = 1.5
"""Keys that are read for each that is retrieved."""
BUILD_SECONDS = 1.02e-8
"""Seconds to code one channel of a key and of its value."""
SEARCH_SHARE = 0.5
"""The time of a search for few tokens with the rest estimated, relative to reading everything."""
WORTH, WORTH_POWER = 0.25, 4.0
"""A KV head is given up if one of its rows wants a larger share of the tokens (`native/quantized/search.cpp`). The power says
how sharply."""


def of(blocks: Blocks, tokens: int, rows: int, heads: int, retrieval: Retrieval, expected_tokens: float | None) -> Cost:
    """The cost of one search by `rows` queries of each of `heads` KV heads. expected_tokens: as `Index.cost` takes it."""
    d, tiles = blocks.head_dim, ceil(rows / TILE)
    if isinstance(retrieval, Exact):
        keys = float(tokens * heads)
        return Cost(keys * blocks.key_nbytes, 2 * keys * rows * d)
    selectivity = Selectivity.of(retrieval, tokens, expected_tokens)
    each = (TILE_OPERATIONS * tiles + ROW_OPERATIONS * rows) * d / 128
    if isinstance(retrieval, TopP):
        each += SORTED_OPERATIONS * rows
    found = CANDIDATES * rows * min(selectivity.expected_tokens, float(tokens))
    return Cost(
        nbytes=heads * tokens * token_nbytes(d) * tiles,
        operations=heads * tokens * each,
        jumps=heads * found * FOUND_JUMPS / _native.threads(),
        given_up=rising(CANDIDATES * selectivity.expected_tokens, WORTH * tokens, WORTH_POWER),
    )


def to_build(tokens: int, kv_heads: int, head_dim: int) -> BuildCost:
    """The cost of an index over one layer."""
    keys = tokens * kv_heads
    beside = (8 * head_dim + 8 * _native.QUANTIZED_RUNS) / CHUNK  # a chunk's centres and bounds
    return BuildCost(BUILD_SECONDS * keys * head_dim, keys * (token_nbytes(head_dim) + beside), SEARCH_SHARE)


def value_dims(head_dim: int) -> int:
    """The number of dimensions of a value that are coded: head_dim, rounded up to a whole vector."""
    return -(-head_dim // 16) * 16


def token_nbytes(head_dim: int) -> float:
    """The bytes that a scan reads for each token of one KV head: the codes and the scales of its key and of its value."""
    return head_dim / 2 + 2 + value_dims(head_dim) / 2 + 2
