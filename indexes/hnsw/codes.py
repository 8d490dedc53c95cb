"""The arrays that the graph keeps of each key: a code of one byte for each dimension, the length of the code's residual, and
links."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import indexes._native as _native
from indexes.base import Float32, IndexCorrupt, Int32
from indexes.blocks import Blocks
from indexes.file import Shapes, checked_arrays
from indexes.hnsw.build import NO_LINK

CODE_STEP = 64
"""The code of a key is padded to a multiple of this number of bytes."""
DEVIATIONS = (12.0, 48.0, math.inf)
"""How many standard deviations the codes of a channel reach, if its keys do; the next number is taken where too many keys lie
beyond."""
SAMPLE = 65_536
"""Keys, spread evenly, from which the range of the codes is measured."""
OUTLIER = 4.0
"""A key is an outlier if its residual is this many times the usual one: its code describes it badly."""
OUTLIERS_MAX = 64
GROWTH = 1.25
"""The factor by which the room grows."""
LINE = 128
"""Bytes of two cache lines, which processors fetch together."""
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass
class Codes:
    """The arrays of `_native.Graph`, with room for more tokens than there are; entries behind `tokens` have no meaning.

    codes: uint8 `[kv_heads, capacity, stride]`. A token's code and links lie side by side (`side_by_side`), so that a walk
    finds its links on the page of memory on which it found the code. residual: float32 `[kv_heads, capacity]`, the length of
    the difference between a key and its code. links: uint32 `[kv_heads, capacity, degree]`. low, step: float32 `[kv_heads,
    head_dim]`, a key is about low + step * code. measured: the number of tokens when low and step were chosen. outliers:
    int32 `[kv_heads, any]`, tokens with the largest residuals, -1 behind the last. parents: uint32 `[kv_heads, capacity]`,
    which insertions use: for each token, the token before it on a path from token 0; None before the first insertion.
    """

    codes: npt.NDArray[np.uint8]
    residual: Float32
    links: npt.NDArray[np.uint32]
    low: Float32
    step: Float32
    tokens: int
    measured: int = 0
    outliers: Int32 = field(default_factory=lambda: np.empty((0, 0), np.int32))
    parents: npt.NDArray[np.uint32] | None = None

    @classmethod
    def of(cls, blocks: Blocks, degree: int) -> "Codes":
        """The codes of all keys of `blocks`, with room for links but no links yet."""
        heads, n, d = blocks.kv_heads, blocks.tokens, blocks.head_dim
        codes, links = side_by_side(heads, n, -(-d // CODE_STEP) * CODE_STEP, degree)
        made = cls(
            codes, np.empty((heads, n), np.float32), links, np.zeros((heads, d), np.float32), np.ones((heads, d), np.float32), n
        )
        made.links[:] = NO_LINK
        made.encode_all(blocks)
        return made

    @classmethod
    def restored(
        cls, header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], blocks: Blocks, degree: int, path: Path
    ) -> "Codes":
        """The codes that `saved` gave. Raises IndexCorrupt for arrays of another shape or links beyond the tokens."""
        heads, n, d = blocks.kv_heads, blocks.tokens, blocks.head_dim
        expected: Shapes = {
            "codes": ((heads, n, -(-d // CODE_STEP) * CODE_STEP), np.uint8),
            "residual": ((heads, n), np.float32),
            "links": ((heads, n, degree), np.uint32),
            "low": ((heads, d), np.float32),
            "step": ((heads, d), np.float32),
        }
        held = checked_arrays(path, arrays, expected)
        codes, links = side_by_side(heads, n, -(-d // CODE_STEP) * CODE_STEP, degree)
        codes[:], links[:] = held["codes"], held["links"]
        held |= {"codes": codes, "links": links}
        made = cls(**held, tokens=n, measured=int(header["measured"]))
        made.check_links()
        made.find_outliers()
        return made

    def saved(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """The header and the arrays to be saved."""
        arrays = {name: getattr(self, name)[:, : self.tokens] for name in ("codes", "residual", "links")}
        return {"measured": self.measured}, arrays | {"low": self.low, "step": self.step}

    @cached_property
    def native(self) -> _native.Graph:
        return _native.Graph(self.codes, self.residual, self.links, self.low, self.step, self.tokens)

    @property
    def nbytes(self) -> int:
        arrays = (self.codes, self.residual, self.links, self.low, self.step, self.outliers, self.parents)
        return sum(array.nbytes for array in arrays if array is not None)

    def no_parents(self) -> npt.NDArray[np.uint32]:
        return np.full(self.residual.shape, NO_LINK, np.uint32)

    def encode_all(self, blocks: Blocks) -> None:
        """Choose the range of the codes from the present keys, and code all of them."""
        for head in range(len(self.codes)):
            for deviations in DEVIATIONS:
                self.low[head], self.step[head] = _range(blocks, head, deviations)
                _native.graph_encode(self.native, blocks.native, head, 0)
                # Queries look for keys far out. With their codes cut off, they would look worse than they are.
                if len(self._outliers_of(head)) < OUTLIERS_MAX:
                    break
        self.measured = self.tokens
        self.find_outliers()

    def encode(self, blocks: Blocks, begin: int) -> None:
        """Code the tokens from `begin` on."""
        for head in range(len(self.codes)):
            _native.graph_encode(self.native, blocks.native, head, begin)
        self.find_outliers()

    def find_outliers(self) -> None:
        """Set `outliers`, the largest residual first."""
        found = [self._outliers_of(head) for head in range(len(self.codes))]
        self.outliers = np.full((len(found), max(map(len, found))), -1, np.int32)
        for row, tokens in zip(self.outliers, found, strict=True):
            row[: len(tokens)] = tokens

    def coded_outliers(self) -> tuple[Int32, npt.NDArray[np.uint8], Float32]:
        """`outliers`, their codes, uint8 `[kv_heads, any, stride]`, and the lengths of what these leave of them, float32
        `[kv_heads, any]`, all side by side; what stands for -1 has no meaning."""
        head = np.arange(len(self.outliers))[:, None]
        return self.outliers, in_lines(self.codes[head, self.outliers]), self.residual[head, self.outliers]

    def _outliers_of(self, head: int) -> npt.NDArray[np.intp]:
        residual = self.residual[head, : self.tokens]
        usual = float(np.median(residual[:: max(1, self.tokens // 1024)])) if self.tokens else 0.0
        where = np.flatnonzero(residual > OUTLIER * usual + np.finfo(np.float32).tiny)
        return where[np.argsort(-residual[where], kind="stable")[:OUTLIERS_MAX]]

    def grow(self, blocks: Blocks) -> None:
        """Make room for the new tokens of `blocks`, and code them. Each token is copied and coded a few times, amortised."""
        begin, capacity = self.tokens, self.codes.shape[1]
        if blocks.tokens > capacity:
            capacity = max(blocks.tokens, int(capacity * GROWTH))
            codes, links = side_by_side(len(self.codes), capacity, self.codes.shape[2], self.links.shape[2])
            codes[:, :begin], links[:, :begin] = self.codes[:, :begin], self.links[:, :begin]
            self.codes, self.links = codes, links
            self.residual = _longer(self.residual, begin, capacity)
            self.parents = None if self.parents is None else _longer(self.parents, begin, capacity)
        self.tokens = blocks.tokens
        self.__dict__.pop("native", None)
        if self.tokens >= 2 * self.measured:
            self.encode_all(blocks)
        else:
            self.encode(blocks, begin)

    def check_links(self) -> None:
        """Raises IndexCorrupt for a link beyond the tokens, or one behind the end of its list."""
        links = self.links[:, : self.tokens]
        ends = links == NO_LINK
        if ((links >= self.tokens) & ~ends).any():
            raise IndexCorrupt(f"a link leads beyond the {self.tokens} tokens; build the index again")
        if (ends[..., :-1] & ~ends[..., 1:]).any():
            raise IndexCorrupt("a list of links goes on behind its end; build the index again")

    def verify(self, blocks: Blocks) -> None:
        """Check that every link is a token, and that every residual belongs to its code and key. Raises IndexCorrupt."""
        self.check_links()
        for head in range(len(self.codes)):
            for begin in range(0, self.tokens, SAMPLE):
                end = min(begin + SAMPLE, self.tokens)
                code = self.codes[head, begin:end, : blocks.head_dim].astype(np.float32)
                rest = blocks.keys(head, begin, end) - (self.low[head] + self.step[head] * code)
                length = np.linalg.norm(rest, axis=1)
                if not np.allclose(length, self.residual[head, begin:end], rtol=1e-2, atol=1e-4 * float(length.max())):
                    raise IndexCorrupt(f"codes of KV head {head} are not those of its keys; build the index again")


def _range(blocks: Blocks, head: int, deviations: float) -> tuple[Float32, Float32]:
    """The low and step of each channel: the range of the keys, cut at a number of standard deviations, so that a few outliers do
    not cost the other keys their precision."""
    n = blocks.tokens
    if n == 0:
        return np.zeros(blocks.head_dim, np.float32), np.ones(blocks.head_dim, np.float32)
    stride = max(1, n // SAMPLE)
    parts = [blocks.keys(head, begin, min(begin + 4096, n))[::stride] for begin in range(0, n, 4096)]
    keys = np.concatenate(parts).astype(np.float64)
    mean, spread = keys.mean(axis=0), np.maximum(keys.std(axis=0), 1e-30) * deviations
    low, high = np.maximum(keys.min(axis=0), mean - spread), np.minimum(keys.max(axis=0), mean + spread)
    step = (high - low) / 255
    least = max(float(step.mean()) / 16, float(np.abs(mean).max()) * 1e-6, 1e-12)  # later keys may differ where these do not
    step = np.maximum(step, least)
    return (low - step * 0.01).astype(np.float32), step.astype(np.float32)


def side_by_side(heads: int, capacity: int, stride: int, degree: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """Room for codes, uint8 `[heads, capacity, stride]`, and links, uint32 `[heads, capacity, degree]`: the links of a token
    behind its code."""
    both = empty_lines((heads, capacity, stride + 4 * degree), np.dtype(np.uint8))
    return both[..., :stride], both[..., stride:].view(np.uint32)


def empty_lines(shape: tuple[int, ...], dtype: np.dtype[Scalar]) -> npt.NDArray[Scalar]:
    """An array that begins at a cache line, so that a code or a list of links fills as few lines as possible."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + LINE, np.uint8)
    begin = -memory.ctypes.data % LINE
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


def in_lines(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """The array, or a copy that begins at a cache line."""
    if array.ctypes.data % LINE == 0:
        return array
    copy = empty_lines(array.shape, array.dtype)
    copy[:] = array
    return copy


def _longer(array: npt.NDArray[Scalar], tokens: int, capacity: int) -> npt.NDArray[Scalar]:
    longer = empty_lines((array.shape[0], capacity, *array.shape[2:]), array.dtype)
    longer[:, :tokens] = array[:, :tokens]
    return longer
