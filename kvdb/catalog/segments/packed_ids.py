"""Token ids that are kept for long, in about half of the memory of int32, and compared with a prompt without being unpacked."""

from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from kvdb.types import Tokens

LOW_BITS = 16
COUNT_BYTES = 4
NIBBLE = 1 << 4
"""The bits above the low ones take a nibble a token where the ids are below 2**20, as those of every usual vocabulary are, two
bytes where they are not, and nothing where all ids are below 2**16."""
GALLOP = 256
"""How many tokens are compared first; then twice as many."""


class PackedIds:
    """Ids of n tokens. They are kept as bytes: the low 16 bits of each, and the bits above."""

    __slots__ = ("_high", "_high_bits", "_low")

    def __init__(self, tokens: Tokens) -> None:
        """tokens: int32 `[n]`, of ids that are not negative."""
        high = tokens >> LOW_BITS
        largest = int(high.max(initial=0))
        self._low = tokens.astype(np.uint16).tobytes()
        self._high_bits = 0 if not largest else 4 if largest < NIBBLE else 16
        self._high = b"" if not largest else _nibbles(high) if largest < NIBBLE else high.astype(np.uint16).tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """What `to_bytes` made. Raises ValueError for what it cannot have made."""
        n = int.from_bytes(content[:COUNT_BYTES], "little")
        packed, high_at = cls.__new__(cls), COUNT_BYTES + LOW_BITS // 8 * n
        packed._low, packed._high = content[COUNT_BYTES:high_at], content[high_at:]
        bits = {0: 0, 2 * n: 16, -(-n // 2): 4}
        if not n or len(packed._low) != LOW_BITS // 8 * n or len(packed._high) not in bits:
            raise ValueError(f"{len(content)} bytes are not the ids of {n} tokens")
        packed._high_bits = bits[len(packed._high)]
        return packed

    def to_bytes(self) -> bytes:
        """The number of tokens, uint32, the low 16 bits of each, uint16, and the bits above: nothing, a nibble each, the first in
        the low half of a byte, or uint16. At least one token."""
        return b"".join([len(self).to_bytes(COUNT_BYTES, "little"), self._low, self._high])

    def __len__(self) -> int:
        return len(self._low) // 2

    @property
    def first(self) -> int:
        """The id of the first token, of at least one."""
        return int(self.unpack(0, 1)[0])

    @property
    def nbytes(self) -> int:
        """The bytes of the ids."""
        return len(self._low) + len(self._high)

    def unpack(self, start: int = 0, stop: int | None = None) -> Tokens:
        """The ids of tokens [start, stop), int32; None for all behind `start`."""
        end = len(self) if stop is None else stop
        ids = np.frombuffer(self._low, np.uint16)[start:end].astype(np.int32)
        if self._high_bits == 16:
            ids |= np.frombuffer(self._high, np.uint16)[start:end].astype(np.int32) << LOW_BITS
        elif self._high_bits:
            packed = np.frombuffer(self._high, np.uint8)[start // 2 : -(-end // 2)]
            high = np.stack([packed & (NIBBLE - 1), packed >> 4], axis=1).reshape(-1)[start % 2 :][: end - start]
            ids |= high.astype(np.int32) << LOW_BITS
        return ids

    def begins(self, prompt: "Prompt", at: int, n: int) -> bool:
        """Whether the first n tokens are those of a prompt from token `at` on, which has as many."""
        if self._low[: 2 * n] != prompt.low[2 * at : 2 * (at + n)]:
            return False
        if self._high_bits == 16:
            return self._high[: 2 * n] == prompt.high[2 * at : 2 * (at + n)]
        if not self._high_bits:
            return not prompt.high[2 * at : 2 * (at + n)].strip(b"\0")
        if prompt.nibbles is None:
            return np.array_equal(self.unpack(0, n), prompt.tokens[at : at + n])
        whole, first = n // 2, at // 2
        same = self._high[:whole] == prompt.nibbles[at % 2][first : first + whole]
        return same and (n % 2 == 0 or self._high[whole] % NIBBLE == int(prompt.tokens[at + n - 1]) >> LOW_BITS)

    def common(self, prompt: "Prompt", at: int, limit: int) -> int:
        """How many of the first `limit` tokens are those of a prompt from token `at` on."""
        n = min(limit, len(prompt.tokens) - at)
        if self.begins(prompt, at, n):
            return n
        same, more = 0, GALLOP
        while self.begins(prompt, at, min(more, n)):
            same, more = min(more, n), 2 * more
        more = min(more, n)
        differ = self.unpack(same, more) != prompt.tokens[at + same : at + more]
        return same + int(differ.argmax())


class Prompt:
    """Token ids, int32 `[n]`, as packed ones are compared with; they are made ready when the first of these is.

    low, high: the low 16 bits of each and the bits above, as uint16. nibbles: the bits above, packed from token 0 on and from
    token 1 on; None where one takes more.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    @cached_property
    def low(self) -> bytes:
        return self.tokens.astype(np.uint16).tobytes()

    @cached_property
    def high(self) -> bytes:
        return (self.tokens >> LOW_BITS).astype(np.uint16).tobytes()

    @cached_property
    def nibbles(self) -> tuple[bytes, bytes] | None:
        high = self.tokens >> LOW_BITS
        return (_nibbles(high), _nibbles(high[1:])) if int(high.max(initial=0)) < NIBBLE else None


def _nibbles(high: npt.NDArray[np.int32]) -> bytes:
    """Two numbers below 16 to a byte, the first in its low half."""
    even = np.zeros(-(-len(high) // 2) * 2, np.uint8)
    even[: len(high)] = high
    return (even[0::2] | even[1::2] << 4).tobytes()
