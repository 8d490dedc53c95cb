"""The GPU of one database: its memory, the copies that lie there, and the queries that it answers."""

from collections import defaultdict
from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch

from kvdb.attention.device import DeviceAttention, TailSlots
from kvdb.attention.resident import ResidentSteps
from kvdb.blend.rope_shift import RopeShifts
from kvdb.catalog.segments.segment import Segment
from kvdb.errors import CapacityError, GpuLost, KvdbError
from kvdb.gpu.decoding import DecodeStep
from kvdb.gpu.device import Device
from kvdb.gpu.interface import TIER, DevicePart
from kvdb.gpu.layer_attention import LayerAttention, PendingAnswer, SharedAnswers
from kvdb.gpu.mirror import Mirror, Mirrors
from kvdb.gpu.notes import StepNotes
from kvdb.gpu.request import AttentionRequest
from kvdb.gpu.resident import ResidentLayer, ResidentStep
from kvdb.gpu.scratch import Scratch
from kvdb.gpu.step_cache import StepCache
from kvdb.gpu.tail import TailMirror
from kvdb.gpu.upload import Uploader
from kvdb.storage.block_table import BlockTable
from kvdb.storage.slot import SlotLayout
from kvdb.storage.store import BlockStore
from kvdb.storage.tier import Blocks
from kvdb.types import Array, ModelSpec
from query_optimizer.cost import GpuMachine
from query_optimizer.facts import FastMemory

BATCHED_STEPS_MAX = 256
"""How many steps of several sessions are kept for use again: those of all layers of a model, for one batch or two."""


class GpuBackend:
    """Implements `kvdb.gpu.interface.GpuInterface`. Thread-safe. Whoever opened device and blocks closes them."""

    def __init__(self, device: Device, blocks: BlockStore, machine: GpuMachine) -> None:
        self.device = device
        self.machine = machine
        self.mirrors = Mirrors(blocks.loader, Uploader(device))
        self._scratch = Scratch(device)
        self._blocks = blocks
        self._tails: WeakSet[TailMirror] = WeakSet()
        self._tails_lock = Lock()
        self._batched_steps: StepCache[LayerAttention, DecodeStep] = StepCache(BATCHED_STEPS_MAX)
        self._resident_steps: StepCache[ResidentLayer, ResidentStep] = StepCache(BATCHED_STEPS_MAX)
        self._notes: StepNotes | None = None
        self._lock = Lock()

    @property
    def version(self) -> int:
        return self.mirrors.version

    def prefetch(self, spec: ModelSpec, segment: Segment) -> None:
        tier = self._blocks.gpu_tier(spec)
        if tier is not None:
            self.mirrors.prefetch(tier, segment)

    def mirror(self, segment: Segment) -> Mirror | None:
        return self.mirrors.get(segment)

    def mirror_tail(self, spec: ModelSpec, table: BlockTable) -> TailMirror | None:
        tier = self._blocks.gpu_tier(spec)
        if tier is None:
            return None
        mirror = TailMirror(self.device, self.mirrors, tier, table)
        with self._tails_lock:
            self._tails.add(mirror)
        return mirror

    def memory(self, spec: ModelSpec) -> FastMemory | None:
        """See GpuInterface. Free memory is divided equally among the layers."""
        tier = self._blocks.gpu_tier(spec)
        if tier is None:
            return None
        tokens = tier.free // spec.layers * tier.layout.block_size
        return FastMemory(TIER, tokens * spec.token_nbytes, self.machine.host_bytes_s)

    def layer_attention(
        self, spec: ModelSpec, parts: Sequence[DevicePart], rope_shifts: RopeShifts | None, tail: TailSlots | None
    ) -> LayerAttention:
        assert tail is None or isinstance(tail, TailMirror)
        tier = self._blocks.gpu_tier(spec)
        assert tier is not None
        request = AttentionRequest(tuple(parts), rope_shifts, tail)
        return LayerAttention(self.device, self._scratch, tier, spec, request, self.on_failure)

    def launch(self, layers: Sequence[DeviceAttention], q: Array) -> list[PendingAnswer]:
        own = [layer for layer in layers if isinstance(layer, LayerAttention)]
        assert len(own) == len(layers)
        first = own[0]
        requests = [layer.request for layer in own]
        with self._lock:
            try:
                step = self._batched_steps.get(
                    own, lambda: DecodeStep(first.device, first.scratch, first.pages, first.spec, requests)
                )
                step.launch(q)
            except (CapacityError, GpuLost) as error:
                self._batched_steps.drop(own)
                raise first.device_failed(error) from error
        answers = SharedAnswers(step.wait)
        return [PendingAnswer(layer, answers, number) for number, layer in enumerate(own)]

    def holds(self, array: Any) -> bool:
        return isinstance(array, torch.Tensor) and array.device == self.device.torch

    def resident(self, layer: DeviceAttention) -> ResidentLayer | None:
        assert isinstance(layer, LayerAttention)
        with self._lock:
            self._notes = self._notes or StepNotes(self.device)
        return layer.resident(self._notes)

    def attend_resident(self, layers: Sequence[ResidentSteps], q: Any, k: Any, v: Any) -> torch.Tensor | None:
        own = [layer for layer in layers if isinstance(layer, ResidentLayer)]
        assert len(own) == len(layers)
        with self._lock:
            step = self._resident_steps.get(own, lambda: ResidentStep(own, stacked=True))
            if not step.judges(own):
                self._resident_steps.drop(own)
                step = self._resident_steps.get(own, lambda: ResidentStep(own, stacked=True))
            return step.attend(q, k, v) if step.takes(q, k, v) else None

    def on_failure(self, error: KvdbError) -> None:
        """A query got no answer from the device. Where the device is lost, all copies are given up."""
        if isinstance(error, GpuLost):
            self.mirrors.drop_all()

    def held_segments(self) -> list[Segment]:
        return self.mirrors.held_segments()

    def owned(self) -> dict[SlotLayout, list[Blocks]]:
        owned: defaultdict[SlotLayout, list[Blocks]] = defaultdict(list)
        for tier, slots in self.mirrors.owned():
            owned[tier.layout].append(slots)
        with self._tails_lock:
            tails = list(self._tails)
        for tail in tails:
            owned[tail.layout].append(tail.slots)
        return owned

    def close(self) -> None:
        self._batched_steps.clear()
        self._resident_steps.clear()
        self._notes = None
        self.mirrors.close()
