"""A call that finds every region taken waits for one, in its turn, and only then goes over gRPC."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import kvdb.client.remote.shared_memory.lane as lane_module
import kvdb.client.remote.shared_memory.lanes as lanes
from kvdb.errors import Unavailable
from tests.waiting import until


class Lane:
    """A lane to nobody."""

    def __init__(self, path, *_: object) -> None:
        self.path = path
        self.broken = self.closed = self.gone = False
        self.waiting = 0
        self.rested = 0.0

    def alive(self) -> bool:
        return not self.gone

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.setattr(lanes, "SharedLane", Lane)
    server = lanes.LocalServer("path", b"first")
    return lanes.SharedLanes(server, lambda: server, "", "target", None)


def test_calls_have_lanes_in_the_order_of_their_coming(opened, monkeypatch):
    monkeypatch.setattr(lanes, "WAIT_SECONDS", 10.0)
    taken = [opened.take() for _ in range(lanes.LANES_MAX)]
    assert len(set(taken)) == lanes.LANES_MAX
    order = []
    with ThreadPoolExecutor(3) as threads:

        def call(number):
            lane = opened.take()
            order.append(number)
            opened.give_back(lane)

        for number in range(3):
            threads.submit(call, number)
            until(lambda: len(opened._waiting) == number + 1)  # noqa: B023
        opened.give_back(taken[0])
        until(lambda: len(order) == 3)
    assert order == [0, 1, 2]


def test_a_call_that_waits_too_long_goes_another_way(opened, monkeypatch):
    monkeypatch.setattr(lanes, "WAIT_SECONDS", 0.01)
    taken = [opened.take() for _ in range(lanes.LANES_MAX)]
    assert opened.take() is None
    assert not opened._waiting
    opened.give_back(taken[0])
    assert opened.take() is taken[0]


def test_a_broken_lane_makes_room_for_another(opened):
    taken = [opened.take() for _ in range(lanes.LANES_MAX)]
    taken[0].broken = True
    opened.give_back(taken[0])
    assert taken[0].closed
    assert opened.take() not in taken


def test_a_call_that_waits_opens_another_in_place_of_a_broken_lane(opened, monkeypatch):
    monkeypatch.setattr(lanes, "WAIT_SECONDS", 60.0)
    taken = [opened.take() for _ in range(lanes.LANES_MAX)]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(opened.take)
        until(lambda: opened._waiting)
        taken[0].broken = True
        opened.give_back(taken[0])
        assert waiting.result(timeout=10) not in taken


def test_closed_lanes_are_closed_when_they_come_back(opened):
    first, second = opened.take(), opened.take()
    opened.give_back(first)
    opened.close()
    assert first.closed
    assert not second.closed
    opened.give_back(second)
    assert second.closed
    assert opened.take() is None


def test_a_server_that_shares_no_more_is_asked_again_later(opened, monkeypatch):
    def refuse(*_):
        raise Unavailable("nobody answers")

    monkeypatch.setattr(lanes, "SharedLane", refuse)
    assert opened.take() is None
    assert opened.refusal == "nobody answers"
    monkeypatch.setattr(lanes, "SharedLane", Lane)
    assert opened.take() is None
    now = lanes.monotonic()
    monkeypatch.setattr(lanes, "monotonic", lambda: now + lanes.AGAIN_SECONDS)
    assert opened.take() is not None


def test_a_lane_whose_server_went_is_not_used_again(opened):
    first = opened.take()
    opened.give_back(first)
    assert opened.take() is first
    opened.give_back(first)
    first.gone = True
    second = opened.take()
    assert second is not first
    assert first.closed
    assert opened._count == 1


def test_a_server_that_came_back_is_asked_where_its_socket_is(monkeypatch):
    there = lanes.LocalServer("second", b"other")

    def open_lane(path, *_):
        if path != there.path:
            raise Unavailable("nobody answers")
        return Lane(path)

    monkeypatch.setattr(lanes, "SharedLane", open_lane)
    opened = lanes.SharedLanes(lanes.LocalServer("first", b"one"), lambda: there, "", "target", None)
    assert opened.take().path == "second"
    assert opened.refusal == ""


class LastWords:
    """A server that answers, and closes its end at once, between two looks of the client. Ring, region and socket in one."""

    def __init__(self):
        self.answer = None
        self.ring = self

    def receive(self, seconds):
        return self.answer

    def recv(self, nbytes):
        self.answer = b"the answer"
        return b""


def test_an_answer_that_came_as_the_server_left_is_heard(monkeypatch):
    monkeypatch.setattr(lane_module, "unpack_answer", bytes.decode)
    lane = object.__new__(lane_module.SharedLane)
    lane.region = lane._socket = LastWords()
    lane._target = "target"
    assert lane._next(5.0) == "the answer"
