"""A document that is changed: only what is new of it is computed."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.rag import Retrieved
from engine_adapter.rag.chunks import recut
from kvdb.errors import InvalidArgument, NotFound
from tests.engine_adapter.rag.characters import Characters
from tests.engine_adapter.rag.test_shared_documents import two  # noqa: F401  # a fixture

NEW = {"max_new_tokens": 4, "do_sample": False}
SIZE = 12


@pytest.fixture
def computed(model):
    """How many tokens the model has read since it was last asked."""
    seen = [0]
    hook = model.get_input_embeddings().register_forward_hook(lambda _, ids, __: seen.append(ids[0].numel()))

    def ask():
        total = sum(seen)
        seen.clear()
        return total

    yield ask
    hook.remove()


def texts(rag, doc_id):
    return [Characters().decode(ids) for ids in rag._documents.token_ids(rag._documents.find(doc_id))]


def test_a_text_that_is_there_is_not_computed(rag, computed, write, names):
    first = rag.upsert("one", write(90), ttl=1000)
    assert computed() == 90
    before = names()
    again = rag.upsert("one", write(90))
    assert computed() == 0
    assert names() == before
    assert (again.tokens, again.chunks, again.pinned) == (first.tokens, first.chunks, False)
    assert 990 < again.expires_seconds <= 1000
    steps = []
    assert rag.upsert("one", write(90), ttl=2000, pin=True, progress=lambda *done: steps.append(done)).pinned
    assert steps == [(90, 90)]
    assert rag.documents()[0].expires_seconds > 1000


def test_only_chunks_that_are_new_are_computed(rag, computed, write):
    text = write(240)
    rag.upsert("one", text)
    old = texts(rag, "one")
    computed()
    changed = text[:100] + "HELLO" + text[103:]
    rag.upsert("one", changed)
    new = texts(rag, "one")
    assert "".join(new) == changed
    assert len(set(old) - set(new)) <= 2
    assert computed() == sum(len(chunk) for chunk in new if chunk not in old) <= 60
    rag.upsert("one", "NEW" * 10 + changed)
    assert 0 < computed() <= 30
    rag.upsert("one", changed[120:] + changed[:120])
    assert computed() <= 3 * 24
    rag.add("one", changed[120:], replace=True)
    assert computed() <= 24
    assert "".join(texts(rag, "one")) == changed[120:]


def test_a_pin_stays_with_a_document_that_is_changed(rag, write):
    rag.add("one", write(30), pin=True)
    assert rag.upsert("one", write(30, seed=1)).pinned
    assert not rag.upsert("one", write(30, seed=2), pin=False).pinned


def test_an_answer_is_that_of_the_new_text(rag, write):
    rag.upsert("one", write(60))
    rag.upsert("one", write(50) + "!")
    rag.add("other", write(50) + "!")
    assert rag.answer("so?", ["one"], recompute=1, **NEW).tokens == rag.answer("so?", ["other"], recompute=1, **NEW).tokens


@given(
    old=st.lists(st.integers(0, 3), max_size=60),
    cuts=st.lists(st.integers(1, 14), min_size=1, max_size=8),
    edits=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.lists(st.integers(0, 5), max_size=9)), max_size=3),
)
def test_a_new_text_is_cut_at_its_old_chunks(old, cuts, edits):
    known, rest = [], old
    for length in cuts:
        known.append(rest[:length])
        rest = rest[length:]
    new = list(old)
    for at, gone, put in edits:
        new[at : at + gone] = put
    chunks = recut(new, known, SIZE, lambda ids: "".join("abc.\n "[i] for i in ids))
    assert [i for chunk in chunks for i in chunk] == new
    assert all(0 < len(chunk) <= max(SIZE, *cuts) for chunk in chunks)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=90))
def test_an_equal_text_has_its_old_chunks(ids):
    def text_of(some):
        return "".join("abc.\n "[i] for i in some)

    known = recut(ids, [], SIZE, text_of)
    assert (
        recut(ids, known, SIZE, text_of) == known or Counter(map(tuple, known)).most_common(1)[0][1] > 1 or _overlap(ids, known)
    )


def _overlap(ids, known):
    """Whether an old chunk stands somewhere else in the text too, and so may be taken there."""
    found = (tuple(ids[at : at + len(chunk)]) == tuple(chunk) for chunk in known for at in range(len(ids)))
    return sum(found) > len(known)


def test_a_chunk_is_found_at_tokens_alone():
    """Bytes of two neighbours may look like a token between them."""
    assert recut([1 << 8, 1, 7], [[1 << 24]], SIZE, str) == [[1 << 8, 1, 7]]
    assert recut([0, 0, 1, 5, 6], [[1, 5]], 4, str) == [[0, 0], [1, 5], [6]]


def test_documents_of_a_retriever_are_added_and_answered_from(rag, write, computed):
    docs = [Retrieved("a", write(30)), {"id": "b", "text": write(40, seed=1)}, SimpleNamespace(id=None, text="some text")]
    answer = rag.answer("so?", docs, **NEW)
    assert answer.usage.prompt == 30 + 40 + 9 + 3
    assert [info.id for info in rag.documents()][:2] == ["a", "b"]
    computed()
    assert rag.answer("so?", docs, recompute=0, **NEW).tokens
    assert computed() == 3 + 3, "the question, and new tokens"
    named = [info.id for info in rag.documents()]
    assert rag.answer("so?", ["b", docs[0], {"id": named[2]}], **NEW).usage.prompt == answer.usage.prompt
    changed = rag.answer("so?", [Retrieved("a", "another"), "b"], **NEW)
    assert changed.usage.prompt == 7 + 40 + 3
    assert "".join(rag.stream("so?", docs, **NEW))
    assert texts(rag, "a")[0] == write(30)[: len(texts(rag, "a")[0])]


def test_a_document_of_the_same_answer_does_not_go_for_another(make_rag):
    rag = make_rag()
    size = rag.add("probe", "x").nbytes
    rag.delete("probe")
    rag.close()
    rag = make_rag(memory_bytes=3 * size)
    for doc_id in "abc":
        rag.add(doc_id, f"{doc_id} text")
    assert rag.answer("so?", ["a", Retrieved("d", "d text"), "c"], **NEW).usage.prompt == 21
    assert [info.id for info in rag.documents()] == ["a", "c", "d"]


@pytest.mark.parametrize("doc", [{}, {"id": 7}, {"text": 7}, {"id": "a", "text": 7}, {"id": "", "text": ""}, SimpleNamespace()])
def test_what_is_no_document_of_a_retriever(rag, doc):
    with pytest.raises(InvalidArgument, match="expected a list of documents' ids"):
        rag.answer("so?", [doc], **NEW)


def test_an_id_has_one_text(rag):
    with pytest.raises(InvalidArgument, match="document 'a' comes with two texts"):
        rag.answer("so?", [Retrieved("a", "x"), Retrieved("a", "y")], **NEW)
    assert rag.answer("so?", [Retrieved("a", "x"), "a", Retrieved("a", "x")], **NEW).usage.prompt == 6
    with pytest.raises(NotFound, match="no document 'b'"):
        rag.answer("so?", [Retrieved("a", "x"), "b"], **NEW)


def test_engines_that_upsert_the_same_at_once_agree(two, write):  # noqa: F811
    first, second = two
    together = threading.Barrier(2)
    failed = []

    def upsert(rag):
        try:
            for version in range(2):
                together.wait(timeout=60)
                rag.upsert("one", write(40 + 45 * version, seed=version % 2))
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=upsert, args=(rag,)) for rag in two]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failed
    assert [(info.id, info.tokens) for info in first.documents()] == [("one", 85)]
    assert "".join(texts(second, "one")) == write(85, seed=1)
    assert len({context.name.rpartition(".r")[2] for context in first._attached.db.contexts("rag/one/")}) == 1
