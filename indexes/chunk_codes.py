"""The base of the kinds that code all tokens, chunk by chunk, in arrays that grow with them."""

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy.typing as npt

import indexes._native as _native
from indexes import file
from indexes.arena import arrays_together, nbytes_together
from indexes.base import Ask, Float32, IndexCorrupt, unlimited
from indexes.blocks import Blocks
from indexes.file import Shapes

CHUNK = _native.CHUNK
"""The number of tokens that are coded together, relative to their mean."""
Arrays = dict[str, npt.NDArray[Any]]


class Kernels(Protocol):
    """The C++ side of a kind: codes in arrays that Python owns."""

    def insert(self, blocks: _native.Blocks, coded: int) -> None: ...

    def verify(self, blocks: _native.Blocks) -> int: ...


K = TypeVar("K", bound=Kernels)


class ChunkCodes(ABC, Generic[K]):
    """Every verb of an index but `search` and `cost`. A kind says which arrays it keeps (`shapes`) and which kernels read and
    write them (`kernels`).

    arrays: by name, `[chunks, kv_heads, ...]`; there may be more chunks than are in use.
    """

    kind: ClassVar[str]
    walks: ClassVar[bool] = False
    estimates_tail: ClassVar[bool] = False
    file_format: ClassVar[int]
    """The version of what a file holds."""

    def __init__(self, blocks: Blocks, arrays: Arrays, chunks: int) -> None:
        self.blocks = blocks
        self.arrays = arrays
        self._chunks = chunks
        self._kernels = self.kernels(chunks, blocks.kv_heads, blocks.head_dim, arrays)

    @staticmethod
    @abstractmethod
    def shapes(chunks: int, kv_heads: int, head_dim: int) -> Shapes:
        """The arrays that hold so many chunks."""

    @staticmethod
    @abstractmethod
    def kernels(chunks: int, kv_heads: int, head_dim: int, arrays: Arrays) -> K:
        """The kernels over these arrays."""

    @classmethod
    def build(cls, blocks: Blocks, query_samples: Float32 | None = None) -> Self:  # noqa: ARG003, codes need none
        """Code all tokens of `blocks`."""
        index = cls(replace(blocks, tokens=0), cls._zeros(0, blocks), 0)
        index.insert(blocks)
        return index

    @property
    def nbytes(self) -> int:
        """See `indexes.base.Index`; the room to grow counts."""
        return nbytes_together({name: (array.shape, array.dtype.type) for name, array in self.arrays.items()})

    def insert(self, blocks: Blocks) -> None:
        """See `indexes.base.Index`. Raises ValueError for blocks of another layout, or fewer tokens."""
        blocks.check_extends(self.blocks)
        if chunks_of(blocks.tokens) > self._chunks:
            self._grow(max(chunks_of(blocks.tokens), self._chunks * 3 // 2))
        if blocks.tokens > self.blocks.tokens:
            self._kernels.insert(blocks.native, self.blocks.tokens)
        self.blocks = blocks

    def verify(self) -> None:
        """Check the codes against the keys and values. Raises IndexCorrupt."""
        wrong = self._kernels.verify(self.blocks.native)
        if wrong:
            raise IndexCorrupt(f"{wrong} codes are not those of their keys and values; build the index again")

    def save(self, path: Path, ask: Ask = unlimited) -> None:
        """See `indexes.base.Index`. Raises OSError."""
        header = {"blocks": self.blocks.identity(), "format": self.file_format}
        file.write(path, self.kind, header, self._used(), ask)

    @classmethod
    def load(cls, path: Path, blocks: Blocks) -> Self:
        """See `indexes.base.Index`. Raises IndexCorrupt, OSError."""
        header, arrays = file.read(path, cls.kind)
        file.check_blocks(path, header, blocks)
        if header.get("format") != cls.file_format:
            raise IndexCorrupt(
                f"{path} holds codes of format {header.get('format')!r}; expected {cls.file_format}: build the index again"
            )
        chunks = chunks_of(blocks.tokens)
        stored = file.checked_arrays(path, arrays, cls.shapes(chunks, blocks.kv_heads, blocks.head_dim))
        kept = cls._zeros(chunks, blocks)
        for name, array in stored.items():
            kept[name][:] = array
        return cls(blocks, kept, chunks)

    def _used(self) -> Arrays:
        """The arrays without their room to grow."""
        return {name: array[: chunks_of(self.blocks.tokens)] for name, array in self.arrays.items()}

    def _grow(self, chunks: int) -> None:
        """Make room for so many chunks."""
        grown = self._zeros(chunks, self.blocks)
        for name, array in self.arrays.items():
            grown[name][: self._chunks] = array
        self.arrays, self._chunks = grown, chunks
        self._kernels = self.kernels(chunks, self.blocks.kv_heads, self.blocks.head_dim, grown)

    @classmethod
    def _zeros(cls, chunks: int, blocks: Blocks) -> Arrays:
        return arrays_together(cls.shapes(chunks, blocks.kv_heads, blocks.head_dim))


def chunks_of(tokens: int) -> int:
    """The number of chunks that hold `tokens` tokens."""
    return -(-tokens // CHUNK)
