"""Answers from documents in any order, whole and in pieces."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kvdb
from engine_adapter.rag import RagEngine, Usage
from engine_adapter.rag.answers import Pieces, text_of
from kvdb.client.client import Client
from kvdb.errors import InvalidArgument, NotFound, SessionClosed
from tests.engine_adapter.rag.characters import Bytes, Characters
from tests.engine_adapter.tiny import build

NEW = {"max_new_tokens": 8, "do_sample": False}


def plain(model, text):
    """The model's answer when it reads all of a text itself."""
    ids = torch.tensor([Characters().encode(text)])
    return tuple(model.generate(ids, **NEW)[0, ids.shape[1] :].tolist())


@pytest.fixture
def documents(rag, write):
    texts = {f"doc {i}": write(30 + 11 * i, seed=i) for i in range(6)}
    for doc_id, text in texts.items():
        rag.add(doc_id, text)
    return texts


def test_with_everything_recomputed_it_is_a_full_prefill(rag, model, documents):
    for seed in range(4):
        order = random.Random(seed).sample(list(documents), 4)
        answer = rag.answer("and so?", order, recompute=1, **NEW)
        assert answer.tokens == plain(model, "".join(documents[doc_id] for doc_id in order) + "and so?")
        assert answer.text == str(answer) == Characters().decode(answer.tokens)


def test_usage_counts_every_token_of_the_prompt_once(rag, documents):
    tokens = sum(map(len, documents.values()))
    for ratio in (0, 0.3, 1):
        usage = rag.answer("and so?", list(documents), recompute=ratio, **NEW).usage
        assert usage.prompt == tokens + 7 == usage.reused + usage.recomputed + usage.fresh
        assert (usage.fresh, usage.generated) == (7, 8)
        assert usage.ratio == pytest.approx(ratio, abs=0.15)
        assert usage.prompt <= usage.read == usage.context <= usage.prompt + 8
        assert 0 < usage.first_token_seconds < usage.seconds


def test_usage_is_told_in_a_line():
    usage = Usage(1010, 850, 150, 10, 8, 505, 1015, 0.25, 0.5)
    said = "850 tokens reused, 150 recomputed (15.0%), 10 fresh, 8 generated, 505 of 1,015 read a step; first token after 250 ms"
    assert str(usage) == said


def test_retrieval_goes_along_and_is_counted(rag, write):
    rag.add("long", write(700))
    answer = rag.answer("so?", ["long"], retrieval=kvdb.TopK(4), **NEW)
    assert answer.report.explain.actual is None
    assert 0 < answer.usage.read <= answer.usage.context


def test_a_document_may_come_several_times(rag, model, documents):
    order = ["doc 1", "doc 1", "doc 3", "doc 1"]
    answer = rag.answer("and so?", order, recompute=1, **NEW)
    assert answer.tokens == plain(model, "".join(documents[doc_id] for doc_id in order) + "and so?")
    assert [info.used for info in rag.documents()] == [0, 1, 0, 1, 0, 0]


def test_hundreds_of_documents_in_one_prompt(make_rag, write):
    rag = make_rag(chunk_tokens=64)
    ids = [f"{i:03}" for i in range(300)]
    for i, doc_id in enumerate(ids):
        rag.add(doc_id, write(3, seed=i))
    rag._attached.db.compact()  # so that nothing is left for the background to lay out
    stored = sum(info.nbytes for info in rag.documents())
    random.Random(0).shuffle(ids)
    answer = rag.answer("so?", ids, max_new_tokens=2)
    assert answer.usage.prompt == 903
    assert sum(info.nbytes for info in rag.documents()) == stored


def test_novel_orders_store_nothing(rag, engine, documents):
    def taken():
        return [tier.blocks_used for tier in engine.tiers()]

    before = taken()
    for seed in range(20):
        rag.answer("so?", random.Random(seed).sample(list(documents), 6), max_new_tokens=1)
    assert taken() == before


def test_no_documents_are_a_plain_prompt(rag, model):
    assert rag.answer("once upon a time", [], **NEW).tokens == plain(model, "once upon a time")


def test_an_instruction_and_a_template_stand_around_the_documents(make_rag, model):
    rag = make_rag(instruction="Read this. ", template=" Q: {question} A:")
    rag.add("one", "a {text} of words")
    answer = rag.answer("why {x}?", ["one"], recompute=1, **NEW)
    assert answer.tokens == plain(model, "Read this. a {text} of words Q: why {x}? A:")
    assert answer.usage.fresh == len(" Q: why {x}? A:"), "the instruction is stored"


def test_token_ids_stand_for_texts(rag, model):
    ids = Characters().encode("some text of words")
    rag.add("one", torch.tensor(ids))
    answer = rag.answer(Characters().encode("so?"), ["one"], recompute=1, **NEW)
    assert answer.tokens == plain(model, "some text of wordsso?")


def test_pieces_of_a_stream_are_the_text(rag, documents):
    whole = rag.answer("so?", list(documents), **NEW)
    called = []
    assert rag.answer("so?", list(documents), stream=called.append, **NEW).text == "".join(called) == whole.text
    stream = rag.stream("so?", list(documents), **NEW)
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == stream.text == whole.text
    assert stream.usage.generated == 8
    with pytest.raises(InvalidArgument, match="before"):
        list(stream)


def test_a_stream_that_is_left_ends_and_leaves_nothing(rag, engine, documents):
    stream = rag.stream("so?", list(documents), max_new_tokens=400, do_sample=False)
    with pytest.raises(InvalidArgument, match="not there yet"):
        stream.answer  # noqa: B018
    for _ in stream:
        break
    assert stream.usage.generated < 400
    assert not engine.handles
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvdb-rag")]


def test_what_is_wrong_in_a_stream_is_raised_from_it(rag):
    with pytest.raises(NotFound, match="'nowhere'"):
        list(rag.stream("so?", ["nowhere"]))


def test_a_callback_that_raises_ends_the_answer(rag, engine, documents):
    def stop(_):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        rag.answer("so?", list(documents), stream=stop, **NEW)
    assert not engine.handles
    rag.delete("doc 0")
    assert rag.answer("so?", ["doc 1"], **NEW).text


def test_adds_and_answers_in_many_threads(rag, model, documents, write):
    orders = [random.Random(seed).sample(list(documents), 3) for seed in range(6)]

    def work(number):
        if number % 2:
            return rag.add(f"new {number}", write(60, seed=number)).chunks
        return rag.answer("so?", orders[number // 2], recompute=1, **NEW).tokens

    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(work, range(12)))
    assert done[1::2] == [3] * 6
    for order, tokens in zip(orders, done[::2], strict=True):
        assert tokens == plain(model, "".join(documents[doc_id] for doc_id in order) + "so?")


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), True, "much"])
def test_a_ratio_that_cannot_be(rag, documents, ratio):
    with pytest.raises(InvalidArgument, match="ratio"):
        rag.answer("so?", ["doc 1"], recompute=ratio)


def test_questions_and_documents_that_cannot_be(rag, documents):
    with pytest.raises(InvalidArgument, match="question is empty"):
        rag.answer("", ["doc 1"])
    with pytest.raises(InvalidArgument, match="expected 0 to 100"):
        rag.answer([101], ["doc 1"])
    with pytest.raises(InvalidArgument, match="expected a list of documents' ids"):
        rag.answer("so?", "doc 1")
    with pytest.raises(InvalidArgument, match="expected a list of documents' ids"):
        rag.answer("so?", [1])
    with pytest.raises(NotFound, match="no document 'doc 77'"):
        rag.answer("so?", ["doc 1", "doc 77"])


def test_settings_that_cannot_be(make_rag):
    for settings, said in (
        ({"template": "no place"}, "{question}"),
        ({"namespace": "a/b"}, "namespace"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"memory_bytes": 0}, "memory_bytes"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            make_rag(**settings)


def test_after_closing_the_model_is_as_it_was(rag, model, documents):
    rag.close()
    rag.close()
    assert plain(model, "so?")
    for call in (rag.documents, lambda: rag.answer("so?", []), lambda: rag.add("x", "y")):
        with pytest.raises(SessionClosed, match="closed"):
            call()


def test_characters_of_several_tokens_come_whole():
    ids = Bytes().encode("né 漢字 🙂!")
    pieces = []
    streamer = Pieces(Bytes(), pieces.append)
    streamer.put(torch.tensor([Bytes().encode("the prompt")]))
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert pieces == list("né 漢字 🙂!")
    assert text_of(Bytes(), ids) == "né 漢字 🙂!"
    assert text_of(Bytes(), ids[:2]) == "n\N{REPLACEMENT CHARACTER}"


def test_a_model_whose_rope_stretches_positions_has_all_of_them(engine):
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    with RagEngine(build(max_position_embeddings=64, rope_parameters=yarn), Characters(), Client(engine)) as rag:
        assert rag.positions == 128
