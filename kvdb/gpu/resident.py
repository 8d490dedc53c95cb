"""Decode steps whose arrays lie on the device: the token is appended there, its query is answered there, and the answer stays.

Nothing is copied to main memory, and nobody waits. What a step shows, and the tokens themselves, reach main memory when the host
next asks for them (`ResidentLayer.take`): then it is also found out whether a step was given numbers that are not finite.
"""

from collections.abc import Sequence
from typing import Any
from weakref import finalize, ref

import numpy as np
import torch

from kvdb.attention.exact import AttentionStats
from kvdb.attention.resident import StepsOnDevice
from kvdb.attention.triton.blocks import load
from kvdb.attention.triton.finish import NoteRows
from kvdb.attention.triton.pages import TORCH, Pages
from kvdb.gpu.device import Device
from kvdb.gpu.graph import CapturedStep
from kvdb.gpu.launch import launching, lock_of
from kvdb.gpu.notes import Noted, StepNotes
from kvdb.gpu.request import AttentionRequest
from kvdb.gpu.reread import Limits
from kvdb.gpu.resident_launches import ResidentLaunches
from kvdb.gpu.scratch import Scratch
from kvdb.gpu.streams import DeviceEvent
from kvdb.gpu.tail import TailMirror
from kvdb.storage.tier import Blocks
from kvdb.types import Array, Float32, ModelSpec

TAKEN_TOKENS = 256
"""Tokens that come to main memory at a time."""
MEASURED_EVERY = 16
"""One step of so many is measured, from the third on: the first is compiled, the second captured."""
NO_SLOTS: Blocks = np.zeros(0, np.int64)


class ResidentLayer:
    """Implements `kvdb.attention.resident.ResidentSteps`; all tokens that the layer has lie on the device."""

    def __init__(
        self, device: Device, scratch: Scratch, pages: Pages, spec: ModelSpec, request: AttentionRequest, notes: StepNotes
    ) -> None:
        """Raises CapacityError or GpuLost."""
        assert request.tail is not None
        self.device = device
        self.scratch = scratch
        self.pages = pages
        self.spec = spec
        self.request = request
        self.notes = notes
        self.tail: TailMirror = request.tail
        self.limits = Limits()
        self.row = notes.take()
        finalize(self, notes.give, self.row)
        self.last_step: tuple[ResidentStep, int] | None = None
        self._kept: list[torch.Tensor] = []
        self._alone: ResidentStep | None = None

    @property
    def limited(self) -> bool:
        """Whether its answers may miss something, and not everything."""
        return self.limits.any and any(part.kind is not None for part in self.request.parts)

    def begin(self, steps: int, guards: Float32 | None, ranges: Float32 | None, bound: float) -> None:
        """See `ResidentSteps.begin`."""
        known = self.limits
        if guards is not known.guards or ranges is not known.ranges or bound != known.bound:
            self.limits = Limits(guards, bound, ranges)
        self.tail.sync()
        self.tail.reserve(self.tail.length + steps)
        self._kept.clear()
        with launching(self.device, self.device.query_stream):
            self.notes.reset(self.row)
        if self._alone is None or not self._alone.judges([self]):
            self._alone = ResidentStep([self], stacked=False)

    def attend(self, q: Any, k: Any, v: Any) -> Any | None:
        """See `ResidentSteps.attend`."""
        assert self._alone is not None
        return self._alone.attend(q, k, v) if self._alone.takes(q, k, v) else None

    def keep_query(self) -> None:
        """See `ResidentSteps.keep_query`."""
        with launching(self.device, self.device.query_stream):
            self._kept.append(self._last_query().clone())

    def take(self, steps: int) -> StepsOnDevice:
        """See `ResidentSteps.take`."""
        device, tail = self.device, self.tail
        begin = tail.tokens - steps
        with launching(device, device.query_stream):
            noted = self.notes.read(self.row)
            good = max(0, min(steps, noted.first_bad - 1 - begin))
            pairs = []
            for at in range(begin, begin + good, TAKEN_TOKENS):
                k, v = load(self.pages, tail.device_slots(), at, min(TAKEN_TOKENS, begin + good - at))
                pairs.append((self._to_host(k), self._to_host(v)))
            queries = [self._to_host(q) for q in (*self._kept, self._last_query())]
            self._kept.clear()
            self.notes.reset(self.row)
            if good < steps:
                noted = Noted(noted.first_bad)  # what was summed is not finite either
            assert self.last_step is not None
            stats = self._stats(begin, good, noted, self.last_step[0].seconds())
        tail.tokens = begin + good
        return StepsOnDevice(good, pairs, queries[:-1], queries[-1], stats, failed=good < steps)

    def _last_query(self) -> torch.Tensor:
        assert self.last_step is not None
        step, number = self.last_step
        return step.launches.q[number, :, None]

    def _to_host(self, x: torch.Tensor) -> Array:
        """The tensor in the spec's dtype in main memory, once it is there. Must be called inside `launching`."""
        dtype = self.spec.numpy_dtype
        with self.device.query_staging.take(x.numel() * dtype.itemsize) as buffer:
            buffer.tensor.view(TORCH[self.spec.dtype]).view(x.shape).copy_(x.to(TORCH[self.spec.dtype]))
            self.device.query_stream.synchronize()
            return buffer.array.view(dtype).reshape(x.shape).copy()

    def _stats(self, begin: int, steps: int, noted: Noted, seconds: float) -> AttentionStats:
        """The statistics of these steps, the first of which found `begin` tokens in the tail. seconds: of the last."""
        assert self._alone is not None
        spec, request, outputs = self.spec, self.request, self._alone.launches.outputs
        whole = steps * request.exact_tokens + sum(range(begin + 1, begin + steps + 1))
        searched = [part for part in request.parts if part.kind is not None]
        index = sum(outputs.index_nbytes(part) for part in searched)
        return AttentionStats(
            scanned=whole + steps * sum(part.span.tokens for part in searched),
            retrieved=whole + noted.attended / spec.kv_heads,
            nbytes=int(2 * (whole * spec.kv_heads + noted.attended) * outputs.key_nbytes + steps * index),
            kernel_ns=int(1e9 * steps * seconds),
            missed=noted.missed / spec.q_heads,
            missed_bound=noted.bound / spec.q_heads,
            missed_bound_max=noted.bound_max,
        )


class ResidentStep:
    """A step of some layers of sessions of one model, made once and used for one token after the other.

    stacked: whether callers hand in arrays with a dimension for the sessions. It does not keep the layers, which keep it: memory
    of a card should not wait for a collection of garbage.
    """

    def __init__(self, layers: Sequence[ResidentLayer], *, stacked: bool) -> None:
        """Raises CapacityError or GpuLost."""
        first, n = layers[0], len(layers)
        self._layers = [ref(layer) for layer in layers]
        self._device = device = first.device
        self._lock = lock_of(device, device.query_stream)
        with launching(device, device.query_stream):
            rows = torch.tensor([layer.row for layer in layers], dtype=torch.int32, device=device.torch)
            self.launches = ResidentLaunches(
                device,
                first.scratch,
                first.pages,
                first.spec,
                [layer.request for layer in layers],
                NoteRows(rows, first.notes.first_bad, first.notes.sums),
                judges=any(layer.limited for layer in layers),
            )
        made = self.launches
        own = made.q, made.kv[:, 0], made.kv[:, 1], made.out
        *self._targets, self._answer = (x[:, :, None] if stacked else x[0, :, None] for x in own)
        self._shapes = [target.shape for target in self._targets]
        self._step = CapturedStep(made.launch, device.query_stream)
        self._watch = device.stopwatch()
        self._asked: DeviceEvent | None = None
        self._answered: DeviceEvent | None = None
        self._number = 0
        self._tokens, self._slots, self._limits = [-1] * n, [NO_SLOTS] * n, [layer.limits for layer in layers]

    def judges(self, layers: Sequence[ResidentLayer]) -> bool:
        """Whether it holds what these layers' answers may miss against their limits, or they have none."""
        return self.launches.judges or not any(layer.limited for layer in layers)

    def takes(self, *arrays: Any) -> bool:
        """Whether q, k and v are such tensors on this device as a step takes."""
        where, dtype = self._device.torch, self._answer.dtype
        for x, shape in zip(arrays, self._shapes, strict=True):
            if not isinstance(x, torch.Tensor) or x.shape != shape or x.dtype != dtype or x.device != where or x.requires_grad:
                return False
        return True

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append the token of each session, and answer its query. It is done behind what the caller's stream holds, and before
        what the caller launches later. Raises CapacityError or GpuLost."""
        device, own, measured = self._device, self._device.query_stream, self._number % MEASURED_EVERY == 2
        layers = [layer for layer in (known() for known in self._layers) if layer is not None]
        with self._lock, device.watch():
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            caller = device.callers_stream()
            self._asked = caller.record_event(self._asked)
            with device.on(own):
                own.wait_event(self._asked)
                if not self._knows_tails(layers):
                    self._follow(layers)
                torch._foreach_copy_(self._targets, [q, k, v], non_blocking=True)
                if measured:
                    self._watch.start(own)
                self._step()
                if measured:
                    self._watch.stop(own)
                out.copy_(self._answer)
                self._answered = own.record_event(self._answered)
            caller.wait_event(self._answered)
        self._number += 1
        for number, layer in enumerate(layers):
            layer.tail.tokens += 1
            layer.last_step = self, number
            self._tokens[number] += 1
        return out

    def seconds(self) -> float:
        """What the last step that was measured took each session, once it is done."""
        return self._watch.seconds() / len(self._layers)

    def _knows_tails(self, layers: Sequence[ResidentLayer]) -> bool:
        """Whether the device knows by its own steps what the tails have, and all limits."""
        for layer, tokens, slots, limits in zip(layers, self._tokens, self._slots, self._limits, strict=True):
            if layer.tail.tokens != tokens or layer.tail.slots is not slots or layer.limits is not limits:
                return False
        return True

    def _follow(self, layers: Sequence[ResidentLayer]) -> None:
        """Tell the device what the tails have, and the limits."""
        self._limits = [layer.limits for layer in layers]
        if self.launches.follow(self._limits):
            self._step.reset()
        self._tokens, self._slots = [layer.tail.tokens for layer in layers], [layer.tail.slots for layer in layers]
