"""What one step launches whose arrays lie on the device: tokens are stored, queries are answered, and what was seen is noted."""

from collections.abc import Iterator, Sequence

import torch

from kvdb.attention.triton.blocks import store
from kvdb.attention.triton.finish import NoteRows, finish
from kvdb.attention.triton.pages import TORCH, Pages
from kvdb.gpu.device import Device
from kvdb.gpu.launch import track_memory
from kvdb.gpu.outputs import StepOutputs
from kvdb.gpu.request import AttentionRequest
from kvdb.gpu.reread import Limits, Reread
from kvdb.gpu.scratch import Scratch
from kvdb.gpu.step_launches import StepLaunches
from kvdb.types import ModelSpec


class ResidentLaunches:
    """The tensors of such a step of some sessions of one model.

    q, out: `[sessions, q_heads, head_dim]`, the queries and their answers. kv: `[sessions, 2, kv_heads, head_dim]`, the tokens.
    judges: whether limits on what answers miss are kept.
    """

    def __init__(
        self,
        device: Device,
        scratch: Scratch,
        pages: Pages,
        spec: ModelSpec,
        requests: Sequence[AttentionRequest],
        note_rows: NoteRows,
        *,
        judges: bool,
    ) -> None:
        """Must be called inside `launching`."""
        self._pages = pages
        self._note_rows = note_rows
        self._launches = StepLaunches(device, scratch, pages, spec, requests)
        self._states = self._launches.outputs.states()
        self._reread = Reread(device, scratch, pages, spec, requests) if judges else None
        shape = len(requests), 2, spec.kv_heads, spec.head_dim
        self.judges = judges
        self.q = self._launches.q
        self.kv = torch.empty(shape, dtype=TORCH[spec.dtype], device=device.torch)
        self.out = torch.empty_like(self.q)
        track_memory(device, self)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `HoldsTensors`. Its parts count their own."""
        yield from (self.kv, self.out, self._note_rows.rows)

    @property
    def outputs(self) -> StepOutputs:
        """What its kernels write before it is merged."""
        return self._launches.outputs

    def follow(self, limits: Sequence[Limits]) -> bool:
        """Tell the device how many tokens the tails have, and where, and the limits of each session. Returns whether anything was
        made anew, so that what was captured is of the past. Must be called inside `launching`."""
        made = self._launches.follow_tails()
        if self._reread is not None:
            made |= self._reread.follow_tails()
            self._reread.limit(limits)
        return made

    def launch(self) -> None:
        """Launch everything. Nothing here depends on the host, so that it can be captured in a CUDA graph."""
        launches, batch, kv = self._launches, self._launches.batch, self.kv
        tails = batch.tails
        for i in range(len(kv)):
            store(self._pages, batch.last_slots(i), tails[i : i + 1], kv[i, 0][:, None], kv[i, 1][:, None])
        tails.add_(1)
        launches.launch()
        anew = None
        if self._reread is not None:
            self._reread.launch(self.q, self._states, tails)
            anew = self._reread.anew
        finish(self._states, self.q, kv, self.out, tails, self._note_rows, anew)
