"""The CPU tier keeps its books whatever is taken and given back."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvdb.errors import CapacityError, IntegrityError
from kvdb.storage.budget import CpuBudget
from kvdb.storage.cpu import CpuTier

BLOCK = 4096


def test_blocks_are_distinct_and_do_not_overlap():
    tier = CpuTier(BLOCK, 1 << 20, CpuBudget(None))
    addresses = np.sort(tier.addresses(tier.allocate(1000)))
    assert (np.diff(addresses) >= BLOCK).all()
    tier.close()


def test_a_spent_budget_is_a_typed_error_and_takes_nothing():
    tier = CpuTier(BLOCK, 1 << 20, CpuBudget(10 * BLOCK))
    held = tier.allocate(8)
    with pytest.raises(CapacityError, match="cpu_bytes_max=40960"):
        tier.allocate(3)
    assert tier.stats().blocks_used == 8
    assert len(tier.allocate(2)) == 2
    tier.release(held)
    tier.check_integrity()
    tier.close()


def test_tiers_of_one_database_share_the_budget():
    budget = CpuBudget(1 << 20)
    first, second = CpuTier(BLOCK, 1 << 20, budget), CpuTier(2 * BLOCK, 1 << 20, budget)
    held = first.allocate(255)
    with pytest.raises(CapacityError):
        second.allocate(1)
    first.release(held)
    assert len(second.allocate(128)) == 128
    with pytest.raises(CapacityError):
        first.allocate(1)
    first.close()
    second.close()


def test_a_budget_spent_by_one_size_of_block_serves_the_next():
    budget = CpuBudget(64 << 20)
    tiers = [CpuTier(size, 8 << 20, budget) for size in (BLOCK, 3 * BLOCK, 5 * BLOCK)]
    for tier in 2 * tiers:
        count = (64 << 20) // tier.block_nbytes - 1
        blocks = tier.allocate(count)
        for other in tiers:
            assert other.stats().blocks_used == (count if other is tier else 0)
            other.check_integrity([blocks] if other is tier else [])
        tier.release(blocks)
    for tier in tiers:
        tier.close()


def test_a_few_blocks_of_many_sizes_fit_into_a_small_budget():
    budget = CpuBudget(64 << 20)
    tiers = [CpuTier(BLOCK * factor, 64 << 20, budget) for factor in range(1, 25)]
    for tier in tiers:
        tier.allocate(2)
    assert sum(tier.stats().nbytes for tier in tiers) <= 64 << 20
    for tier in tiers:
        tier.close()


def test_what_nobody_uses_goes_back_to_the_system_but_for_a_spare(monkeypatch):
    monkeypatch.setattr("kvdb.storage.cpu.SPARE_BYTES_MAX", 8 << 20)
    tier = CpuTier(BLOCK, 4 << 20, CpuBudget(None))
    held = [tier.allocate(1024) for _ in range(16)]
    nbytes = tier.stats().nbytes
    assert nbytes >= 64 << 20
    for blocks in held[1:]:
        tier.release(blocks)
    assert tier.stats().nbytes <= 12 << 20  # what is held, and the spare
    tier.check_integrity(held[:1])
    again = tier.allocate(3000)
    tier.check_integrity([held[0], again])
    assert len(np.unique(tier.addresses(np.concatenate([held[0], again])))) == 4024
    tier.close()


def test_a_tier_that_lacks_room_for_all_takes_nothing():
    tier = CpuTier(BLOCK, 1 << 20, CpuBudget(8 << 20))
    held = tier.allocate(1000)
    nbytes = tier.stats().nbytes
    with pytest.raises(CapacityError):
        tier.allocate(2000)
    assert tier.stats().nbytes <= nbytes
    assert len(tier.allocate(1048)) == 1048
    tier.release(held)
    tier.close()


def test_a_reference_without_an_owner_is_found():
    tier = CpuTier(BLOCK, 1 << 20, CpuBudget(None))
    blocks = tier.allocate(3)
    tier.check_integrity([blocks])
    with pytest.raises(IntegrityError, match="as many references as owners"):
        tier.check_integrity([blocks[:2]])
    tier.close()


@pytest.mark.parametrize("wrong", ["release", "retain"])
def test_using_a_free_block_is_our_bug(wrong):
    tier = CpuTier(BLOCK, 1 << 20, CpuBudget(None))
    blocks = tier.allocate(1)
    tier.release(blocks)
    with pytest.raises(AssertionError):
        getattr(tier, wrong)(blocks)
    tier.close()


class Books(RuleBasedStateMachine):
    """Owners take, share and return blocks in any order."""

    def __init__(self):
        super().__init__()
        self.tier = CpuTier(BLOCK, 1 << 20, CpuBudget(3 << 20))
        self.owners = []

    @rule(count=st.integers(0, 300))
    def allocate(self, count):
        before = self.tier.stats().blocks_used
        try:
            self.owners.append(self.tier.allocate(count))
        except CapacityError:
            assert self.tier.stats().blocks_used == before

    @rule(data=st.data())
    def share(self, data):
        if self.owners:
            blocks = data.draw(st.sampled_from(self.owners))
            self.tier.retain(blocks)
            self.owners.append(blocks)

    @rule(data=st.data())
    def give_back(self, data):
        if self.owners:
            blocks = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
            self.tier.release(blocks)

    @invariant()
    def books_balance(self):
        self.tier.check_integrity(self.owners)
        held = np.unique(np.concatenate([np.zeros(0, np.int64), *self.owners]))
        assert self.tier.stats().blocks_used == len(held)

    def teardown(self):
        self.tier.close()


TestBooks = Books.TestCase
