"""How many streams a server carries, counted without one."""

from contextlib import ExitStack

import pytest

from kvdb.errors import CapacityError, Unavailable
from kvdb.server.streams import Streams


class Call:
    """The context of a call whose thread takes its time to end."""

    def __init__(self, client):
        self.client, self.cancelled = client, False

    def peer(self):
        return self.client

    def cancel(self):
        self.cancelled = True


@pytest.fixture
def threads():
    """The threads of streams, which hold them open until the test ends."""
    with ExitStack() as stack:
        yield stack


def test_a_stream_whose_session_has_ended_takes_no_room_though_its_thread_still_runs(threads):
    streams, call = Streams(streams_max=1, idle_seconds=60), Call("client")
    stream = threads.enter_context(streams.opened(call))
    stream.session = "session"
    with pytest.raises(CapacityError, match="as many as server.workers lets it"):
        threads.enter_context(streams.opened(Call("another")))
    streams.session_ended("session")
    assert call.cancelled
    with pytest.raises(Unavailable, match="open another"):
        streams.begin(stream)
    threads.enter_context(streams.opened(Call("client")))
    with pytest.raises(CapacityError):
        threads.enter_context(streams.opened(Call("another")))


def test_a_client_leaves_a_quarter_of_the_streams_to_others(threads):
    streams = Streams(streams_max=4, idle_seconds=60)
    for _ in range(3):
        threads.enter_context(streams.opened(Call("greedy")))
    with pytest.raises(CapacityError, match="the rest of server.workers is for others"):
        threads.enter_context(streams.opened(Call("greedy")))
    threads.enter_context(streams.opened(Call("modest")))
