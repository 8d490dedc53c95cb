"""Attention of several last tokens of one session on the GPU, which reads everything."""

from dataclasses import replace

import numpy as np
import torch

from kvdb.attention.device import Answer
from kvdb.attention.state import AttentionState
from kvdb.attention.triton.pages import TORCH, Pages
from kvdb.attention.triton.prefill import prefill
from kvdb.gpu.device import Device
from kvdb.gpu.launch import launching
from kvdb.gpu.request import AttentionRequest, make_batch
from kvdb.gpu.scratch import Scratch
from kvdb.gpu.staging import Buffer
from kvdb.storage.slot import SLOT_FORMATS
from kvdb.types import Array, ModelSpec


class PrefillStep:
    """One call of n tokens, at most as many as the session's tail has, which must lie on the GPU."""

    def __init__(
        self, device: Device, scratch: Scratch, pages: Pages, spec: ModelSpec, request: AttentionRequest, q: Array
    ) -> None:
        """Launch the attention of q `[q_heads, n, head_dim]`. Raises CapacityError or GpuLost."""
        assert request.tail is not None
        request.tail.sync()
        exact = replace(request, parts=tuple(replace(part, kind=None) for part in request.parts))
        self._device = device
        self._q = q
        self._tokens = exact.exact_tokens + exact.tail_tokens
        self._nbytes = 2 * self._tokens * spec.kv_heads * spec.head_dim * SLOT_FORMATS[pages.layout.format]
        with launching(device, device.query_stream):
            with device.query_staging.take(q.nbytes) as buffer:
                buffer.array.view(q.dtype).reshape(q.shape)[:] = q
                there = buffer.tensor.to(device.torch, non_blocking=True, copy=True).view(TORCH[spec.dtype]).view(q.shape)
                buffer.sent(device.query_stream)
            out, lse = torch.empty_like(there), torch.empty(q.shape[:2], device=device.torch)
            prefill(there, pages, make_batch(scratch.partial, pages, spec, [exact]), spec.softmax_scale, out, lse)
            self._buffer: Buffer = device.query_staging.take(q.nbytes + 4 * lse.numel())
            self._buffer.tensor[: q.nbytes].copy_(out.view(torch.uint8).view(-1), non_blocking=True)
            self._buffer.tensor[q.nbytes :].copy_(lse.view(torch.uint8).view(-1), non_blocking=True)
            self._event = device.query_stream.record_event()

    def wait(self) -> list[Answer]:
        """The answer, once it is there. Raises CapacityError or GpuLost."""
        q = self._q
        with self._buffer as buffer:
            with self._device.watch():
                self._event.synchronize()
            out = buffer.array[: q.nbytes].view(q.dtype).reshape(q.shape).copy()
            lse = buffer.array[q.nbytes :].view(np.float32).reshape(q.shape[:2]).copy()
        none = np.full(lse.shape, -np.inf, np.float32)
        return [Answer(AttentionState(out, lse), none, none, self._tokens, self._tokens, self._nbytes)]
