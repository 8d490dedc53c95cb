"""The memory that segments, contexts and sessions take beside their blocks; it counts in the budget of main memory.

The figures are bytes of Python objects, as `tests/kvdb/storage/test_resident_memory.py` measures them: next to nothing beside
blocks of many tokens and heads, and more than the blocks where these are small.
"""

from kvdb.catalog.segments.segment_view import Views
from kvdb.types import ModelSpec

CONTEXT_BYTES, SEGMENT_BYTES, TABLE_BYTES = 2048, 2304, 656
"""The bytes of a context, of a segment, and of each of its tables, one a layer."""
SESSION_BYTES, LAYER_BYTES, RUN_BYTES = 2560, 8704, 16
"""The bytes of a session, of each of its layers with a plan or two, and of each block that a layer reads."""
ID_BYTES = 4
"""The bytes of a token's id."""


def context_nbytes(tokens: int) -> int:
    """Bytes of a context beside its segments. tokens: how many ids it keeps itself."""
    return CONTEXT_BYTES + ID_BYTES * tokens


def segment_nbytes(layers: int, tokens: int) -> int:
    """Bytes of a segment beside its blocks, its indexes and the queries that are kept with it."""
    return SEGMENT_BYTES + TABLE_BYTES * layers + ID_BYTES * tokens


def session_nbytes(spec: ModelSpec, views: Views, ids: int) -> int:
    """Bytes of a session over these views beside its blocks and the queries that it keeps. ids: how many it knows."""
    blocks = sum(view.segment.tables[0].layout.blocks_for(view.visible) for view in views)
    numbers = sum(kept.shape.q_heads * kept.shape.head_dim for kept in spec.kept)
    last_queries = 3 * numbers * spec.numpy_dtype.itemsize  # one of Python, two of native steps
    return SESSION_BYTES + len(spec.kept) * (LAYER_BYTES + TABLE_BYTES + RUN_BYTES * blocks) + last_queries + ID_BYTES * ids
