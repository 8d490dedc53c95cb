"""Values that all rooms of kvdb share: what a model's cache is, and what the database says of itself."""

from kvdb.types.arrays import DTYPES, Addresses, Array, Bools, Float32, KeysValues, Positions, Tokens
from kvdb.types.contexts import DURABILITIES, Checked, ContextInfo, ContextUpdate, IndexInfo, Placed, PrefixMatch, PromptPart
from kvdb.types.model_spec import (
    HEAD_DIM_MAX,
    HEADS_MAX,
    HEADS_TOTAL_MAX,
    LAYERS_MAX,
    ROPE_LAYOUTS,
    SCALING_LENGTH_MAX,
    TEXT_LENGTH_MAX,
    ModelSpec,
    Rope,
)
from kvdb.types.statistics import ERROR, MEASURES, ContextStatistics, SegmentStatistics, SessionStats, TierStats

__all__ = [
    "DTYPES",
    "DURABILITIES",
    "ERROR",
    "HEADS_MAX",
    "HEADS_TOTAL_MAX",
    "HEAD_DIM_MAX",
    "LAYERS_MAX",
    "MEASURES",
    "ROPE_LAYOUTS",
    "SCALING_LENGTH_MAX",
    "TEXT_LENGTH_MAX",
    "Addresses",
    "Array",
    "Bools",
    "Checked",
    "ContextInfo",
    "ContextStatistics",
    "ContextUpdate",
    "Float32",
    "IndexInfo",
    "KeysValues",
    "ModelSpec",
    "Placed",
    "Positions",
    "PrefixMatch",
    "PromptPart",
    "Rope",
    "SegmentStatistics",
    "SessionStats",
    "TierStats",
    "Tokens",
]
