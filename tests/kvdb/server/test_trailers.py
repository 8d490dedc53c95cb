"""What comes behind an answer: how long it took, and what clients of any language are told of an error."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

import kvdb
from kvdb import errors
from kvdb.database import Database
from kvdb.rpc import error_details
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.status import timings_in

SECONDS = 0.1


def details(failure):
    """The `google.rpc.Status` of a failed call, and its details by their names."""
    (raw,) = [value for key, value in failure.trailing_metadata() if key == "grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    return status, {detail.type_url.rpartition(".")[2]: detail for detail in status.details}


def unpacked(detail, kind):
    message = kind()
    assert detail.Unpack(message)
    return message


def test_an_error_says_what_it_is_and_what_it_is_about(stub):
    with pytest.raises(grpc.RpcError) as raised:
        stub.GetContext(pb.GetContextRequest(name="doc"))
    status, found = details(raised.value)
    assert status.code == grpc.StatusCode.NOT_FOUND.value[0]
    assert set(found) == {"ErrorInfo", "ResourceInfo"}
    info = unpacked(found["ErrorInfo"], error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("NotFound", "kvdb")
    assert "doc" in unpacked(found["ResourceInfo"], error_details_pb2.ResourceInfo).description


def test_what_may_succeed_later_says_when(stub, monkeypatch):
    def full(*_):
        raise errors.CapacityError("x" * 3000)

    monkeypatch.setattr(Database, "get", full)
    with pytest.raises(grpc.RpcError) as raised:
        stub.GetContext(pb.GetContextRequest(name="doc"))
    status, found = details(raised.value)
    assert unpacked(found["RetryInfo"], error_details_pb2.RetryInfo).retry_delay.seconds == 1
    assert 0 < len(status.message) < len(raised.value.details())


def test_a_server_without_the_messages_sends_none(stub, monkeypatch):
    monkeypatch.setattr(error_details, "status_pb2", None)
    with pytest.raises(grpc.RpcError) as raised:
        stub.GetContext(pb.GetContextRequest(name="doc"))
    assert [key for key, _ in raised.value.trailing_metadata()] == ["kvdb-error"]


def test_a_call_says_how_long_it_waited_and_took(client, spec, monkeypatch):
    get, reached, opened = Database.contexts, threading.Event(), threading.Event()

    def slowly(*arguments):
        reached.set()
        opened.wait(SECONDS)
        return get(*arguments)

    monkeypatch.setattr(Database, "contexts", slowly)
    client.contexts()
    assert client.last_timings.engine >= SECONDS
    assert 0 <= client.last_timings.queue < SECONDS
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: client.last_timings).result() is None, "it is of another thread"
    with pytest.raises(errors.NotFound):
        client.get("doc")
    assert client.last_timings.engine >= SECONDS


def test_an_embedded_database_measures_none():
    with kvdb.connect() as db:
        assert db.contexts() == []
        assert db.last_timings is None


def test_what_says_nothing_of_time_is_no_timing():
    assert timings_in(None) is None
    assert timings_in([("kvdb-queue-us", "1")]) is None
    assert timings_in([("kvdb-queue-us", "1"), ("kvdb-engine-us", "x")]) is None


@pytest.mark.parametrize("local_socket", ["", "auto"])
def test_a_step_says_what_it_took(serve, spec, make_kv, local_socket):
    kv = make_kv(spec, 3)
    k, v = kv.pairs()[0]
    with kvdb.connect(serve(local_socket=local_socket).target) as db, db.create_session(spec, kv.tokens) as session:
        for i in range(3):
            session.attend(0, kv.q[0][:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1])
            queue, engine, kernel = db.last_timings
            assert 0 <= queue < 10
            assert 0 < kernel <= engine < 10
        session.update(1, k, v)
        assert db.last_timings.engine > 0
        assert db.last_timings.kernel == 0
