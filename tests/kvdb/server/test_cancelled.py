"""A call that nobody waits for any more stops before its next step, and leaves nothing behind."""

import threading

import grpc
import numpy as np
import pytest

import kvdb
import kvdb.deadlines as deadlines
from kvdb import errors
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.session.layer import Layer
from tests.waiting import until

SECONDS_MAX = 20.0
SESSIONS = 4


def ones(*shape):
    return np.ones((*shape, 16), np.float32)


@pytest.fixture
def answers(monkeypatch):
    """Answers of layers: how many there were. The first is not done before the server knows that nobody waits for it."""
    answer = Layer.answer_prepared

    class Answers:
        begun = 0
        reached = threading.Event()

    def counted(self, *arguments):
        out = answer(self, *arguments)
        Answers.begun += 1
        if Answers.begun == 1:
            Answers.reached.set()
            until(left)
        return out

    monkeypatch.setattr(Layer, "answer_prepared", counted)
    return Answers


def left():
    """Whether the call that this thread answers is waited for no longer."""
    try:
        deadlines.check()
    except (errors.Cancelled, errors.DeadlineExceeded):
        return True
    return False


@pytest.fixture
def together(stub, spec):
    """A call on several sessions, none of which native code answers, and their ids."""
    ids = [stub.CreateSession(pb.CreateSessionRequest(spec=codec.to_spec(spec))).session_id for _ in range(SESSIONS)]
    request = pb.AttendTogetherRequest(session_ids=ids, layer=0, starts=[0] * SESSIONS)
    for message, heads in ((request.q, 4), (request.k, 2), (request.v, 2)):
        codec.put_array(message, ones(SESSIONS, heads, 2))
    return request


@pytest.mark.parametrize("why", ["cancelled", "expired"])
def test_a_step_of_several_sessions_stops_between_two(stub, together, answers, why):
    call = stub.AttendTogether.future(together, timeout=0.3 if why == "expired" else SECONDS_MAX)
    assert answers.reached.wait(SECONDS_MAX)
    if why == "cancelled":
        call.cancel()
    with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
        call.result()
    for name in together.session_ids:
        stub.Stats(pb.StatsRequest(session_id=name))  # which waits for its turn
    assert answers.begun == 1
    assert stub.AttendTogether(together).out.shape == [SESSIONS, 4, 2, 16]


@pytest.mark.parametrize(
    "bounds", [lambda: deadlines.within(1e-9), lambda: deadlines.answering(lambda: False)], ids=["late", "left"]
)
def test_embedded_calls_stop_at_the_same_steps(engine, spec, make_kv, bounds, blocks_used):
    kv = make_kv(spec, 20)
    session = engine.create_session(spec, np.empty(0, np.int32))
    writer = engine.begin_import(spec, kv.tokens, "doc")
    with bounds():
        for call in (
            lambda: session.attend(0, kv.q[0], *kv.pairs()[0], kvdb.QueryOptions()),
            lambda: writer.write(0, *kv.pairs()[0]),
            writer.commit,
        ):
            with pytest.raises((errors.DeadlineExceeded, errors.Cancelled)):
                call()
    session.attend(0, kv.q[0], *kv.pairs()[0], kvdb.QueryOptions(), 0)
    writer.abort()
    session.close()
    assert not blocks_used()


def test_a_call_within_another_has_no_more_time_than_that():
    with deadlines.within(60), deadlines.within(1e-9):
        pass
    with deadlines.within(1e-9), deadlines.within(60), pytest.raises(errors.DeadlineExceeded):
        deadlines.check()
    with deadlines.within(1e-9), deadlines.unbounded():
        deadlines.check()
    assert deadlines.remaining() is None
