"""The GPU tier keeps its books, its budget, and counts every byte; under the interpreter its slab is memory of the CPU."""

import gc
import logging

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvdb.config import StorageConfig
from kvdb.errors import CapacityError, GpuLost, IntegrityError
from kvdb.gpu.device import Device
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.gpu import GpuTier
from kvdb.storage.slot import SlotLayout
from kvdb.storage.store import BlockStore, Owners
from kvdb.types import ModelSpec

LAYOUT = SlotLayout("bfloat16", kv_heads=2, head_dim=16, block_size=16)
SPEC = ModelSpec("tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="bfloat16")
WIDE = ModelSpec("wide", layers=2, q_heads=4, kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.fixture
def device():
    return Device(torch.device("cpu"), "a card", 1 << 30)


@pytest.fixture
def tier(device):
    tier = GpuTier(LAYOUT, 10, device)
    yield tier
    tier.check_integrity()
    tier.close()


@pytest.fixture
def store(device):
    """The slabs of a configuration, on the device."""
    stores = []

    def make(**settings):
        stores.append(BlockStore(StorageConfig(block_size=16, **settings), device))
        return stores[-1]

    yield make
    for made in stores:
        made.close()


@pytest.mark.parametrize("overwrites", [True, False])
def test_slots_are_zeros_when_they_are_given_out_again(store, overwrites):
    tier = store(gpu_bytes_max=1 << 20, overwrite_freed=overwrites).slabs.tier(BlockLayout.of(SPEC.shape(0), 16))
    kept, freed = tier.allocate(2), tier.allocate(3)
    tier.slab.fill_(7)
    tier.release(freed)
    again = tier.allocate(3)
    assert sorted(again) == sorted(freed)
    assert bool(tier.slab[torch.from_numpy(again)].any()) is not overwrites
    assert (tier.slab[torch.from_numpy(kept)] == 7).all()
    tier.release(again)
    tier.release(kept)


def test_slots_are_zero_and_lie_where_their_addresses_say(tier):
    assert tier.slab.shape == (10, LAYOUT.nbytes)
    assert not tier.slab.any()
    blocks = tier.allocate(10)
    tier.slab[torch.from_numpy(blocks)] = torch.arange(10, dtype=torch.uint8)[:, None]
    base = int(tier.addresses(np.array([0]))[0])
    assert base == tier.slab.data_ptr()
    for block, address in zip(blocks, tier.addresses(blocks), strict=True):
        assert tier.slab.view(-1)[int(address) - base] == np.flatnonzero(blocks == block)[0]
    tier.release(blocks)


def test_what_is_asked_for_beyond_the_slab_is_an_error_and_takes_nothing(tier):
    held = tier.allocate(8)
    with pytest.raises(
        CapacityError, match="2 of its 10 slots free and 3 were asked for; let go of some, or raise storage.gpu_by"
    ):
        tier.allocate(3)
    assert (tier.free, tier.slots, tier.stats().blocks_used) == (2, 10, 8)
    tier.release(held)
    assert tier.free == 10


def test_a_lost_device_gives_no_slots_and_the_books_still_balance(tier, device):
    held = tier.allocate(2)
    device.lost = True
    with pytest.raises(GpuLost):
        tier.allocate(1)
    assert tier.stats().blocks_used == 2
    tier.release(held)
    tier.check_integrity([])
    with pytest.raises(IntegrityError, match="as many references as owners"):
        tier.check_integrity([held])


def test_copies_into_new_slots_wait_for_queries_that_were_launched(tier, device, monkeypatch):
    waits = []
    monkeypatch.setattr(device, "copies_after_queries", lambda: waits.append(tier.stats().blocks_used))
    tier.release(tier.allocate(3))
    assert waits == [3]


class Books(RuleBasedStateMachine):
    """Owners take, share, pin and return slots in any order."""

    def __init__(self):
        super().__init__()
        self.device = Device(torch.device("cpu"), "a card", 1 << 30)
        self.tier = GpuTier(LAYOUT, 40, self.device)
        self.owners = []

    @rule(count=st.integers(0, 30))
    def allocate(self, count):
        before = self.tier.free
        try:
            self.owners.append(self.tier.allocate(count))
        except CapacityError:
            assert self.tier.free == before < count

    @rule(data=st.data())
    def share(self, data):
        if self.owners:
            blocks = data.draw(st.sampled_from(self.owners))
            self.tier.retain(blocks)
            assert all(self.tier.shared(block) for block in blocks)
            self.owners.append(blocks)

    @rule(data=st.data())
    def give_back(self, data):
        if self.owners:
            self.tier.release(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @invariant()
    def books_balance(self):
        self.tier.check_integrity(self.owners)
        held = np.unique(np.concatenate([np.zeros(0, np.int64), *self.owners]))
        assert self.tier.stats().blocks_used == len(held) == self.tier.slots - self.tier.free

    def teardown(self):
        self.tier.close()
        assert self.device.tracked_nbytes == 0


TestBooks = Books.TestCase


def test_no_budget_means_no_gpu():
    store = BlockStore(StorageConfig())
    assert store.gpu_tier(SPEC) is None
    assert not [stats for stats in store.stats() if stats.name.startswith("gpu")]
    store.close()


def test_a_slab_takes_what_is_left_of_the_budget_and_specs_of_one_shape_share_it(store):
    blocks = store(gpu_bytes_max=100_000)
    tier = blocks.gpu_tier(SPEC)
    assert tier.layout == LAYOUT
    assert tier.slots == 100_000 // LAYOUT.nbytes
    twin = ModelSpec("twin", layers=7, q_heads=2, kv_heads=2, head_dim=16, dtype="bfloat16")
    assert blocks.gpu_tier(twin) is tier
    blocks.check_integrity(lambda: Owners([], []))


def test_several_slabs_share_the_budget_where_each_is_told_to_take_less(store, caplog):
    blocks = store(gpu_bytes_max=100_000, gpu_slab_bytes=40_000)
    first, second = blocks.gpu_tier(SPEC), blocks.gpu_tier(WIDE)
    assert first.slots == 40_000 // LAYOUT.nbytes
    assert second.slots == 40_000 // second.layout.nbytes
    huge = ModelSpec("huge", layers=1, q_heads=8, kv_heads=8, head_dim=128, dtype="float32")
    with caplog.at_level(logging.WARNING):
        assert blocks.gpu_tier(huge) is None
        assert blocks.gpu_tier(huge) is None
    assert [record.message for record in caplog.records if "8 KV heads of 128 stay on the CPU" in record.message] != []
    assert len(caplog.records) == 1


@pytest.mark.parametrize("form", ["float8", "int8"])
def test_a_quantised_format_makes_more_slots(store, form):
    plain, small = store(gpu_bytes_max=100_000).gpu_tier(WIDE), store(gpu_bytes_max=100_000, gpu_format=form).gpu_tier(WIDE)
    assert small.layout == SlotLayout.of(BlockLayout.of(WIDE.shape(0), 16), form)
    assert small.layout.quantised
    assert small.slots > plain.slots


def test_a_card_that_others_fill_leaves_blocks_on_the_cpu(store, monkeypatch, caplog):
    def spent(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 KiB")

    blocks = store(gpu_bytes_max=100_000)
    monkeypatch.setattr(torch, "zeros", spent)
    with caplog.at_level(logging.WARNING):
        assert blocks.gpu_tier(SPEC) is None
    assert "has no memory left" in caplog.text


def test_a_lost_device_has_no_tiers(store, device):
    blocks = store(gpu_bytes_max=100_000)
    assert blocks.gpu_tier(SPEC) is not None
    device.lost = True
    assert blocks.gpu_tier(SPEC) is None
    device.lost = False


def test_every_byte_is_counted_and_comes_back(store, device):
    blocks = store(gpu_bytes_max=100_000, gpu_slab_bytes=50_000)
    for spec in (SPEC, WIDE):
        blocks.gpu_tier(spec).allocate(2)
    table = device.tracked(torch.empty(123, dtype=torch.int32))
    device.staging.take(1000).unused()
    device.query_staging.take(1 << 17).unused()
    *slabs, beside = [stats for stats in blocks.stats() if stats.name.startswith("gpu")]
    assert [(slab.name, slab.blocks_used, slab.nbytes) for slab in slabs] == [
        ("gpu", 2, slab.blocks_total * slab.block_nbytes) for slab in slabs
    ]
    assert (beside.name, beside.nbytes, beside.pinned_nbytes) == ("gpu tables", 4 * 123, (1 << 16) + (1 << 17))
    assert sum(slab.nbytes for slab in slabs) + beside.nbytes == device.tracked_nbytes <= 100_000 + 4 * 123
    blocks.close()
    del table
    gc.collect()
    assert (device.tracked_nbytes, device.pinned_nbytes) == (0, 0)
