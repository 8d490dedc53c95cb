"""Whatever fails of the parts of gRPC that are not public, a session goes on through the public ones."""

from types import SimpleNamespace

import grpc
import numpy as np
import pytest

import kvdb
from kvdb.client.remote import direct
from kvdb.client.remote.stream import Stream
from kvdb.errors import Unavailable

BEGIN = [
    "PropagationConstants",
    "SendInitialMetadataOperation",
    "ReceiveInitialMetadataOperation",
    "ReceiveStatusOnClientOperation",
]
SEND = ["SendMessageOperation", "ReceiveMessageOperation"]


def without(part):
    """gRPC's private module, but for one name."""
    return SimpleNamespace(**{name: getattr(direct.cygrpc, name) for name in dir(direct.cygrpc) if name != part})


class Failing:
    """Another object, of which one method raises when it is called; what `wraps` names returns such an object too."""

    def __init__(self, inner, method, failure, wraps=()):
        self.inner, self.method, self.failure, self.wraps = inner, method, failure, wraps

    def __getattr__(self, name):
        value = getattr(self.inner, name)
        if name == self.method:
            return self.fail
        if name == "_channel":
            return Failing(value, self.method, self.failure)
        if name == "segregated_call":
            return lambda *arguments: Failing(value(*arguments), self.method, self.failure)
        return value

    def fail(self, *_):
        raise self.failure


@pytest.fixture
def ways(monkeypatch):
    """The ways that exchanges took, in their order."""
    taken = []
    for kind in (direct.DirectDecode, Stream):

        def counted(self, request, exchange=kind.exchange, name=kind.__name__):
            taken.append(name)
            return exchange(self, request)

        monkeypatch.setattr(kind, "exchange", counted)
    return taken


@pytest.fixture
def failing(target, monkeypatch):
    """`failing(method, failure)`: a client for whom a method of gRPC's private call or channel fails."""
    clients = []

    def connect(method, failure):
        open_channel = grpc.insecure_channel
        with monkeypatch.context() as patch:
            patch.setattr(
                grpc, "insecure_channel", lambda *given, **named: Failing(open_channel(*given, **named), method, failure)
            )
            clients.append(kvdb.connect(target))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def step(spec):
    q, kv = np.ones((spec.q_heads, 1, 16), np.float32), np.ones((spec.kv_heads, 1, 16), np.float32)
    return q, kv, kv


def two_steps(client, spec, step):
    """Attend twice; an answer over values of one is one."""
    with client.create_session(spec, [1, 2]) as session:
        for start in range(2):
            assert np.array_equal(session.attend(0, *step, start=start), np.ones_like(step[0]))


@pytest.mark.parametrize("part", BEGIN + SEND)
def test_a_part_that_is_missing_before_a_request_is_sent_goes_unnoticed(client, spec, step, monkeypatch, ways, part):
    monkeypatch.setattr(direct, "cygrpc", without(part))
    two_steps(client, spec, step)
    assert ways == ["DirectDecode"] * (part in SEND) + ["Stream"] * 2


@pytest.mark.parametrize("failure", direct.FAILURES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("method", ["segregated_call", "operate"])
def test_what_fails_before_a_request_is_sent_goes_unnoticed(failing, spec, step, ways, method, failure):
    client = failing(method, failure("it is not as it was"))
    for _ in range(2):
        two_steps(client, spec, step)
    assert ways == ["DirectDecode"] * (method == "operate") + ["Stream"] * 4


@pytest.mark.parametrize("missing", ["module", "method"])
def test_a_grpc_without_the_private_parts(client, target, spec, step, monkeypatch, ways, missing):
    if missing == "module":
        monkeypatch.setattr(direct, "cygrpc", None)
        two_steps(client, spec, step)
    else:
        open_channel = grpc.insecure_channel
        monkeypatch.setattr(grpc, "insecure_channel", lambda *given, **named: Public(open_channel(*given, **named)))
        with kvdb.connect(target) as db:
            two_steps(db, spec, step)
    assert ways == ["Stream"] * 2


class Public:
    """A channel with what gRPC promises, and no more."""

    def __init__(self, channel):
        self.unary_unary, self.unary_stream = channel.unary_unary, channel.unary_stream
        self.stream_stream, self.close = channel.stream_stream, channel.close


@pytest.mark.parametrize("failure", direct.FAILURES, ids=lambda kind: kind.__name__)
def test_what_fails_afterwards_is_unavailable_once(failing, spec, step, ways, failure):
    client = failing("next_event", failure("it is not as it was"))
    with client.create_session(spec, [1, 2]) as session:
        with pytest.raises(Unavailable, match="the installed gRPC .* failed while it waited"):
            session.attend(0, *step)
        queries = session.stats().queries
        session.attend(0, *step)
        assert session.stats().queries == queries + 1
    assert ways == ["DirectDecode", "Stream"]


def test_a_reply_that_cannot_be_read_is_unavailable_once(client, spec, step, monkeypatch):
    with client.create_session(spec, [1, 2]) as session:
        session.attend(0, *step)
        monkeypatch.setattr(direct, "cygrpc", without("OperationType"))
        with pytest.raises(Unavailable, match="the installed gRPC .* failed while it waited"):
            session.attend(0, *step)
        queries = session.stats().queries
        session.attend(0, *step)
        assert session.stats().queries == queries + 1


@pytest.mark.parametrize("failure", direct.FAILURES, ids=lambda kind: kind.__name__)
def test_a_stream_that_cannot_be_cancelled_holds_nobody_up(failing, spec, step, failure, blocks_used, eventually):
    with failing("cancel", failure("it is not as it was")).create_session(spec, [1, 2]) as session:
        session.attend(0, *step)
    eventually(lambda: not blocks_used())
