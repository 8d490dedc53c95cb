"""An error crosses the wire as what it was."""

import inspect

import grpc
import pytest

import kvdb
from kvdb import errors
from kvdb.config import Config, ServerConfig
from kvdb.events import Events
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.calls import Stub
from kvdb.rpc.status import ERROR_KEY, STATUS, to_error
from kvdb.server.serve import Server

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.KvdbError)]


class Failing:
    """A database whose `get` raises what it is asked for, with a message that names must survive."""

    def __init__(self):
        self.raised = None
        self.events = Events()
        self.config = Config()

    def get(self, name):
        raise self.raised


@pytest.fixture(scope="module")
def failing():
    return Failing()


@pytest.fixture(scope="module")
def target(failing):
    server = Server(failing, ServerConfig(port=0))
    server.start()
    yield server.target
    server.stop(grace=0)


@pytest.fixture(scope="module")
def client(target):
    with kvdb.connect(target) as opened:
        yield opened


def test_the_table_knows_every_error():
    assert set(STATUS) == set(CLASSES)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_client_raises_what_the_engine_raised(failing, client, kind):
    failing.raised = kind("k has the shape (2, 3); expected (2, n, 16), größer: 数 100% \N{PILE OF POO}")
    with pytest.raises(errors.KvdbError) as raised:
        client.get("x")
    assert type(raised.value) is kind
    assert str(raised.value) == str(failing.raised)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_other_clients_see_the_status_of_the_table(failing, target, kind):
    failing.raised = kind("why")
    with grpc.insecure_channel(target.removeprefix("kvdb://")) as channel, pytest.raises(grpc.RpcError) as raised:
        Stub(channel).GetContext(pb.GetContextRequest(name="x"))
    assert raised.value.code() is STATUS[kind]
    assert (ERROR_KEY, kind.__name__) in raised.value.trailing_metadata()


def test_a_class_of_later_days_travels_as_its_nearest_ancestor(failing, client):
    failing.raised = type("QuotaError", (errors.CapacityError,), {})("spent")
    with pytest.raises(errors.CapacityError, match="spent"):
        client.get("x")


def test_a_bug_is_an_internal_error_and_the_server_goes_on(failing, client, caplog):
    failing.raised = ZeroDivisionError("division by zero")
    with pytest.raises(errors.InternalError, match="GetContext met a bug of kvdb's: ZeroDivisionError: division by zero"):
        client.get("x")
    assert "Traceback" in caplog.text
    failing.raised = errors.NotFound("still here")
    with pytest.raises(errors.NotFound, match="still here"):
        client.get("x")


def test_a_message_too_long_for_a_header_is_cut(failing, client):
    failing.raised = errors.NotFound("é" * 100_000)
    with pytest.raises(errors.NotFound, match=r"^é{4096} \.\.\.$"):
        client.get("x")


class Status(grpc.RpcError):
    """What gRPC itself ends a call with."""

    def __init__(self, code, details=""):
        self.code, self.details, self.trailing_metadata = lambda: code, lambda: details, lambda: None


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "refused", errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, "", errors.Unavailable),
        (grpc.StatusCode.OK, "", errors.Unavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 5)", errors.MessageTooLarge),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "threads", errors.CapacityError),
        (grpc.StatusCode.UNAUTHENTICATED, "", errors.Unauthenticated),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", errors.Unsupported),
        (grpc.StatusCode.UNKNOWN, "Stream removed", errors.InternalError),
    ],
)
def test_what_grpc_says_itself_names_the_server(code, details, kind):
    error = to_error(Status(code, details), "kvdb://there:7700")
    assert type(error) is kind
    assert "kvdb://there:7700" in str(error)
    assert details in str(error)
