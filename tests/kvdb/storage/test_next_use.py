"""What is expected next stays: a simulation of a cache that always evicts what is expected last."""

import pytest

from kvdb.storage.next_use import NextUse


def misses(asked, room):
    """How many of the layers that are asked, in this order, are not among the `room` that are kept."""
    uses, kept, missed = {}, set(), 0
    for now, layer in enumerate(asked, 1):
        use = uses.setdefault(layer, NextUse())
        if layer not in kept:
            missed += 1
            if len(kept) == room:
                kept.remove(max(kept, key=lambda one: uses[one].expected(now)))
            kept.add(layer)
        use.used(now)
    return missed


@pytest.mark.parametrize(("layers", "room"), [(8, 2), (8, 5), (32, 8), (32, 31)])
def test_in_a_circle_all_but_one_of_those_kept_are_found(layers, room):
    """Least recently used would miss every one; the best that is possible misses (layers - room) / (layers - 1) of them."""
    rounds = 20
    warm = misses(list(range(layers)) * rounds, room) - misses(range(layers), room)
    best = (rounds - 1) * layers * (layers - room) / (layers - 1)
    assert warm <= 1.15 * best + layers


def test_one_pass_over_many_layers_displaces_no_circle():
    circle = list(range(6))
    before = misses(circle * 10, 7)
    assert misses(circle * 10 + list(range(100, 130)) + circle, 7) - before <= 30 + 2


def test_a_circle_that_ended_makes_room_for_another():
    first, second = list(range(6)), list(range(100, 106))
    alone = misses(second * 30, 7)
    assert misses(first * 10 + second * 30, 7) <= len(first) + alone + 6 * len(second)


def test_what_was_read_ahead_is_expected_now():
    used, ahead = NextUse(), NextUse()
    used.used(1)
    used.used(3)
    ahead.wanted = True
    assert ahead.expected(4) < used.expected(4)
    ahead.used(5)
    assert not ahead.wanted
    assert ahead.expected(5) > used.expected(5)
