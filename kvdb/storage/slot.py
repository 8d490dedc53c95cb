"""The layout of one slot of the GPU tier: a block's keys and values, and the index pages over its keys."""

from dataclasses import dataclass
from functools import cached_property

from kvdb.storage.block_layout import BlockLayout

SLOT_FORMATS = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}
"""The bytes of an element, by the format of a slot. float8 is e4m3; it and int8 have a float32 scale for each key and value."""
ALIGNMENT = 256
"""In bytes; every area of a slot begins at a multiple of it, so that kernels load 16 bytes at a time."""
BOUND_TOKENS = 32
"""The most tokens of one page of channel bounds; the last page of a block may hold fewer."""


@dataclass(frozen=True)
class SlotLayout:
    """The areas of a slot, in this order, each aligned. `*_at` are their offsets in bytes.

    keys, values: `[kv_heads, block_size, head_dim]` in `format`. scales: float32 `[2, kv_heads, block_size]` of keys and values,
    only where the format is quantised; otherwise the area is empty. codes: uint8 `[kv_heads, block_size, head_dim / 2]`, four
    bits for each dimension of a key minus its block's centre, with dimension i in the low half of byte i and dimension i +
    head_dim / 2 in the high half. factors: bfloat16 `[2, kv_heads, block_size]`, the size of a code's step, and the length of the
    code's residual, rounded up. centres: bfloat16 `[kv_heads, head_dim]`. bounds: bfloat16 `[kv_heads, pages, 2, head_dim]`, the
    least and the largest of each channel of a page of keys, rounded outwards.
    """

    format: str
    kv_heads: int
    head_dim: int
    block_size: int

    @classmethod
    def of(cls, layout: BlockLayout, format: str | None = None) -> "SlotLayout":  # noqa: A002  # the field's name
        """The slot for blocks of that layout. format: the format of keys and values, None for the blocks' own dtype."""
        return cls(format or layout.dtype, layout.kv_heads, layout.head_dim, layout.block_size)

    @property
    def quantised(self) -> bool:
        return SLOT_FORMATS[self.format] == 1

    @property
    def pages(self) -> int:
        """The number of pages of channel bounds."""
        return -(-self.block_size // BOUND_TOKENS)

    @cached_property
    def values_at(self) -> int:
        return _aligned(self.kv_heads * self.block_size * self.head_dim * SLOT_FORMATS[self.format])

    @cached_property
    def scales_at(self) -> int:
        return 2 * self.values_at

    @cached_property
    def codes_at(self) -> int:
        rows = 2 * self.kv_heads * self.block_size
        return self.scales_at + (_aligned(4 * rows) if self.quantised else 0)

    @cached_property
    def factors_at(self) -> int:
        return self.codes_at + _aligned(self.kv_heads * self.block_size * self.head_dim // 2)

    @cached_property
    def centres_at(self) -> int:
        return self.factors_at + _aligned(4 * self.kv_heads * self.block_size)

    @cached_property
    def bounds_at(self) -> int:
        return self.centres_at + _aligned(2 * self.kv_heads * self.head_dim)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of a slot, a multiple of ALIGNMENT."""
        return self.bounds_at + _aligned(4 * self.kv_heads * self.pages * self.head_dim)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
