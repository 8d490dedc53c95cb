"""The log of a server, and the events of a database."""

import json
import logging
import signal
from io import StringIO

import numpy as np
import pytest

import kvdb
from kvdb.config import LogConfig
from kvdb.errors import ConfigError, InternalError
from kvdb.events import Events, Kind, Origin, originating
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.server.log import LINES_PER_SECOND, EventLog, HumanLines, JsonLines
from kvdb.server.observing import request_id
from kvdb.session.state import SessionState


@pytest.fixture
def told(engine):
    """Every event of the engine, in order."""
    events = []
    engine.events.add(events.append)
    return events


def kinds(events):
    return [event.kind for event in events]


def test_contexts_and_sessions_tell_their_lives(engine, client, told, spec, make_kv):
    kv = make_kv(spec, 20)
    client.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    session = client.create_session(spec, kv.tokens)
    session.close()
    client.drop("doc")
    assert kinds(told) == [Kind.STORED, Kind.SESSION_OPENED, Kind.SESSION_CLOSED, Kind.DROPPED]
    assert told[0].facts["context"] == told[3].facts["context"] == "doc"
    assert told[1].facts == {"tokens": 20, "reused": 20}


def test_events_carry_the_request_that_they_happen_in(stub, told, spec, client, make_kv):
    kv = make_kv(spec, 5)
    client.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    stub.DropContexts(pb.DropContextsRequest(names=pb.Names(names=["doc"])), metadata=(("x-request-id", "mine-1"),))
    assert kinds(told) == [Kind.STORED, Kind.DROPPED]
    assert told[1].origin.request == "mine-1"
    assert told[0].origin.request not in {"", "mine-1"}


def test_sessions_that_expire_are_told(serve, told, spec, eventually):
    with kvdb.connect(serve(session_idle_seconds=0.1).target) as db:
        _session = db.create_session(spec, [])  # kept, or it would be closed
        eventually(lambda: Kind.SESSION_EXPIRED in kinds(told))


@pytest.mark.parametrize("local_socket", ["", "auto"], ids=["grpc", "shared memory"])
def test_a_bug_is_found_in_the_log_by_what_its_error_says(serve, spec, monkeypatch, local_socket):
    written = StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("kvdb.server.interceptors")
    monkeypatch.setattr(log, "handlers", [handler])

    def bug(*_given, **_more):
        raise RuntimeError("a bug")

    with kvdb.connect(serve(local_socket=local_socket).target) as db, db.create_session(spec, [1]) as session:
        monkeypatch.setattr(SessionState, "attention", bug)
        with pytest.raises(InternalError, match="RuntimeError: a bug") as failure:
            session.attention(0, np.ones((4, 1, 16), np.float32))
    (line,) = written.getvalue().splitlines()
    said = json.loads(line)
    assert 'raise RuntimeError("a bug")' in said["trace"]
    assert str(failure.value).endswith(f"by request_id {said['request_id']}")


def test_a_process_logs_its_life_as_json(process, tmp_path, spec, make_kv):
    settings = tmp_path / "kvdb.toml"
    settings.write_text('[log]\nformat = "json"\n')
    kv = make_kv(spec, 8)
    with process("--config", str(settings)) as (running, line):
        with kvdb.connect(line.split()[-1]) as db:
            db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        running.send_signal(signal.SIGTERM)
        lines = [json.loads(text) for text in running.communicate(timeout=10)[1].splitlines()]
    assert [one["event"] for one in lines] == ["server_started", "context_stored", "server_draining", "server_stopped"]
    assert lines[1]["context"] == "doc"
    assert len(lines[1]["request_id"]) == 16
    assert {one["level"] for one in lines} == {"info"}


@pytest.mark.parametrize("lines", [HumanLines(), JsonLines()])
@pytest.mark.parametrize("name", ["doc", "two words", 'a"quote', "a\nline", "", "\x1b[31m"])
def test_a_line_is_a_line_whatever_a_name_holds(lines, name, caplog):
    events = Events()
    events.add(EventLog())
    with caplog.at_level(logging.DEBUG, "kvdb"), originating(Origin("team", "request-7")):
        events.tell(Kind.STORED, context=name, tokens=3)
        text = lines.format(caplog.records[-1])
    assert "\n" not in text
    assert "\x1b" not in text
    assert "request-7" in text
    assert "team" in text
    if isinstance(lines, JsonLines):
        assert json.loads(text)["context"] == name


def test_a_flood_of_one_kind_is_cut_and_does_not_hide_others(caplog):
    log = Events()
    log.add(EventLog())
    with caplog.at_level(logging.INFO, "kvdb"):
        for _ in range(20 * LINES_PER_SECOND):
            log.tell(Kind.REFUSED, code="UNAUTHENTICATED")
        log.tell(Kind.STORED, context="doc")
    assert len(caplog.records) < 10 * LINES_PER_SECOND
    assert caplog.records[-1].getMessage() == Kind.STORED


@pytest.mark.parametrize("given", ["abc-1", "0af7651916cd43dd8448eb211c80319c"])
def test_a_request_keeps_its_name(given):
    assert request_id({"x-request-id": given}) == given


@pytest.mark.parametrize("given", ["", "a\nb", "x" * 65, "name with spaces", b"raw"])
def test_a_name_that_fits_no_log_is_replaced(given):
    assert len(request_id({"x-request-id": given})) == 16


def test_a_log_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"log\.format"):
        LogConfig(format="xml")
    with pytest.raises(ConfigError, match=r"log\.level"):
        LogConfig(level="loud")
