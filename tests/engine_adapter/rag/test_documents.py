"""Documents come, stay and go."""

from dataclasses import replace

import pytest

import kvdb
from engine_adapter.rag import RagEngine
from kvdb.client.client import Client
from kvdb.config import Config, StorageConfig
from kvdb.errors import AlreadyExists, CapacityError, InvalidArgument, NotFound, Unavailable, Unsupported
from kvdb.types import ContextUpdate
from tests.engine_adapter.rag.characters import Characters
from tests.waiting import until

NEW = {"max_new_tokens": 2}


def ids(rag):
    return [info.id for info in rag.documents()]


def test_a_document_is_stored_as_chunks(rag, names, write):
    seen = []
    info = rag.add("report/2024", write(60), progress=lambda *done: seen.append(done))
    assert names() == [f"rag/report/2024/{n}of3" for n in (1, 2, 3)]
    assert (info.id, info.tokens, info.chunks, info.pinned, info.used) == ("report/2024", 60, 3, False, 0)
    assert info.nbytes > 0
    assert [total for _, total in seen] == [60, 60, 60]
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (60, 60)
    (again,) = rag.documents()
    assert replace(again, age_seconds=0) == replace(info, age_seconds=0)


def test_the_same_text_is_stored_once(rag, engine, write):
    rag.add("one", write(60))
    (before,) = [tier.blocks_used for tier in engine.tiers()]
    rag.add("two", write(60))
    assert [tier.blocks_used for tier in engine.tiers()] == [before]
    rag.delete("one")
    assert rag.answer("so?", ["two"], **NEW).usage.reused > 0


def test_an_id_is_taken_until_it_is_free(rag, write, names):
    rag.add("one", write(60))
    with pytest.raises(AlreadyExists, match="document 'one'"):
        rag.add("one", "other")
    assert rag.add("one", "other", replace=True).tokens == 5
    assert names() == ["rag/one/1of1.r1"]
    rag.delete("one")
    assert rag.add("one", "new").tokens == 3
    with pytest.raises(NotFound, match="no document 'two'"):
        rag.delete("two")
    assert rag.add("two", "new", replace=True).chunks == 1


@pytest.mark.parametrize("doc_id", [7, None, b"one", "", ["one"], ("a", "b")])
def test_ids_are_strings(rag, names, doc_id):
    for call in (
        lambda: rag.add(doc_id, "some text"),
        lambda: rag.delete(doc_id),
        lambda: rag.pin(doc_id),
        lambda: rag.answer("so?", [doc_id], **NEW),
    ):
        with pytest.raises(InvalidArgument, match="a string that is not empty"):
            call()
    assert names() == []


@pytest.mark.parametrize("docs", ["one", 7, None])
def test_docs_are_a_list_of_ids(rag, docs):
    with pytest.raises(InvalidArgument, match="expected a list of documents' ids"):
        rag.answer("so?", docs, **NEW)


@pytest.mark.parametrize("db", [7, None])
def test_a_database_is_a_client_or_its_target(model, db):
    with pytest.raises(InvalidArgument, match=r"expected what kvdb\.connect\(.*\) returns"):
        RagEngine(model, Characters(), db)


def test_a_replacement_that_fails_leaves_the_document(rag, names):
    rag.add("one", "some text")
    with pytest.raises(RuntimeError, match="stop"):
        rag.add("one", "x" * 90, replace=True, progress=_stop)
    assert names() == ["rag/one/1of1"]
    with pytest.raises(RuntimeError, match="stop"):
        rag.add("two", "x" * 90, progress=_stop)
    assert names() == ["rag/one/1of1"]
    assert rag.add("two", "y").chunks == 1


def _stop(done, total):
    raise RuntimeError("stop")


@pytest.mark.parametrize("text", ["", [], [101], [-1], [[1, 2]], [0.5]])
def test_a_text_that_cannot_be(rag, names, text):
    with pytest.raises(InvalidArgument, match="document 'one'"):
        rag.add("one", text)
    assert not names()


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), True])
def test_a_time_to_live_that_cannot_be(rag, ttl):
    with pytest.raises(InvalidArgument, match="ttl"):
        rag.add("one", "text", ttl=ttl)
    with pytest.raises(InvalidArgument, match="document's id"):
        rag.add("", "text")


def test_a_document_expires(rag, engine, names):
    rag.add("soon", "text", ttl=1000, pin=True)
    rag.add("later", "text two", ttl=2000)
    rag.add("never", "text three")
    left = {info.id: info.expires_seconds for info in rag.documents()}
    assert 990 < left["soon"] <= 1000
    assert 1990 < left["later"] <= 2000
    assert left["never"] is None
    engine.update("rag/soon/1of1", ContextUpdate(ttl=0.001))
    until(lambda: ids(rag) == ["later", "never"])
    with pytest.raises(NotFound, match="'soon': it was never added, was deleted, has expired"):
        rag.answer("so?", ["soon"])
    assert names() == ["rag/later/1of1", "rag/never/1of1"]


@pytest.fixture
def small(make_rag):
    """Room for three documents of one chunk."""
    rag = make_rag()
    size = rag.add("probe", "x").nbytes
    rag.delete("probe")
    rag.close()
    return make_rag(memory_bytes=3 * size)


def test_what_was_not_used_for_longest_goes_first(small, names):
    for doc_id in "abc":
        small.add(doc_id, f"{doc_id} text")
    small.answer("so?", ["a"], **NEW)
    small.add("d", "d text")
    assert ids(small) == ["a", "c", "d"]
    small.pin("a")
    small.pin("c")
    small.add("e", "e text")
    assert ids(small) == ["a", "c", "e"]
    small.pin("a", pinned=False)
    small.add("f", "f text", pin=True)
    assert ids(small) == ["c", "e", "f"]
    assert names() == [f"rag/{doc_id}/1of1" for doc_id in "cef"]


def test_pinned_documents_stay_and_then_there_is_no_room(small):
    for doc_id in "abc":
        small.add(doc_id, f"{doc_id} text", pin=True)
    with pytest.raises(CapacityError, match="document 'd' and what is pinned take"):
        small.add("d", "d text")
    with pytest.raises(CapacityError, match="memory_bytes"):
        small.add("long", "x y z " * 5000)
    assert ids(small) == ["a", "b", "c"]
    small.add("same", "a text")
    assert ids(small) == ["a", "b", "c", "same"], "a text that is stored takes no room"
    with pytest.raises(NotFound):
        small.pin("nothing")


def test_what_there_is_no_room_for_can_go_to_disk(model, tmp_path):
    with kvdb.connect(config=Config(storage=StorageConfig(disk_path=str(tmp_path)))) as db:
        with RagEngine(model, Characters(), db) as rag:
            size = rag.add("a", "a text").nbytes
        with RagEngine(model, Characters(), db, memory_bytes=2 * size, offload=True) as rag:
            before = rag.answer("so?", ["a"], **NEW).tokens
            for doc_id in "bcd":
                rag.add(doc_id, f"{doc_id} text")
            assert [info.resident for info in rag.documents()] == [False, False, True, True]
            assert rag.answer("so?", ["a"], **NEW).tokens == before
            assert [info.resident for info in rag.documents()] == [True, False, False, True]
            assert rag.answer("so?", list("abcd"), **NEW).usage.prompt == 27
            assert all(info.resident for info in rag.documents())
            rag.pin("a")
            rag.add("e", "e text")
            assert [info.id for info in rag.documents() if info.resident] == ["a", "e"]
            rag.delete("b")
        assert not [context for context in db.contexts() if context.name.startswith("rag/b")]


def test_offloading_without_a_folder_is_refused(small, make_rag):
    nbytes = small.add("a", "text").nbytes
    small.close()
    rag = make_rag(memory_bytes=nbytes, offload=True)
    with pytest.raises(Unsupported, match="disk_path"):
        rag.add("b", "b text")
    assert [(info.id, info.resident) for info in rag.documents()] == [("a", True)]


def test_a_replacement_makes_room_as_if_the_old_were_gone(small):
    for doc_id in "abc":
        small.add(doc_id, f"{doc_id} text", pin=True)
    small.add("b", "another", replace=True)
    assert ids(small) == ["a", "b", "c"]


def test_an_answer_goes_on_over_a_document_that_is_dropped(rag, names, engine):
    rag.add("one", "some text")
    taken = [tier.blocks_used for tier in engine.tiers()]
    text = rag.answer("so?", ["one"], max_new_tokens=4, do_sample=False).text
    seen = []

    def drop(_):
        if "one" in ids(rag):
            rag.delete("one")
        seen.append((names(), [tier.blocks_used for tier in engine.tiers()] >= taken))

    answer = rag.answer("so?", ["one"], stream=drop, max_new_tokens=4, do_sample=False)
    assert answer.text == text
    assert seen
    assert all(named == [] and held for named, held in seen)
    assert not any(tier.blocks_used for tier in engine.tiers())
    assert rag.add("one", "another text").chunks == 1


def test_an_engine_finds_what_the_one_before_it_left(make_rag, write, names):
    first = make_rag()
    first.add("one", write(60))
    first.add("two", "old")
    first.add("two", "replaced", replace=True)
    before = [(info.id, info.tokens, info.chunks) for info in first.documents()]
    first.close()
    second = make_rag()
    assert [(info.id, info.tokens, info.chunks) for info in second.documents()] == before
    assert second.answer("so?", ["two", "one"], **NEW).usage.prompt == 71
    second.close()
    assert make_rag(namespace="other").documents() == []


def test_a_document_that_was_not_whole_is_none(make_rag, engine, model, write, names):
    rag = make_rag()
    rag.add("one", write(60))
    rag.close()
    engine.drop("rag/one/2of3")
    rag = make_rag()
    assert rag.documents() == []
    rag.add("one", "new")
    assert names() == ["rag/one/1of1.r1"]


def test_an_engine_closes_the_store_that_it_opened(model, tmp_path):
    for target in (tmp_path, str(tmp_path)):
        with RagEngine(model, Characters(), target) as rag:
            rag.upsert("a", "some text")
            with pytest.raises(Unavailable, match="in this very process"):
                kvdb.connect(tmp_path)
        with kvdb.connect(tmp_path) as db:
            assert [context.name for context in db.contexts()] == ["rag/a/1of1"]
    with pytest.raises(InvalidArgument, match="chunk_tokens"):
        RagEngine(model, Characters(), tmp_path, chunk_tokens=0)
    with kvdb.connect(tmp_path) as db, RagEngine(model, Characters(), db) as rag:
        rag.close()
        assert db.contexts(), "a database that is handed in stays open"


def test_a_model_is_attached_once(rag, model, engine):
    with pytest.raises(InvalidArgument, match="attached"):
        RagEngine(model, Characters(), Client(engine))
