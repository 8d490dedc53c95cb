"""The queue at the engine's door: every call is served once, tenants alike, neighbours together, and it has an end."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.errors import CapacityError
from kvdb.server.admission.fair_queue import NEIGHBOURS_MAX, FairQueue, Work

TENANTS = "abc"
TOKENS_MAX = 50

works = st.builds(
    Work, st.sampled_from(TENANTS), st.integers(1, TOKENS_MAX), st.one_of(st.none(), st.sampled_from([("doc", 0), ("doc", 1)]))
)
steps = st.lists(st.one_of(works, st.just("pop"), st.just("done")), max_size=80)


@given(steps)
def test_every_item_is_served_once_and_in_the_order_of_its_group(commands):
    queue, pushed, served, running = FairQueue(1000), [], [], []
    for number, command in enumerate(commands):
        if isinstance(command, Work):
            queue.push(command, (number, command))
            pushed.append((number, command))
        elif command == "pop" and (item := queue.pop()) is not None:
            served.append(item)
            running.append(item[1])
        elif command == "done" and running:
            queue.done(running.pop())
        assert len(queue) == len(pushed) - len(served)
    while (item := queue.pop()) is not None:
        served.append(item)
    assert sorted(served) == sorted(pushed)
    for tenant in TENANTS:
        for group in {work.group for _, work in pushed}:
            alike = [number for number, work in served if (work.tenant, work.group) == (tenant, group)]
            assert alike == sorted(alike)


@given(st.lists(st.lists(st.integers(1, TOKENS_MAX), min_size=30, max_size=60), min_size=2, max_size=3))
def test_tenants_that_always_wait_are_served_alike(tokens):
    queue: FairQueue[Work] = FairQueue(1000)
    for tenant, sizes in zip(TENANTS, tokens, strict=False):
        for size in sizes:
            work = Work(tenant, size)
            queue.push(work, work)
    left = Counter({tenant: len(sizes) for tenant, sizes in zip(TENANTS, tokens, strict=False)})
    served = dict.fromkeys(left, 0)
    while all(left.values()):
        work = queue.pop()
        queue.done(work)
        served[work.tenant] += work.tokens
        left[work.tenant] -= 1
        assert max(served.values()) - min(served.values()) <= 2 * TOKENS_MAX


@given(st.integers(1, 40), st.integers(1, TOKENS_MAX))
def test_who_was_away_saves_nothing_up(count, size):
    queue: FairQueue[str] = FairQueue(1000)
    for _ in range(count):
        work = Work("there", size)
        queue.start(work)
    assert queue.counter("there") == count * size
    queue.push(Work("back", size), "back")
    assert queue.counter("back") == count * size, "a tenant that comes begins where the others are"
    queue.push(Work("there", size), "there")
    assert [queue.pop(), queue.pop()] == ["back", "there"]


def test_who_comes_to_an_empty_queue_begins_where_the_last_left_it():
    queue: FairQueue[str] = FairQueue(10)
    work = Work("a", 30)
    queue.start(work)
    queue.done(work)
    queue.start(Work("b", 1))
    assert queue.counter("b") == 31


def test_neighbours_go_together_but_not_for_ever():
    queue: FairQueue[str] = FairQueue(1000)
    queue.push(Work("a", 1, "x"), "x0")
    queue.push(Work("a", 1, "y"), "y0")
    for number in range(1, 2 * NEIGHBOURS_MAX):
        queue.push(Work("a", 1, "x"), f"x{number}")
    served = [queue.pop() for _ in range(2 * NEIGHBOURS_MAX + 1)]
    assert served[:NEIGHBOURS_MAX] == [f"x{number}" for number in range(NEIGHBOURS_MAX)]
    assert served[NEIGHBOURS_MAX] == "y0"


def test_it_has_an_end_and_says_what_changes_it():
    queue: FairQueue[int] = FairQueue(2)
    for number in range(2):
        queue.push(Work("a", 5), number)
    with pytest.raises(CapacityError, match=r"server\.queue_max"):
        queue.push(Work("b", 5), 2)
    assert len(queue) == 2
    assert [queue.pop(), queue.pop(), queue.pop()] == [0, 1, None]


def test_what_is_due_is_not_counted_as_served():
    queue: FairQueue[str] = FairQueue(10)
    queue.push(Work("a", 5, due=1.0), "late")
    queue.push(Work("a", 7, due=3.0), "in time")
    queue.push(Work("a", 9, due=1.5), "late too")
    assert queue.expired(1.2) == ["late"]
    assert [queue.pop(2.0), queue.counter("a")] == ["in time", 7]
    assert [queue.pop(2.0), queue.counter("a")] == ["late too", 7]


def test_an_item_that_is_taken_out_is_not_served():
    queue: FairQueue[str] = FairQueue(10)
    first, second = Work("a"), Work("a")
    queue.push(first, "first")
    queue.push(second, "second")
    assert queue.remove(first, "first")
    assert not queue.remove(first, "first")
    assert [queue.pop(), queue.pop()] == ["second", None]
