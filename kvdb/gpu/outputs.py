"""The outputs of a step, which lie in one tensor and come back in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from kvdb.attention.device import Answer
from kvdb.attention.state import AttentionState, merge
from kvdb.attention.triton.finish import States
from kvdb.gpu.device import Device
from kvdb.gpu.interface import FLAT, DevicePart
from kvdb.gpu.staging import Buffer
from kvdb.storage.slot import BOUND_TOKENS, SLOT_FORMATS, SlotLayout
from kvdb.types import Float32, ModelSpec

SearchGroup = Sequence[tuple[int, DevicePart]]
"""The searches of one launch: for each row the number of its session, and the part that is searched."""


@dataclass(frozen=True)
class LaunchOutputs:
    """The outputs of one launch, views of one float32 tensor. out: `[rows, q_heads, head_dim]`. lse, missed, missed_bound:
    `[rows, q_heads]`. counts: `[rows, kv_heads]`, tokens that were attended."""

    out: torch.Tensor
    lse: torch.Tensor
    missed: torch.Tensor
    missed_bound: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, flat: torch.Tensor, rows: int, spec: ModelSpec) -> "LaunchOutputs":
        """The views of a flat tensor of `floats(rows, spec)` elements."""
        heads = (rows, spec.q_heads)
        shapes = [(*heads, spec.head_dim), heads, heads, heads, (rows, spec.kv_heads)]
        parts = flat.split([int(np.prod(shape)) for shape in shapes])
        return cls(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))

    @staticmethod
    def floats(rows: int, spec: ModelSpec) -> int:
        """How many floats the outputs of so many rows take."""
        return rows * (spec.q_heads * (spec.head_dim + 3) + spec.kv_heads)


class StepOutputs:
    """The outputs of a step of several sessions. exact: those of exact attention, one row a session. searched: those of each
    launch of searches. key_nbytes: of one key or value."""

    def __init__(
        self, device: Device, spec: ModelSpec, layout: SlotLayout, exact_tokens: Sequence[int], searches: Sequence[SearchGroup]
    ) -> None:
        """exact_tokens: tokens of each session that are read exactly, without its tail. searches: what each launch searches. Must
        be called inside `launching`."""
        self._device = device
        self._spec = spec
        self.key_nbytes = layout.head_dim * SLOT_FORMATS[layout.format]
        self._exact_tokens = exact_tokens
        self._searches = searches
        self._rows = [len(exact_tokens), *map(len, searches)]
        self._ends = list(accumulate(LaunchOutputs.floats(rows, spec) for rows in self._rows))
        self._flat = device.tracked(torch.full((self._ends[-1],), -torch.inf, device=device.torch))
        self.exact, *self.searched = self._split(self._flat)
        self._buffer: Buffer | None = None
        self._tails: Sequence[int] = ()

    def states(self) -> States:
        """The states of each session, for `kvdb.attention.triton.finish`. Must be called inside `launching`."""
        rows: list[list[list[int]]] = [[] for _ in self._exact_tokens]
        for outputs, owners in zip((self.exact, *self.searched), self._owners(), strict=True):
            for row, owner in enumerate(owners):
                parts = outputs.out, outputs.lse, outputs.missed, outputs.missed_bound, outputs.counts
                rows[owner].append([int(part[row].storage_offset()) for part in parts])
        firsts = [0, *accumulate(map(len, rows))]
        states = [state for session in rows for state in session]
        places, begins = (torch.tensor(numbers, dtype=torch.int32, device=self._device.torch) for numbers in (states, firsts))
        return States(self._flat, self._device.tracked(places), self._device.tracked(begins))

    def _owners(self) -> list[list[int]]:
        """The sessions of the rows of each launch."""
        return [list(range(len(self._exact_tokens))), *([owner for owner, _ in group] for group in self._searches)]

    def send(self, tails: Sequence[int]) -> None:
        """Launch the copy to the host. tails: tokens of each session's tail that were read. Must be called inside `launching`."""
        if self._buffer is not None:  # nobody waited for the last answers
            self._buffer.sent(self._device.query_stream)
        self._buffer = self._device.query_staging.take(4 * self._flat.numel())
        self._buffer.tensor.view(torch.float32).copy_(self._flat, non_blocking=True)
        self._event = self._device.query_stream.record_event()
        self._tails = tails

    def wait(self) -> list[Answer]:
        """The answer of each session, once it is there. To be called once after each `send`. Raises CapacityError or GpuLost."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        with buffer:
            with self._device.watch():
                self._event.synchronize()
            exact, *searched = self._split(buffer.tensor.view(torch.float32).clone())
        return [self._answer(session, exact, searched) for session in range(self._rows[0])]

    def _split(self, flat: torch.Tensor) -> list[LaunchOutputs]:
        begins = [0, *self._ends]
        return [LaunchOutputs.of(flat[a:b], n, self._spec) for a, b, n in zip(begins, self._ends, self._rows, strict=False)]

    def _answer(self, session: int, exact: LaunchOutputs, searched: Sequence[LaunchOutputs]) -> Answer:
        tokens = self._exact_tokens[session] + self._tails[session]
        states = [_state(exact, session)]
        scanned = retrieved = float(tokens)
        nbytes = 2.0 * tokens * self._spec.kv_heads * self.key_nbytes
        missed, bounds = [], []
        for outputs, group in zip(searched, self._searches, strict=True):
            for row, (owner, part) in enumerate(group):
                if owner == session:
                    states.append(_state(outputs, row))
                    missed.append(_heads(outputs.missed[row]))
                    bounds.append(_heads(outputs.missed_bound[row]))
                    attended = float(outputs.counts[row].sum())
                    scanned += part.span.tokens
                    retrieved += attended / self._spec.kv_heads
                    nbytes += self.index_nbytes(part) + 2 * attended * self.key_nbytes
        none = np.full((self._spec.q_heads, 1), -np.inf, np.float32)
        return Answer(merge(states), _log_sum([none, *missed]), _log_sum([none, *bounds]), scanned, retrieved, int(nbytes))

    def index_nbytes(self, part: DevicePart) -> float:
        """Bytes of index pages that a search reads: codes of half a byte a dimension with two factors, or two bounds of 16 bits a
        channel."""
        keys, dim = part.span.tokens * self._spec.kv_heads, self._spec.head_dim
        return keys * (dim / 2 + 4) if part.kind == FLAT else keys / BOUND_TOKENS * 4 * dim


def _state(outputs: LaunchOutputs, row: int) -> AttentionState:
    return AttentionState(outputs.out[row].numpy()[:, None], _heads(outputs.lse[row]))


def _heads(row: torch.Tensor) -> Float32:
    return np.asarray(row.numpy()[:, None], np.float32)


def _log_sum(logs: Sequence[Float32]) -> Float32:
    return np.asarray(np.logaddexp.reduce(np.stack(logs), axis=0), np.float32)
