"""Engines keep nothing of documents: two on one server agree on them, and so does one over a store that is opened again."""

import copy

import pytest

import kvdb
from engine_adapter.rag import RagEngine
from kvdb.client.client import Client
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import AlreadyExists, NotFound
from kvdb.server.serve import Server
from tests.engine_adapter.rag.characters import Characters
from tests.waiting import until

NEW = {"max_new_tokens": 2, "do_sample": False}


def open_store(folder):
    return Database(Config(storage=StorageConfig(path=str(folder), arena_bytes=1 << 20)))


@pytest.fixture
def two(model, tmp_path):
    """Two engines, each with a model and a client of its own, on one server."""
    with open_store(tmp_path) as engine:
        server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
        server.start()
        try:
            with (
                kvdb.connect(server.target) as one,
                kvdb.connect(server.target) as other,
                RagEngine(model, Characters(), one, chunk_tokens=24) as first,
                RagEngine(copy.deepcopy(model), Characters(), other, chunk_tokens=24) as second,
            ):
                yield first, second
        finally:
            server.stop(grace=0)


def told(rag):
    """What an engine says of documents, but for what the moment changes."""
    return [(one.id, one.tokens, one.chunks, one.pinned, one.used, one.resident) for one in rag.documents()]


def test_what_one_engine_does_holds_for_the_other(two, write):
    first, second = two
    first.add("report", write(60), ttl=1000, pin=True)
    second.add("memo", write(30, seed=1))
    assert told(first) == told(second)
    assert [info.id for info in first.documents()] == ["memo", "report"]
    assert second.answer("so?", ["report", "memo"], **NEW).tokens == first.answer("so?", ["report", "memo"], **NEW).tokens
    assert told(first) == told(second)
    assert [(info.pinned, info.used) for info in first.documents()] == [(False, 2), (True, 2)]
    second.pin("report", pinned=False)
    assert not any(info.pinned for info in first.documents())
    with pytest.raises(AlreadyExists):
        second.add("report", "another")
    second.add("report", "another", replace=True)
    assert [info.tokens for info in first.documents()] == [30, 7]
    first.delete("report")
    with pytest.raises(NotFound, match="no document 'report'"):
        second.answer("so?", ["report"], **NEW)
    assert told(first) == told(second)


def test_a_time_to_live_holds_for_both(two):
    first, second = two
    first.add("brief", "text", ttl=1000)
    assert 990 < second.documents()[0].expires_seconds <= 1000
    second._attached.db.update("rag/brief/1of1", ttl=0.001)
    until(lambda: not first.documents() and not second.documents())
    with pytest.raises(NotFound, match="'brief'"):
        first.answer("so?", ["brief"], **NEW)


def test_what_one_engine_used_the_other_does_not_drop_first(two):
    first, second = two
    size = first.add("a", "a text").nbytes
    second.add("b", "b text")
    first.add("c", "c text")
    second.answer("so?", ["a"], **NEW)
    first._documents._memory_bytes = 3 * size
    first.add("d", "d text")
    assert [info.id for info in second.documents()] == ["a", "c", "d"]


def test_a_document_that_two_engines_add_at_once_is_there_once(two, write):
    first, second = two

    def add(done, total):
        if done < total:
            second.add("one", "b" * 40, replace=True)

    with pytest.raises(AlreadyExists, match="meanwhile"):
        first.add("one", write(40), progress=add)
    assert (
        [(info.id, info.tokens) for info in first.documents()]
        == [("one", 40)]
        == [(info.id, info.tokens) for info in second.documents()]
    )
    assert [context.name for context in second._attached.db.contexts("rag/one")] == ["rag/one/1of2.r1", "rag/one/2of2.r1"]


def test_an_engine_over_a_store_that_is_opened_again_agrees(model, tmp_path, write):
    with (
        open_store(tmp_path) as engine,
        RagEngine(model, Characters(), Client(engine), chunk_tokens=24) as rag,
    ):
        rag.add("gone", "text", ttl=1000)
        rag.add("kept", write(60), pin=True)
        rag.add("used", "other text", ttl=1000)
        said = rag.answer("so?", ["used"], **NEW).tokens
        rag._attached.db.update("rag/gone/1of1", ttl=0.001)
        before = [one[:5] for one in told(rag) if one[0] != "gone"]
        expires = {info.id: info.expires_seconds for info in rag.documents()}
    with (
        open_store(tmp_path) as engine,
        RagEngine(model, Characters(), Client(engine), chunk_tokens=24) as rag,
    ):
        until(lambda: len(rag.documents()) == 2)
        assert [one[:5] for one in told(rag)] == before
        assert [info.resident for info in rag.documents()] == [False, False]
        assert rag.documents()[1].expires_seconds == pytest.approx(expires["used"], abs=60)
        assert rag.answer("so?", ["used"], **NEW).tokens == said
        assert [info.used for info in rag.documents()] == [0, 2]


def test_documents_are_listed_page_by_page(rag, monkeypatch):
    monkeypatch.setattr("engine_adapter.rag.documents.PAGE_CONTEXTS", 2)
    for number in range(5):
        rag.add(str(number), f"text {number}")
    assert [info.id for info in rag.documents()] == list("01234")
