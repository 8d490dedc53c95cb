"""The HTTP port: who may ask, what comes back, and what a bad client cannot do."""

import socket
import threading
from contextlib import ExitStack
from http import HTTPStatus
from http.client import HTTPConnection
from time import monotonic
from urllib.parse import urlsplit

import pytest

from kvdb.config import Config, MetricsConfig, ServerConfig
from kvdb.errors import ConfigError, NotFound
from kvdb.server.http import answering, places
from kvdb.server.http.answering import Pages
from kvdb.server.http.opening import open_http
from kvdb.server.http.port import HttpPort
from kvdb.server.http.routes import Reply, Route, Routes
from kvdb.server.tenancy.credentials import Credentials

SECONDS_MAX = 5.0
PROBE_SECONDS_MAX = 1.0
LARGE = bytes(8 << 20)  # more than a connection's buffers take


def refuse(_request):
    raise NotFound("nothing here")


def fail(_request):
    raise RuntimeError("a bug")


ROUTES = [
    Route("/page", lambda request: Reply.json(dict(request.query))),
    Route("/files/", lambda request: Reply.text(request.path), public=True),
    Route("/files/own", lambda _request: Reply.text("its own")),
    Route("/missing", refuse),
    Route("/bug", fail),
    Route("/large", lambda _request: Reply(LARGE)),
]


@pytest.fixture
def open_port():
    opened = []

    def start(token="", ready=lambda: True, routes=ROUTES):
        config = Config(server=ServerConfig(token=token), metrics=MetricsConfig(port=0))
        opened.append(open_http(config, ready, routes, Credentials(config.server)))
        opened[-1].start()
        return opened[-1]

    yield start
    for port in opened:
        port.stop()


def ask(port, path, method="GET", headers=None):
    address = urlsplit(port.url)
    connection = HTTPConnection(address.hostname, address.port, timeout=SECONDS_MAX)
    connection.request(method, path, headers=headers or {})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, body.decode(), reply.headers


def test_the_longest_route_that_fits_answers(open_port):
    port = open_port()
    assert ask(port, "/page?a=1&b=%20x")[:2] == (200, '{"a": "1", "b": " x"}')
    assert ask(port, "/files/a/b.js")[:2] == (200, "/files/a/b.js\n")
    assert ask(port, "/files/own")[:2] == (200, "its own\n")
    assert ask(port, "/nowhere")[0] == HTTPStatus.NOT_FOUND


def test_errors_have_their_status_and_bugs_stay_in_the_log(open_port, caplog):
    port = open_port()
    assert ask(port, "/missing")[:2] == (404, "nothing here\n")
    status, body, _ = ask(port, "/bug")
    assert status == HTTPStatus.INTERNAL_SERVER_ERROR
    assert "RuntimeError" not in body
    assert "a bug" in caplog.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_can_be_written(open_port, method):
    assert ask(open_port(), "/page", method)[0] == HTTPStatus.NOT_IMPLEMENTED


def test_head_has_no_body(open_port):
    status, body, headers = ask(open_port(), "/page", "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, "", "2")


def test_every_answer_forbids_other_origins(open_port):
    headers = ask(open_port(), "/page")[2]
    assert headers["Content-Security-Policy"].startswith("default-src 'self'")
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        ("/page", None, 401),
        ("/page", "Bearer wrong", 401),
        ("/page", "Bearer s3cret", 200),
        ("/nowhere", None, 401),  # who brings no token is not told which pages there are
        ("/nowhere", "Bearer s3cret", 404),
        ("/healthz", None, 200),
        ("/readyz", None, 200),
        ("/files/x", None, 200),
    ],
)
def test_the_token_is_asked_for_but_where_a_route_is_public(open_port, path, given, status):
    headers = {} if given is None else {"Authorization": given}
    assert ask(open_port(token="s3cret"), path, headers=headers)[0] == status


def test_readiness_follows_the_server_and_liveness_does_not(open_port):
    ready = threading.Event()
    port = open_port(ready=ready.is_set)
    assert (ask(port, "/healthz")[0], ask(port, "/readyz")[0]) == (200, 503)
    ready.set()
    assert (ask(port, "/healthz")[0], ask(port, "/readyz")[0]) == (200, 200)


def test_no_port_without_a_setting():
    assert open_http(Config(), lambda: True, [], Credentials(ServerConfig())) is None


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7701", 200),
        ("[::1]:7701", 200),
        ("LOCALHOST", 200),
        ("kvdb.example.org:7701", 200),
        ("rebound.example.com", 421),
        ("127.0.0.1.example.com:7701", 421),
        ("localhost:port", 421),
        ("", 421),
    ],
)
def test_without_a_token_the_port_answers_under_its_own_names_alone(host, status):
    config = Config(metrics=MetricsConfig(port=0, host_names=("kvdb.example.org",)))
    port = open_http(config, lambda: True, ROUTES, Credentials(config.server))
    port.start()
    assert ask(port, "/page", headers={"Host": host})[0] == status
    port.stop()


def test_with_a_token_any_name_will_do(open_port):
    given = {"Host": "kvdb.example.com", "Authorization": "Bearer s3cret"}
    assert ask(open_port(token="s3cret"), "/page", headers=given)[0] == HTTPStatus.OK


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = Config(metrics=MetricsConfig(port=taken.getsockname()[1]))
        with pytest.raises(ConfigError, match="cannot listen"):
            open_http(config, lambda: True, [], Credentials(ServerConfig()))


def connect(port, source="127.0.0.1"):
    address = urlsplit(port.url)
    return socket.create_connection((address.hostname, address.port), SECONDS_MAX, source_address=(source, 0))


HALF, HALF_REST = b"GET /healthz HT", b"TP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", HALF])
def test_no_probe_waits_for_the_connections_that_its_own_address_holds(open_port, sent):
    port = open_port()
    with ExitStack() as held:
        for _ in range(3):
            for _ in range(100):
                held.enter_context(connect(port)).sendall(sent)
            asked = monotonic()
            assert ask(port, "/healthz")[0] == HTTPStatus.OK
            assert monotonic() - asked < PROBE_SECONDS_MAX


def test_no_probe_waits_for_answers_that_nobody_takes(open_port, monkeypatch):
    monkeypatch.setattr(places, "CONNECTIONS_MAX", 4)
    port = open_port()
    with ExitStack() as held:
        for _ in range(2 * places.CONNECTIONS_MAX):
            held.enter_context(connect(port)).sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ask(port, "/healthz")[0] == HTTPStatus.OK


def test_who_holds_most_connections_gives_way_and_nobody_else(open_port):
    port = open_port()
    with ExitStack() as held:
        slow = held.enter_context(connect(port, "127.0.0.2"))
        slow.sendall(HALF)
        for _ in range(2 * places.CONNECTIONS_MAX):
            held.enter_context(connect(port))
        assert ask(port, "/page")[0] == HTTPStatus.OK
        slow.sendall(HALF_REST)
        assert slow.recv(15) == b"HTTP/1.0 200 OK"


def test_probes_are_answered_while_as_many_pages_are_computed_as_may_be(open_port, monkeypatch):
    monkeypatch.setattr(answering, "AT_A_TIME_MAX", 1)
    begun, go = threading.Event(), threading.Event()

    def slow(_request):
        begun.set()
        return Reply.text(str(go.wait(SECONDS_MAX)))

    port = open_port(routes=[Route("/slow", slow)])
    with connect(port) as one:
        one.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert begun.wait(SECONDS_MAX), "before another asks, which would take its place"
        status, _, headers = ask(port, "/slow")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert ask(port, "/readyz")[0] == HTTPStatus.OK
        go.set()
        assert one.recv(15) == b"HTTP/1.0 200 OK"
    assert ask(port, "/slow")[0] == HTTPStatus.OK


def test_a_request_that_trickles_is_ended(monkeypatch):
    monkeypatch.setattr(places, "HEAD_SECONDS", 0.0)
    port = HttpPort("127.0.0.1", 0, Pages(Routes(ROUTES), lambda _given: True))
    port.start()
    address = urlsplit(port.url)
    with socket.create_connection((address.hostname, address.port)) as slow:
        slow.settimeout(SECONDS_MAX)
        slow.sendall(b"GET /page HTTP/1.1\r\n")
        assert slow.recv(1) == b""
    port.stop()


@pytest.mark.parametrize(
    "line", [b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe\x00\r\n\r\n", b"GET " + b"/" * 70000 + b" HTTP/1.1\r\n\r\n"]
)
def test_no_line_ends_the_port(open_port, line):
    port = open_port()
    address = urlsplit(port.url)
    with socket.create_connection((address.hostname, address.port)) as bad:
        bad.settimeout(SECONDS_MAX)
        bad.sendall(line)
        bad.shutdown(socket.SHUT_WR)
        try:
            while bad.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert ask(port, "/healthz")[0] == HTTPStatus.OK
