"""The GPU of one database: its memory, what is copied there, and what it answers."""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from threading import Lock
from weakref import WeakSet

from kvdb.attention.away import Away
from kvdb.attention.moves import Moves
from kvdb.catalog.segment import Segment
from kvdb.errors import CapacityError, GpuLost, KvdbError
from kvdb.gpu.asked import Asked
from kvdb.gpu.away import GpuAway, Once, Under
from kvdb.gpu.decoding import Decoding
from kvdb.gpu.device import Device
from kvdb.gpu.filling import Filler
from kvdb.gpu.mirror import Mirror, Mirrors
from kvdb.gpu.scratch import Scratch
from kvdb.gpu.side import TIER, AwayPart, TailSlots
from kvdb.gpu.tail import TailCopy
from kvdb.storage.slot import SlotLayout
from kvdb.storage.store import BlockStore
from kvdb.storage.table import BlockTable
from kvdb.storage.tier import Blocks
from kvdb.types import Array, ModelSpec
from query_optimizer.cost import GpuMachine
from query_optimizer.facts import FastMemory

TOGETHER_MAX = 64
"""Steps of several sessions whose tables are kept: of a model's layers, for one batch or two."""


class Gpu:
    """See `kvdb.gpu.side.GpuSide`. Thread-safe. device and blocks are closed by who opened them."""

    def __init__(self, device: Device, blocks: BlockStore, machine: GpuMachine) -> None:
        self.device = device
        self.machine = machine
        self.mirrors = Mirrors(blocks.loader, Filler(device))
        self._scratch = Scratch(device)
        self._blocks = blocks
        self._tails: WeakSet[TailCopy] = WeakSet()
        self._together: OrderedDict[tuple[int, ...], tuple[list[GpuAway], Decoding]] = OrderedDict()
        self._lock = Lock()

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
        return FastMemory(TIER, tokens * spec.token_nbytes, self.machine.host_bytes_s)

    def away(self, spec: ModelSpec, parts: Sequence[AwayPart], moves: Moves | None, tail: TailSlots | None) -> GpuAway:
        assert tail is None or isinstance(tail, TailCopy)
        tier = self._blocks.gpu_tier(spec)
        assert tier is not None
        return GpuAway(self.device, self._scratch, tier, spec, Asked(tuple(parts), moves, tail), self.failed)

    def launch(self, aways: Sequence[Away], q: Array) -> list[Under]:
        steps = [away for away in aways if isinstance(away, GpuAway)]
        assert len(steps) == len(aways)
        first = steps[0]
        with self._lock:
            # Strong references to the steps keep their ids from being given to others.
            key = tuple(map(id, steps))
            _, step = self._together.pop(key, (steps, None))
            try:
                step = step or Decoding(first.device, first.scratch, first.pages, first.spec, [away.asked for away in steps])
                step.launch(q)
            except (CapacityError, GpuLost) as error:
                raise first.broken(error) from error
            self._together[key] = steps, step
            if len(self._together) > TOGETHER_MAX:
                self._together.popitem(last=False)
        once = Once(step.wait)
        return [Under(away, once, number) for number, away in enumerate(steps)]

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
        self._together.clear()
        self.mirrors.close()
