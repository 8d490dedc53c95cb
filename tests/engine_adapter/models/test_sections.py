"""The sections model and its documents: every kind of question, whole and with chunks that were computed alone."""

import pytest
import torch

from engine_adapter.models import sections
from kvdb.errors import InvalidArgument

CHUNK = 128


@pytest.fixture
def shipped(sections_model):
    return sections_model


def right(shipped, document, chunk):
    """The share of right answers of each kind; the tokens of a chunk see that chunk alone, a question sees everything.

    The digits asked for stand behind the question, and each has to be the most probable one: that is greedy decoding.
    """
    model, tokenizer = shipped
    texts = [question.text + " " + " ".join(question.code) for question in document.questions]
    asked = torch.tensor([tokenizer.encode(text, add_special_tokens=False) for text in texts])
    told, length = len(document.ids), asked.shape[1]
    ids = torch.cat([torch.tensor(document.ids), asked.flatten()])
    place = torch.arange(len(ids))
    part = torch.where(place < told, place // chunk, told + (place - told) // length)
    seen = (place[:, None] >= place) & ((part[:, None] == part) | ((place[:, None] >= told) & (place < told)))
    positions = torch.where(place < told, place, told + (place - told) % length)
    with torch.no_grad():
        logits = model(ids[None], attention_mask=seen[None, None], position_ids=positions[None]).logits[0, told:]
    said = logits.view(*asked.shape, -1).argmax(-1)[:, 2:-1]
    whole = (said == asked[:, 3:]).all(1)
    kinds = [question.kind for question in document.questions]
    return {kind: whole[[other == kind for other in kinds]].float().mean().item() for kind in set(kinds)}


def test_it_answers_every_kind_of_question_and_chunks_alone_do_not(shipped):
    document = sections.document(shipped[1], 2048, seed=3, facts=16)
    whole, alone = (right(shipped, document, chunk) for chunk in (2048, CHUNK))
    assert whole.keys() == {"chunk", "border", "heading"}
    assert min(whole.values()) >= 0.87
    assert alone["chunk"] >= 0.87
    assert alone["border"] <= 0.25
    assert alone["heading"] <= 0.6


def test_it_goes_on_with_the_digits(shipped):
    model, tokenizer = shipped
    document = sections.document(tokenizer, 1024, seed=1, sections=5, records=9, facts=2)
    question = next(question for question in document.questions if question.kind == "heading")
    ids = torch.tensor([document.ids + tokenizer.encode(question.text, add_special_tokens=False)])
    out = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert question.answered_by(tokenizer.decode(out[0, ids.shape[1] :]))
    assert not question.answered_by(" " + " ".join(question.code[:-1]))


def test_a_document_is_the_same_for_a_seed(shipped):
    document, again, other = (sections.document(shipped[1], 2000, seed=seed) for seed in (5, 5, 6))
    assert document == again
    assert document.ids != other.ids
    assert len(document.ids) == 2000


@pytest.mark.parametrize(("tokens", "parts", "chunk"), [(2048, 8, 128), (4096, 12, 128), (3000, 7, 100)])
def test_every_kind_is_what_it_says(shipped, tokens, parts, chunk):
    _, tokenizer = shipped
    document = sections.document(tokenizer, tokens, seed=tokens, sections=parts, facts=9, chunk=chunk)
    kinds = [question.kind for question in document.questions]
    assert [kinds.count(kind) for kind in ("chunk", "border", "heading")] == [5, 4, 24]
    headings = [i for i, word in enumerate(document.ids) if tokenizer.decode([word])[1:] in sections.HEADINGS]
    assert len(headings) == parts
    for question in document.questions:
        sentence, digits = tokenizer.decode(document.ids[question.begin : question.end]), " ".join(question.code)
        _, first, second = question.text.split()
        if question.kind == "heading":
            assert sentence == f" Vault same {second} {digits}."
            assert question.heading == max(place for place in headings if place < question.begin)
            assert tokenizer.decode([document.ids[question.heading]]) == f" {first}"
            assert question.heading // chunk < question.begin // chunk
        else:
            assert sentence == f" Vault {first} {second} {digits}."
            across = question.begin // chunk != (question.end - 1) // chunk
            assert across == (question.kind == "border")
            assert question.heading is None


def test_a_record_alone_answers_nothing(shipped):
    document = sections.document(shipped[1], 3000, seed=0, sections=9)
    records = [question for question in document.questions if question.kind == "heading"]
    under = [[other.text for other in records if other.text.split()[2] == record.text.split()[2]] for record in records]
    assert all(len(set(texts)) == len(texts) for texts in under)
    assert sum(len(texts) >= 3 for texts in under) >= len(records) - 2


@pytest.mark.parametrize(
    ("tokens", "wrong"),
    [
        (2048, {"sections": 2}),
        (2048, {"sections": 28}),
        (2048, {"records": -1}),
        (2048, {"facts": -1}),
        (2048, {"facts": 99_999}),
        (2048, {"records": 90}),
        (60, {"records": 3, "sections": 3, "facts": 9}),
        (5, {}),
        (2048, {"chunk": 0}),
        (10**7, {}),
    ],
)
def test_what_has_no_room_is_refused(shipped, tokens, wrong):
    with pytest.raises(InvalidArgument):
        sections.document(shipped[1], tokens, seed=0, **wrong)
