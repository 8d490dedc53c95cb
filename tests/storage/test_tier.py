"""The CPU tier keeps its books whatever is taken and given back."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvdb.errors import CapacityError, IntegrityError
from kvdb.storage.cpu import CpuBudget, CpuTier

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
    first.allocate(1)
    with pytest.raises(CapacityError):
        second.allocate(1)
    first.close()
    assert len(second.allocate(1)) == 1
    second.close()


def test_a_reference_without_an_owner_is_found():
    tier = CpuTier(BLOCK, 1 << 20, CpuBudget(None))
    blocks = tier.allocate(3)
    tier.check_integrity([blocks])
    with pytest.raises(IntegrityError, match="as many references as owners"):
        tier.check_integrity([blocks[:2]])
    tier.close()


@pytest.mark.parametrize("wrong", ["release", "retain", "pin"])
def test_using_a_free_block_is_our_bug(wrong):
    tier = CpuTier(BLOCK, 1 << 20, CpuBudget(None))
    blocks = tier.allocate(1)
    tier.release(blocks)
    with pytest.raises(AssertionError):
        getattr(tier, wrong)(blocks)
    tier.close()


class Books(RuleBasedStateMachine):
    """Owners take, share, pin and return blocks in any order."""

    def __init__(self):
        super().__init__()
        self.tier = CpuTier(BLOCK, 1 << 20, CpuBudget(3 << 20))
        self.owners = []
        self.pinned = []

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

    @rule(data=st.data())
    def pin_and_unpin(self, data):
        if self.owners:
            blocks = data.draw(st.sampled_from(self.owners))
            self.tier.pin(blocks)
            self.tier.unpin(blocks)

    @invariant()
    def books_balance(self):
        self.tier.check_integrity(self.owners)
        held = np.unique(np.concatenate([np.zeros(0, np.int64), *self.owners]))
        assert self.tier.stats().blocks_used == len(held)

    def teardown(self):
        self.tier.close()


TestBooks = Books.TestCase
