"""The console over HTTP: who may ask, what an answer allows, and what bad requests are told."""

import json
import re
import threading
from contextlib import ExitStack

import pytest

import kvdb
import kvdb.server.console.api as api
import kvdb.server.console.console as console
from kvdb.config import Config, MetricsConfig, ServerConfig
from kvdb.server.http.opening import open_http
from kvdb.server.serve import Server
from kvdb.server.tenancy.tokens_file import new_token
from tests.kvdb.server.console.conftest import AWAY, BASE, HOSTILE, TOKEN, ask

CALLS = ["overview", "contexts", "sessions"]
OF_ALL = [*CALLS, "calls", "context", "heat", "explain", "nothing"]
ELSEWHERE = re.compile(rb"https?://(?!www\.w3\.org/2000/svg)|@import|url\(")


def test_the_pages_load_nothing_from_elsewhere(url):
    for name, body in console.static_files().items():
        answer = ask(url, f"/ui/{name}")
        assert (answer.status, answer.body) == (200, body)
        assert not ELSEWHERE.search(body), name
    index = ask(url, "/ui/")
    assert index.body == console.static_files()["index.html"]
    named = set(re.findall(rb'(?:src|href)="([^#"]+)"', index.body))
    assert {name.decode() for name in named} <= set(console.static_files())


def test_the_way_without_a_slash_leads_to_the_pages(url):
    answer = ask(url, "/ui")
    assert (answer.status, answer.headers["Location"]) == (308, "/ui/")


@pytest.mark.parametrize("path", ["/ui/", "/ui/console.js", "/ui/nothing", "/ui/api/overview", "/ui/api/nothing"])
def test_every_answer_keeps_other_pages_and_scripts_away(url, path):
    headers = ask(url, path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/ui/../serve.py", "/ui/%2e%2e/api.py", "/ui/api.py", "/ui//etc/passwd", "/ui/static/index.html"]
)
def test_nothing_but_the_pages_is_a_file(url, path):
    assert ask(url, path).status == 404


def test_numbers_that_json_cannot_write_are_null(url):
    answer = ask(url, "/ui/api/heat", name=HOSTILE)
    assert answer.status == 200
    assert {value for row in answer.value["values"] for value in row} == {None}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_told_is_what_the_functions_tell(url, database, call):
    answer = ask(url, f"/ui/api/{call}")
    assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
    assert answer.value == json.loads(json.dumps(getattr(api, call)(database)))


@pytest.mark.parametrize(
    ("call", "query", "status", "said"),
    [
        ("context", {"name": "nobody"}, 404, "nobody"),
        ("context", {}, 400, "no name"),
        ("contexts", {"limit": "many"}, 400, "expected a number"),
        ("contexts", {"limit": "9" * 5000}, 400, "expected a number"),
        ("heat", {"name": BASE, "measure": "colour"}, 400, "expected one of"),
        ("explain", {"name": BASE, "layer": "99"}, 400, "layer"),
        ("explain", {"name": AWAY}, 409, "is on disk"),
        ("explain", {"session": "nobody"}, 404, "nobody"),
        ("everything", {}, 404, "expected one of overview"),
    ],
)
def test_a_bad_request_is_told_what_was_wrong(url, call, query, status, said):
    answer = ask(url, f"/ui/api/{call}", **query)
    assert answer.status == status
    assert said in answer.value["error"]


def test_a_bug_stays_in_the_log(url, monkeypatch, caplog):
    monkeypatch.setattr(api, "overview", lambda _: 1 / 0)
    answer = ask(url, "/ui/api/overview")
    assert answer.status == 500
    assert "division" not in answer.value["error"]
    assert "division" in caplog.text


@pytest.mark.parametrize("call", OF_ALL)
@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x"])
def test_without_the_token_nothing_is_told(locked_url, call, token):
    answer = ask(locked_url, f"/ui/api/{call}", token, name=BASE)
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, 'Bearer realm="kvdb"')
    assert set(answer.value) == {"error"}
    assert BASE.encode() not in answer.body


def test_with_the_token_all_is_told_and_the_pages_need_none(locked_url):
    assert ask(locked_url, "/ui/api/overview", TOKEN).value["contexts"] == 4
    assert ask(locked_url, "/ui/").status == ask(locked_url, "/ui/console.js").status == 200


def test_a_server_of_its_own_says_where_its_console_is(process, monkeypatch):
    monkeypatch.setenv("KVDB_TOKEN", TOKEN)
    with process("--metrics-port", "0") as (running, _):
        metrics, url = (running.stdout.readline().split()[-1] for _ in range(2))
        assert url == metrics.replace("/metrics", "/ui/")
        assert b"<title>kvdb console</title>" in ask(url, "/ui/").body
        assert ask(url, "/ui/api/overview").status == 401
        told = ask(url, "/ui/api/overview", TOKEN).value
        assert (told["contexts"], told["sessions"], told["version"]) == (0, 0, kvdb.__version__)


def test_a_tenant_sees_its_own_sessions_and_no_calls_and_an_admin_the_tenant_of_each(engine, spec, tmp_path):
    tokens = {name: new_token(tmp_path / "tokens", name, admin=name == "ops") for name in ("ops", "acme", "globex")}
    server = Server(engine, ServerConfig(port=0, local_socket="", tokens_file=str(tmp_path / "tokens")))
    server.start()
    http = open_http(Config(metrics=MetricsConfig(port=0)), lambda: True, server.pages(), server.credentials)
    http.start()
    try:
        with ExitStack() as opened:
            ids = {}
            for tenant in ("acme", "globex"):
                client = opened.enter_context(kvdb.connect(server.target, token=tokens[tenant]))
                opened.enter_context(client.create_session(spec, [1, 2], label="chat"))
                ((told,), _) = ask(http.url, "/ui/api/sessions", tokens[tenant]).value.values()
                assert (told["tenant"], told["label"]) == (tenant, "chat")
                assert ask(http.url, "/ui/api/calls", tokens[tenant]).value == {}
                assert {tier["limit"] for tier in ask(http.url, "/ui/api/overview", tokens[tenant]).value["tiers"]} == {None}
                ids[tenant] = told["id"]
            told = ask(http.url, "/ui/api/sessions", tokens["ops"]).value["sessions"]
            assert [(session["tenant"], session["id"]) for session in told] == [*reversed(ids.items())]
            assert ask(http.url, "/ui/api/calls", tokens["ops"]).value["codes"]["OK"] >= 2
            other = ask(http.url, "/ui/api/explain", tokens["globex"], session=ids["acme"])
            assert other.status == 404
    finally:
        http.stop()
        server.stop(grace=0)


def test_one_explain_is_carried_out_at_a_time(url, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    explain = api.explain

    def slow(*arguments):
        begun.set()
        assert go_on.wait(10)
        return explain(*arguments)

    monkeypatch.setattr(api, "explain", slow)
    answers = []
    first = threading.Thread(target=lambda: answers.append(ask(url, "/ui/api/explain", name=BASE)))
    first.start()
    assert begun.wait(10)
    second = ask(url, "/ui/api/explain", name=BASE)
    go_on.set()
    first.join()
    assert (answers[0].status, second.status) == (200, 429)
    assert "under way" in second.value["error"]
    assert ask(url, "/ui/api/explain", name=BASE).status == 200
