"""The tiers of one database, one pool for each size of block."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from time import sleep
from typing import TYPE_CHECKING, NamedTuple

import kvdb.codecs.registry as codecs
from kvdb.config import StorageConfig
from kvdb.errors import CapacityError, IntegrityError, InvalidArgument
from kvdb.selectors.registry import SELECTORS
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import CpuBudget
from kvdb.storage.buffer_pool import BufferPool
from kvdb.storage.cpu import CpuTier
from kvdb.storage.disk import DiskTier
from kvdb.storage.home import Home
from kvdb.storage.loader import Loader
from kvdb.storage.paged import PagedTier
from kvdb.storage.segment_folder import SegmentFolder
from kvdb.storage.segment_store import SegmentStore
from kvdb.storage.slabs import Slabs
from kvdb.storage.slot import SlotLayout
from kvdb.storage.store_folder import StoreFolder
from kvdb.storage.stored_segment import StoredSegment
from kvdb.storage.temporary_folder import TemporaryFolder
from kvdb.storage.tier import Blocks
from kvdb.storage.token_scores import TokenScores, scored
from kvdb.types import ModelSpec, TierStats

if TYPE_CHECKING:
    from kvdb.storage.gpu import DeviceMemory, GpuTier


CHECKS = 3
CHECKS_MAX = 100
CHECK_SECONDS = 0.01
"""An error counts if CHECKS checks in a row show it. There are at most CHECKS_MAX checks, CHECK_SECONDS apart."""


class Owners(NamedTuple):
    """Everything that holds blocks: tables in main memory, what is stored on disk, slots on the GPU by their layout (None without
    one)."""

    tables: Sequence[BlockTable]
    stored: Sequence[StoredSegment]
    slots: Mapping[SlotLayout, Sequence[Blocks]] | None = None


def segment_store(home: Home) -> SegmentStore:
    """The store for the segments of a database: files in its folder. home: is closed with it."""
    return SegmentFolder(home)


class BlockStore:
    """Makes block tables; specs whose blocks have the same size share a pool. Thread-safe.

    folder: of a durable database, None for one that keeps nothing. disk: the segments in it, or in storage.disk_path;
    None without either. loader: loads segments from there. slabs: the tiers of the GPU, None without
    one. budget: the budget of main memory, for the CPU tiers and everything stored beside their blocks.
    """

    def __init__(self, config: StorageConfig, gpu: "DeviceMemory | None" = None) -> None:
        """gpu: the device that `kvdb.gpu.opening.open_gpu` opened; the store closes it. Raises Unavailable for a folder that
        cannot be used, and for a durable one what `StoreFolder` raises."""
        self._config = config
        self.folder = StoreFolder(Path(config.path)) if config.path else None
        home = self.folder or (TemporaryFolder(Path(config.disk_path)) if config.disk_path else None)
        self.disk = None if home is None else DiskTier(segment_store(home), config.disk_bytes_max)
        self.disk_bytes_max = config.disk_bytes_max
        self.slabs = None if gpu is None else Slabs(config, gpu)
        self.budget = CpuBudget(config.cpu_bytes_max)
        self.loader = Loader(BufferPool(self.budget, config.selector_share if config.selector else 0.0))
        self._selector = SELECTORS[config.selector] if config.selector else None
        self._tiers: dict[int, CpuTier] = {}
        self._lock = Lock()

    def tables(self, spec: ModelSpec, format: str = "") -> list[BlockTable]:  # noqa: A002  # the field's name
        """An empty table for each entry of `spec.kept`, of blocks in that format (see `BlockLayout`). Takes no blocks."""
        layouts = [BlockLayout.of(one.shape, self._config.block_size).in_format(format) for one in spec.kept]
        searched = [one.what == "kv" and not one.shape.window for one in spec.kept]
        return [BlockTable(self._tier(layout), layout, searched=use) for layout, use in zip(layouts, searched, strict=True)]

    def format_of(self, asked: str | None) -> str:
        """The format of new segments: the one that is asked for, None for `storage.format`. Raises InvalidArgument where blocks
        cannot have it."""
        name = self._config.format if asked is None else asked
        multiple = codecs.CODECS[name].block_tokens
        if self._config.block_size % multiple:
            raise InvalidArgument(
                f"format={name!r} needs blocks of a multiple of {multiple} tokens; storage.block_size is "
                f"{self._config.block_size}"
            )
        return name

    def encode(self, tables: list[BlockTable], layer: int, format: str) -> None:  # noqa: A002  # the field's name
        """Have a layer's table, which is to be stored, scored and replaced by one of the same tokens in that format, if it is not
        yet. Raises CapacityError and InvalidArgument; then it is as it was."""
        table = tables[layer]
        self._score(layer, table)
        layout = table.layout.in_format(format)
        if layout == table.layout:
            return
        tables[layer] = table.encoded(self._tier(layout), layout)
        tables[layer].scores, table.scores = table.scores, None
        table.release()

    def _score(self, layer: int, table: BlockTable) -> None:
        """Give its tokens the scores of `storage.selector`, where there is one, and room for them."""
        if self._selector is not None and table.scores is None and table.searched:
            values = scored(self._selector, layer, table.layout, table.addresses, table.length)
            with suppress(CapacityError):  # only the tokens must be kept
                table.scores = TokenScores(self._selector.name, values, self.budget)

    def _tier(self, layout: BlockLayout) -> CpuTier:
        with self._lock:
            tier = self._tiers.get(layout.nbytes)
            if tier is None:
                tier = self._tiers[layout.nbytes] = CpuTier(
                    layout.nbytes, self._config.arena_bytes, self.budget, overwrites=self._config.overwrite_freed
                )
            return tier

    def gpu_tier(self, spec: ModelSpec) -> "GpuTier | None":
        """The tier for copies of a model's blocks, opened at the first call; None without a GPU that can hold them,
        and for a model whose layers differ."""
        if self.slabs is None or not spec.uniform:
            return None
        return self.slabs.tier(BlockLayout.of(spec.shape(0), self._config.block_size))

    def stats(self) -> list[TierStats]:
        on_gpu = [] if self.slabs is None else self.slabs.stats()
        on_disk = [] if self.disk is None else self.disk.stats()
        return on_gpu + [tier.stats() for tier in self._cpu_tiers()] + on_disk

    def used_nbytes(self) -> int:
        """The bytes of all used blocks, in main memory and on disk."""
        return sum(tier.blocks_used * tier.block_nbytes for tier in self.stats() if tier.name in {"cpu", "disk"})

    def check_integrity(self, find_owners: Callable[[], Owners]) -> None:
        """Raises IntegrityError unless `find_owners` returns exactly the owners of everything that is used.

        Owners may come and go meanwhile, and an owner may already be gone from its place while it still holds blocks. So the
        check is repeated as long as anything changes, and an error counts when it is seen CHECKS times in a row.
        """
        seen = 0
        for _ in range(CHECKS_MAX):
            changes = self._changes()
            try:
                self._check(find_owners())
            except IntegrityError as error:
                seen = seen + 1 if changes == self._changes() else 0
                wrong = error
            else:
                return
            if seen == CHECKS:
                break
            sleep(CHECK_SECONDS)
        raise wrong

    def close(self) -> None:
        self.loader.close()
        if self.slabs is not None:
            self.slabs.close()
        if self.disk is not None:
            self.disk.close()
        for tier in self._cpu_tiers():
            tier.close()

    def _cpu_tiers(self) -> list[CpuTier | PagedTier]:
        with self._lock:
            return [*self._tiers.values(), *self.loader.pool.tiers]

    def _check(self, owners: Owners) -> None:
        for tier in self._cpu_tiers():
            tier.check_integrity([table.blocks for table in owners.tables if table.tier is tier])
        if self.slabs is not None:
            self.slabs.check_integrity(owners.slots)
        if self.disk is not None:
            self.disk.check_integrity(owners.stored)

    def _changes(self) -> int:
        return sum(part.changes for part in (*self._cpu_tiers(), self.slabs, self.disk) if part is not None)
