"""What proofs and builds may take of the time of steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.indexing.background_time import FIRST_STEPS, SEATS, BackgroundTime, StepClock


class Now:
    """A clock that the test sets."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


class Layer:
    """Whoever wants a seat, or takes steps."""


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def time(now):
    return BackgroundTime(now)


@given(
    st.floats(0.001, 0.5),
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 2.0)), min_size=1, max_size=60),
)
def test_no_32_steps_pay_for_more_than_3_percent(step_seconds, work):
    """work: so many steps, and then work that takes so much of what may be saved up. What takes longer is another thing."""
    now = Now()
    time = BackgroundTime(now)
    clock = StepClock(time, layers=1, clock=now)
    clock.look(1)
    spent = []  # what was taken before each step
    for steps, share in work:
        for _ in range(steps):
            now.seconds += step_seconds
            clock.look(1)
            spent.append(0.0)
        seconds = min(share, 1.0) * 0.02 * 16 * step_seconds
        if time.allows(seconds):
            time.spend(seconds)
            spent[-1] += seconds
    for first in range(len(spent)):
        assert sum(spent[first : first + 32]) <= 0.03 * 32 * step_seconds * (1 + 1e-9)


def test_work_that_takes_longer_than_can_be_saved_is_paid_for_afterwards(now, time):
    clock = StepClock(time, layers=1, clock=now)
    taken = []
    for number in range(1000):
        clock.look(1)
        now.seconds += 0.1
        if time.allows(0.5):
            time.spend(0.5)
            taken.append(number)
    assert 2 <= len(taken) <= 1000 * 0.1 * 0.02 / 0.5 + 1


def test_nothing_is_counted_while_nobody_steps(now, time):
    assert not time.stepping()
    time.spend(100)
    clock = StepClock(time, layers=1, clock=now)
    for _ in range(20):
        clock.look(1)
        now.seconds += 0.1
    assert time.stepping()
    assert time.allows(0.01)


def test_a_session_that_ends_steps_no_longer(now, time):
    clocks = [StepClock(time, layers=2, clock=now) for _ in range(2)]
    for _ in range(3):
        for clock in clocks:
            clock.look(1)
        now.seconds += 1
    clocks[0].close()
    assert time.stepping(), "another does"
    clocks[1].close()
    assert not time.stepping()


def test_a_session_that_is_waited_for_steps_no_longer(now, time):
    clock = StepClock(time, layers=1, clock=now)
    for _ in range(3):
        clock.look(1)
        now.seconds += 0.1
    assert time.stepping()
    now.seconds += 0.2
    assert not time.stepping()


def test_a_session_steps_until_its_next_look(now, time):
    clock = StepClock(time, layers=1, clock=now)
    assert (clock.until_next(32), clock.until_next(1)) == (FIRST_STEPS, 1), "nothing was measured yet"
    for _ in range(3):
        clock.look(1)
        now.seconds += 0.1
    assert clock.until_next(32) == 32
    now.seconds += 3.2
    assert time.stepping(), "32 steps of 0.1 s are on their way"
    now.seconds += 4
    assert not time.stepping()


def test_a_session_that_has_nothing_to_look_for_is_known_to_go_on(now, time):
    clock = StepClock(time, layers=1, clock=now)
    for _ in range(3):
        clock.look(1)
        now.seconds += 0.1
    for _ in range(10):
        steps = clock.until_next(1 << 20)
        now.seconds += 0.1 * steps
        assert time.stepping()
        clock.look(steps)


def test_a_prompt_is_not_to_be_disturbed(now, time):
    clock = StepClock(time, layers=1, clock=now)
    clock.busy()
    assert time.stepping()
    now.seconds += 100
    assert not time.stepping()


def test_builds_come_behind_proofs_that_are_due(now, time):
    clock = StepClock(time, layers=1, clock=now)
    for _ in range(3):
        clock.look(1)
        now.seconds += 0.1
    assert not time.claims(0.1, again_in=0.4)
    for _ in range(40):
        clock.look(1)
        assert not time.allows_build(0.001), "a proof waits"
        assert time.claims(0.02, again_in=0.4) == time.allows(0.02)
        if time.allows(0.02):
            break
        now.seconds += 0.1
    now.seconds += 1
    clock.look(10)
    assert time.allows_build(0.001), "nobody asked for it again"


def test_few_sit_at_once(now, time):
    layers = [Layer() for _ in range(SEATS + 2)]
    assert [time.seats(layer) for layer in layers] == SEATS * [True] + 2 * [False]
    assert time.seats(layers[0])
    time.leave(layers[1])
    assert time.seats(layers[-1])
    assert not time.seats(layers[-2])
    layers.pop(0)
    assert time.seats(layers[-2]), "one that is gone leaves its seat"


def test_who_asks_no_longer_loses_the_seat(now, time):
    layers = [Layer() for _ in range(SEATS + 1)]
    for layer in layers:
        time.seats(layer)
    now.seconds += 100
    assert time.seats(layers[-1])
