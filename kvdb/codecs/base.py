"""What every codec does: the keys and values of a block become other bytes, once, and these become numbers again.

Kernels read a block as it lies. So a codec says how its blocks lie, one of the representations that `native/block_format.h`
lists, whose number stands in the lowest bits of each block's address. A codec that only rounds, or leaves something out, needs no
kernel: its blocks lie as plain ones do (`kvdb.codecs.changed.Changed`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import kvdb._native as _native
from kvdb.types import Addresses, Array


class Rounding(NamedTuple):
    """Squared lengths: of what encoding changed in the keys, of the keys, and the same of the values."""

    keys_changed: float
    keys: float
    values_changed: float
    values: float

    @classmethod
    def of_all(cls, roundings: Sequence["Rounding"]) -> "Rounding":
        """That of several layers or segments together; zeros for none."""
        return cls(*(sum(lengths) for lengths in zip(*roundings, strict=True))) if roundings else cls(0.0, 0.0, 0.0, 0.0)

    @property
    def key_error(self) -> float:
        """The relative error of the keys."""
        return sqrt(self.keys_changed / self.keys) if self.keys else 0.0

    @property
    def value_error(self) -> float:
        """The relative error of the values."""
        return sqrt(self.values_changed / self.values) if self.values else 0.0


class Codec(ABC):
    """One way in which blocks hold keys and values. Codecs have no state and are there once.

    name: in settings, on the wire and in stores, so that it never changes; "" is what keeps them as they came. representation:
    how its blocks lie, which says what kernels read them. block_tokens: a block holds a multiple of so many tokens.
    key_error_max, value_error_max: the largest relative errors of what it makes of normally distributed keys and values; what it
    made of those that were stored is noted with them (`Rounding`).
    """

    name: str
    representation: _native.BlockFormat
    block_tokens: int = 1
    key_error_max: float
    value_error_max: float

    @property
    def number(self) -> int:
        """What stands in the address of each block for the kernels."""
        return int(self.representation.value)

    @property
    def has_rows(self) -> bool:
        """Whether each key and each value lies alone, as it came, so that it can be read and copied alone."""
        return self.representation is _native.BlockFormat.raw

    def nbytes(self, geometry: _native.Geometry) -> int:
        """The bytes of one block."""
        return _native.block_bytes(geometry, self.representation)

    def value_nbytes(self, geometry: _native.Geometry) -> int:
        """The bytes of the values in it, with what is needed to read them."""
        return self.nbytes(geometry) // 2

    @abstractmethod
    def encode(self, geometry: _native.Geometry, source: Addresses, n: int, target: Addresses) -> Rounding:
        """Write the first n tokens of a run of plain blocks into blocks of this codec, one for each. Returns what that changed;
        numbers that are not finite say that it could not be done."""

    @abstractmethod
    def decode(self, geometry: _native.Geometry, source: Addresses, start: int, k: Array, v: Array) -> None:
        """Read tokens [start, start + n) of a run into k and v, `[kv_heads, n, head_dim]` in the geometry's dtype."""

    @abstractmethod
    def copy_first(self, geometry: _native.Geometry, source: int, n: int, target: int) -> None:
        """Copy the first n tokens of the block at an address to the block at another."""
