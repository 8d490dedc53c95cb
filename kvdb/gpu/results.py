"""What comes back of a step: everything in one tensor, and in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from kvdb.attention.away import Answer
from kvdb.attention.state import AttentionState, merge
from kvdb.gpu.device import Device
from kvdb.gpu.side import FLAT, AwayPart
from kvdb.gpu.staging import Buffer
from kvdb.storage.slot import BOUND_TOKENS, FORMATS, SlotLayout
from kvdb.types import Float32, ModelSpec

Found = Sequence[tuple[int, AwayPart]]
"""The searches of one launch: of which session, and what of it."""


@dataclass(frozen=True)
class Rows:
    """Of one launch, views of one float32 tensor. out: `[rows, q_heads, head_dim]`. lse, missed, missed_bound: `[rows, q_heads]`.
    counts: `[rows, kv_heads]`, tokens that were attended."""

    out: torch.Tensor
    lse: torch.Tensor
    missed: torch.Tensor
    missed_bound: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, flat: torch.Tensor, rows: int, spec: ModelSpec) -> "Rows":
        """The views of a tensor of `floats(rows, spec)`."""
        heads = (rows, spec.q_heads)
        shapes = [(*heads, spec.head_dim), heads, heads, heads, (rows, spec.kv_heads)]
        parts = flat.split([int(np.prod(shape)) for shape in shapes])
        return cls(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))

    @staticmethod
    def floats(rows: int, spec: ModelSpec) -> int:
        return rows * (spec.q_heads * (spec.head_dim + 3) + spec.kv_heads)


class Results:
    """Of a step of several sessions. whole: the rows of what is read whole, one a session; searched: of each launch of searches.

    exact_tokens: of each session, what is read whole beside its tail. searches: what each launch searches.
    """

    def __init__(
        self, device: Device, spec: ModelSpec, layout: SlotLayout, exact_tokens: Sequence[int], searches: Sequence[Found]
    ) -> None:
        """Inside `at_work`."""
        self._device = device
        self._spec = spec
        self._key_nbytes = layout.head_dim * FORMATS[layout.format]
        self._exact_tokens = exact_tokens
        self._searches = searches
        self._rows = [len(exact_tokens), *map(len, searches)]
        self._ends = list(accumulate(Rows.floats(rows, spec) for rows in self._rows))
        self._flat = device.tracked(torch.full((self._ends[-1],), -torch.inf, device=device.torch))
        self.whole, *self.searched = self._split(self._flat)
        self._buffer: Buffer | None = None
        self._tails: Sequence[int] = ()

    def send(self, tails: Sequence[int]) -> None:
        """Launch the copy to the host. tails: how many tokens of each session's tail were read. Inside `at_work`."""
        if self._buffer is not None:  # nobody waited for the last answers
            self._buffer.sent(self._device.query_stream)
        self._buffer = self._device.query_staging.take(4 * self._flat.numel())
        self._buffer.tensor.view(torch.float32).copy_(self._flat, non_blocking=True)
        self._event = self._device.query_stream.record_event()
        self._tails = tails

    def wait(self) -> list[Answer]:
        """The answer of each session, once they are there. After each `send` once. Raises CapacityError or GpuLost."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        with buffer:
            with self._device.watch():
                self._event.synchronize()
            whole, *searched = self._split(buffer.tensor.view(torch.float32).clone())
        return [self._answer(session, whole, searched) for session in range(self._rows[0])]

    def _split(self, flat: torch.Tensor) -> list[Rows]:
        begins = [0, *self._ends]
        return [Rows.of(flat[a:b], n, self._spec) for a, b, n in zip(begins, self._ends, self._rows, strict=False)]

    def _answer(self, session: int, whole: Rows, searched: Sequence[Rows]) -> Answer:
        tokens = self._exact_tokens[session] + self._tails[session]
        states = [_state(whole, session)]
        scanned = retrieved = float(tokens)
        nbytes = 2.0 * tokens * self._spec.kv_heads * self._key_nbytes
        missed, bounds = [], []
        for rows, found in zip(searched, self._searches, strict=True):
            for row, (of, part) in enumerate(found):
                if of == session:
                    states.append(_state(rows, row))
                    missed.append(_heads(rows.missed[row]))
                    bounds.append(_heads(rows.missed_bound[row]))
                    attended = float(rows.counts[row].sum())
                    scanned += part.span.tokens
                    retrieved += attended / self._spec.kv_heads
                    nbytes += self._looked_at(part) + 2 * attended * self._key_nbytes
        none = np.full((self._spec.q_heads, 1), -np.inf, np.float32)
        return Answer(merge(states), _sum([none, *missed]), _sum([none, *bounds]), scanned, retrieved, int(nbytes))

    def _looked_at(self, part: AwayPart) -> float:
        """Bytes of index pages: codes of half a byte a dimension with two factors, or two bounds of 16 bits a channel."""
        keys, dim = part.span.tokens * self._spec.kv_heads, self._spec.head_dim
        return keys * (dim / 2 + 4) if part.kind == FLAT else keys / BOUND_TOKENS * 4 * dim


def _state(rows: Rows, row: int) -> AttentionState:
    return AttentionState(rows.out[row].numpy()[:, None], _heads(rows.lse[row]))


def _heads(row: torch.Tensor) -> Float32:
    return np.asarray(row.numpy()[:, None], np.float32)


def _sum(logs: Sequence[Float32]) -> Float32:
    return np.asarray(np.logaddexp.reduce(np.stack(logs), axis=0), np.float32)
