"""Every policy counts what it holds, and evicts each entry once and never what is pinned; each kind goes in its own order."""

import weakref

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvdb.config.storage import EVICTIONS
from kvdb.storage.eviction.lru import Lru
from kvdb.storage.eviction.policies import policy
from kvdb.storage.eviction.reuse import Reuse

KINDS = [Lru, Reuse]
KEYS = st.integers(0, 9)


class Machine(RuleBasedStateMachine):
    """A policy under any calls, beside a dictionary of sizes and one of pins."""

    kind = Lru

    def __init__(self):
        super().__init__()
        self.policy, self.sizes, self.pins = self.kind(), {}, {}

    @rule(key=KEYS, nbytes=st.integers(0, 5))
    def touch(self, key, nbytes):
        self.policy.touch(key, nbytes)
        self.sizes[key] = nbytes

    @rule(key=KEYS)
    def pin(self, key):
        if key in self.sizes:
            self.policy.pin(key)
            self.pins[key] = self.pins.get(key, 0) + 1

    @rule(key=KEYS)
    def unpin(self, key):
        self.policy.unpin(key)
        self.pins[key] = max(self.pins.get(key, 0) - 1, 0)

    @rule(key=KEYS)
    def forget(self, key):
        self.policy.forget(key)
        self.sizes.pop(key, None)
        self.pins.pop(key, None)

    @rule(capacity=st.integers(0, 20))
    def make_room(self, capacity):
        while self.policy.nbytes > capacity and (key := self.policy.evict()) is not None:
            assert not self.pins.get(key)
            del self.sizes[key]  # a key twice is a KeyError
        assert self.policy.nbytes <= capacity or all(self.pins.get(key) for key in self.sizes)

    @invariant()
    def it_holds_what_came_and_did_not_leave(self):
        assert len(self.policy) == len(self.sizes)
        assert all(key in self.policy and self.policy.size(key) == nbytes for key, nbytes in self.sizes.items())
        assert self.policy.nbytes == sum(self.sizes.values())
        assert {key for key in self.sizes if self.policy.pinned(key)} == {key for key, pins in self.pins.items() if pins}


for one in KINDS:
    globals()[f"Test{one.__name__}"] = type(f"{one.__name__}Machine", (Machine,), {"kind": one}).TestCase


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_pinned_stays_and_goes_when_it_is_not(kind):
    held = kind()
    for key in "abc":
        held.touch(key, 1)
        held.pin(key)
    assert held.evict() is None
    held.unpin("b")
    assert held.evict() == "b"
    assert held.evict() is None


@pytest.mark.parametrize("kind", KINDS)
@given(keys=st.permutations(range(6)))
def test_entries_that_were_used_once_go_in_the_order_in_which_they_came(kind, keys):
    held = kind()
    for key in keys:
        held.touch(key, 1)
    assert [held.evict() for _ in keys] == keys
    assert held.nbytes == 0


@given(touched=st.lists(KEYS, min_size=1))
def test_lru_goes_by_the_last_use(touched):
    held = Lru()
    for key in touched:
        held.touch(key, 1)
    by_last_use = sorted(set(touched), key=lambda key: -touched[::-1].index(key))
    assert [held.evict() for _ in by_last_use] == by_last_use


def test_what_is_used_again_and_again_outlives_a_scan():
    held, often = Reuse(), ["a", "b"]
    for _ in range(4):
        for key in often:
            held.touch(key, 1)
    for key in range(100):
        held.touch(key, 1)
        if held.nbytes > 10:
            assert held.evict() not in often
        if not key % 8:
            for used in often:
                held.touch(used, 1)


def test_a_policy_is_made_by_the_name_of_a_setting():
    assert [type(policy(name)) for name in EVICTIONS] == [Reuse, Lru, type(None)]


class Entry:
    """A key that can be seen to be gone."""


@pytest.mark.parametrize("kind", KINDS)
def test_what_left_is_not_kept_alive(kind):
    entries, policy = [Entry() for _ in range(50)], kind()
    for _ in range(2):
        for entry in entries:
            policy.touch(entry, 1)
    gone = [weakref.ref(entry) for entry in entries[5:]]
    for entry in entries[5:]:
        policy.forget(entry)
    del entries[5:], entry
    assert sum(one() is not None for one in gone) <= 5
    for entry in entries:
        policy.forget(entry)
    assert not any(one() for one in gone)
