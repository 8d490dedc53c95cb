"""The GPU of one database: its memory, what is copied there, and what it answers."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakSet

from kvdb.attention.moves import Moves
from kvdb.catalog.segment import Segment
from kvdb.errors import GpuLost, KvdbError
from kvdb.gpu.away import GpuAway
from kvdb.gpu.decoding import Asked
from kvdb.gpu.device import Device
from kvdb.gpu.filling import Filler
from kvdb.gpu.mirror import Mirror, Mirrors
from kvdb.gpu.side import TIER, AwayPart, TailSlots
from kvdb.gpu.tail import TailCopy
from kvdb.storage.slot import SlotLayout
from kvdb.storage.store import BlockStore
from kvdb.storage.table import BlockTable
from kvdb.storage.tier import Blocks
from kvdb.types import ModelSpec
from query_optimizer.cost import GpuMachine
from query_optimizer.facts import FastMemory

log = logging.getLogger(__name__)


class Gpu:
    """See `kvdb.gpu.side.GpuSide`. Thread-safe. device and blocks are closed by who opened them."""

    def __init__(self, device: Device, blocks: BlockStore, machine: GpuMachine) -> None:
        self.device = device
        self.machine = machine
        self.mirrors = Mirrors(blocks.loader, Filler(device))
        self._blocks = blocks
        self._tails: WeakSet[TailCopy] = WeakSet()

    @property
    def version(self) -> int:
        return self.mirrors.version

    def keep(self, spec: ModelSpec, segment: Segment) -> None:
        tier = self._blocks.gpu_tier(spec)
        if tier is not None:
            self.mirrors.keep(tier, segment)

    def mirror(self, segment: Segment) -> Mirror | None:
        return self.mirrors.of(segment)

    def tail(self, spec: ModelSpec, table: BlockTable) -> TailCopy | None:
        tier = self._blocks.gpu_tier(spec)
        if tier is None:
            return None
        copy = TailCopy(self.device, self.mirrors, tier, table)
        self._tails.add(copy)
        return copy

    def memory(self, spec: ModelSpec) -> FastMemory | None:
        """Free is what one layer may have, all layers having as much."""
        tier = self._blocks.gpu_tier(spec)
        if tier is None:
            return None
        tokens = tier.free // spec.layers * tier.layout.block_size
        return FastMemory(TIER, tokens * spec.token_nbytes, self.machine.transfer_bytes_s)

    def away(self, spec: ModelSpec, parts: Sequence[AwayPart], moves: Moves | None, tail: TailSlots | None) -> GpuAway:
        assert tail is None or isinstance(tail, TailCopy)
        tier = self._blocks.gpu_tier(spec)
        assert tier is not None
        return GpuAway(self.device, tier, spec, Asked(tuple(parts), moves, tail), self.failed)

    def failed(self, error: KvdbError) -> None:
        """A query got no answer; queries go on on the CPU, all of them where the device is lost."""
        if isinstance(error, GpuLost):
            self.mirrors.forget()

    def owned(self) -> dict[SlotLayout, list[Blocks]]:
        owned: defaultdict[SlotLayout, list[Blocks]] = defaultdict(list)
        for tier, slots in self.mirrors.owned():
            owned[tier.layout].append(slots)
        for tail in list(self._tails):
            owned[tail.layout].append(tail.slots)
        return owned

    def close(self) -> None:
        self.mirrors.close()
