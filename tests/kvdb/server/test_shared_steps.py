"""A token's attend through shared memory, by native code at both ends, is the attend of the session."""

import gc
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kvdb
import kvdb._native as _native
from kvdb import errors
from kvdb.client.arrays import to_numpy
from kvdb.client.client import Client
from kvdb.rpc.shared_records import ARENA_AT, REGION_BYTES, CallKind, SharedAnswer, pack_answer, unpack_answer, unpack_request
from kvdb.server.shared_memory.prepared import PreparedAttend
from tests.waiting import until

STORED, STEPS = 40, 150


@pytest.fixture
def server(serve):
    return serve(local_socket="auto")


@pytest.fixture
def sessions(server, engine, spec, make_kv):
    """A session through shared memory, and one of the engine itself, over the same context."""
    kv, local = make_kv(spec, STORED), Client(engine)
    local.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    with (
        kvdb.connect(server.target) as db,
        db.create_session(spec, kv.tokens) as remote,
        local.create_session(spec, kv.tokens) as embedded,
    ):
        yield remote, embedded


@pytest.fixture
def prepared(monkeypatch):
    """What `PreparedAttend.answer` returned, or raised."""
    said, answer = [], PreparedAttend.answer

    def seen(self, calls):
        try:
            said.append(answer(self, calls))
        except errors.KvdbError as error:
            said.append(type(error))
            raise
        return said[-1]

    monkeypatch.setattr(PreparedAttend, "answer", seen)
    return said


def token(spec, rng, tensors=False):
    arrays = [rng.standard_normal((h, 1, spec.head_dim)).astype(spec.numpy_dtype) for h in (spec.q_heads, *[spec.kv_heads] * 2)]
    return [torch.from_numpy(array) for array in arrays] if tensors else arrays


@pytest.mark.parametrize("tensors", [False, True])
def test_it_is_the_attend_of_the_session(sessions, spec, rng, prepared, tensors):
    remote, embedded = sessions
    for i in range(STEPS):
        q, k, v = token(spec, rng, tensors)
        out = remote.attend(0, q, k, v, start=STORED + i if i % 3 else None)
        assert type(out) is type(q)
        np.testing.assert_array_equal(to_numpy(out), to_numpy(embedded.attend(0, q, k, v)))
    assert prepared == [True] * (STEPS - 1)
    assert replace(remote.stats(), kernel_seconds=0) == replace(embedded.stats(), kernel_seconds=0)


def test_an_error_is_told_and_the_next_step_goes_on(sessions, spec, rng, prepared):
    remote, _ = sessions
    q, k, v = token(spec, rng)
    for _ in range(2):
        remote.attend(0, q, k, v)
    with pytest.raises(errors.NonFiniteError):
        remote.attend(0, q, np.full_like(k, np.nan), v)
    with pytest.raises(errors.PositionError):
        remote.attend(0, q, k, v, start=STORED)
    remote.attend(0, q, k, v, start=STORED + 2)
    assert prepared == [True, errors.NonFiniteError, errors.PositionError, True]


def test_a_session_that_was_closed_is_not_there(server, sessions, spec, rng, prepared):
    remote, _ = sessions
    for _ in range(2):
        remote.attend(0, *token(spec, rng))
    server._tenants.close_all()
    with pytest.raises(errors.SessionClosed):
        remote.attend(0, *token(spec, rng))
    assert prepared == [True, errors.SessionClosed]


def test_it_waits_for_its_turn_like_any_other_call(server, sessions, spec, rng, prepared):
    remote, _ = sessions
    for _ in range(2):
        remote.attend(0, *token(spec, rng))
    turn = server._turns.take
    taken = threading.Event()

    def busy(wanted):
        server._turns.take = turn
        taken.set()
        return False

    server._turns.take = busy
    remote.attend(0, *token(spec, rng))
    assert taken.is_set()
    assert prepared == [True, False]
    until(lambda: remote.stats().queries == 3)


def test_arrays_of_another_form_go_another_way(sessions, spec, rng):
    remote, embedded = sessions
    q, k, v = token(spec, rng)
    strided = np.repeat(q, 2, axis=0)[::2]  # rows apart from each other
    np.testing.assert_array_equal(remote.attend(0, strided, k, v), embedded.attend(0, q, k, v))
    with pytest.raises(errors.ShapeError):
        remote.attend(0, q[:-1], k, v)
    with pytest.raises(errors.DtypeError):
        remote.attend(0, q.astype(np.float64), k, v)
    assert remote.stats().tokens == embedded.stats().tokens


@pytest.fixture
def ends():
    """The ends of the rings in one region of memory: the client's, the server's, and the memory."""
    memory = np.zeros(REGION_BYTES + 4096, np.uint8)
    memory = memory[-memory.ctypes.data % 4096 :][:REGION_BYTES]
    return _native.SharedRing(memory, False), _native.SharedRing(memory, True), memory


def test_native_records_are_those_of_python(ends, spec, rng):
    client, server, memory = ends
    q, k, v = token(spec, rng)
    heads = spec.q_heads, spec.kv_heads, spec.head_dim
    step = _native.SharedStep(
        *heads, _native.Dtype[spec.dtype], np.empty(0, spec.numpy_dtype), b"message", ARENA_AT, REGION_BYTES
    )
    sent = step.attend(client, 7, 8, q, k, v, 9, 10.0, 0.0)  # nobody answers
    request = unpack_request(server.receive(0.0))
    assert request == unpack_request(sent)
    assert request[:5] == (7, 8, CallKind.ATTEND, 9, 1)
    assert request.seconds == 10.0
    for at, array in ((request.q, q), (request.k, k), (request.v, v)):
        assert memory[at : at + array.nbytes].tobytes() == array.tobytes()
    assert memory[request.message : request.message + request.message_nbytes].tobytes() == b"message"
    assert request.reply + request.reply_room == REGION_BYTES

    calls = _native.SharedCalls(server, 7)
    assert step.attend(client, 7, 9, q, k, v, None, 10.0, 0.0) is not None
    assert unpack_request(calls.receive(0.0)) == request._replace(number=9, start=None)
    calls.learn(b"message", "known")
    assert not calls.answered
    calls.answer(12, 1.0, 2.0, 3.0, 4)
    assert calls.answered
    assert unpack_answer(client.receive(0.0)) == SharedAnswer(7, 9, "", 12, 1.0, 2.0, 3.0, 4)

    assert step.attend(client, 7, 10, q, k, v, 11, 10.0, 0.0) is not None
    assert (calls.receive(0.0), calls.start) == ("known", 11)
    assert unpack_request(calls.last).number == 10
    assert step.attend(client, 6, 11, q, k, v, 11, 10.0, 0.0) is not None
    assert unpack_request(calls.receive(0.0)).generation == 6  # not the region's, so it is not what was learned
    calls.forget()
    assert step.attend(client, 7, 12, q, k, v, 11, 10.0, 0.0) is not None
    assert isinstance(calls.receive(0.0), bytes)


@pytest.mark.parametrize(
    "wrong", [{"generation": 1}, {"number": 9}, {"error": "SessionClosed"}, {"reply_nbytes": 8}, {"reply_nbytes": 1 << 60}]
)
def test_an_answer_that_is_not_what_was_asked_for_is_left_to_python(ends, spec, rng, wrong):
    client, server, _ = ends
    heads = spec.q_heads, spec.kv_heads, spec.head_dim
    step = _native.SharedStep(*heads, _native.Dtype[spec.dtype], np.empty(0, spec.numpy_dtype), b"m", ARENA_AT, REGION_BYTES)
    q, k, v = token(spec, rng)
    answer = SharedAnswer(7, 8, "", q.nbytes)
    server.send(pack_answer(answer._replace(**wrong)))
    assert isinstance(step.attend(client, 7, 8, q, k, v, None, 1.0, 0.0), bytes)
    assert unpack_answer(client.receive(0.0)) == answer._replace(**wrong)


def test_a_region_that_is_too_small_is_refused(spec):
    heads = spec.q_heads, spec.kv_heads, spec.head_dim
    with pytest.raises(ValueError, match="no room"):
        _native.SharedStep(*heads, _native.Dtype[spec.dtype], np.empty(0, spec.numpy_dtype), b"m", ARENA_AT, ARENA_AT + 4096)


def test_a_region_goes_with_its_client(server, spec, rng):
    """Its memory is given back at once, not when garbage is collected."""

    def regions():
        return Path("/proc/self/maps").read_text().count("memfd:kvdb")

    before = regions()
    gc.disable()
    try:
        for _ in range(3):
            with kvdb.connect(server.target) as db, db.create_session(spec, [1]) as session:
                for _ in range(3):
                    session.attend(0, *token(spec, rng))
                assert regions() > before
        until(lambda: regions() <= before)
    finally:
        gc.enable()
