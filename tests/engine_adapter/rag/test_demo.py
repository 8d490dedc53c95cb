"""`kvdb demo rag`, small, and the documents that it makes."""

import pytest

import engine_adapter.demo.rag as demo
from engine_adapter.demo.library import library, prompts
from kvdb.__main__ import main


@pytest.fixture
def tokenizer(sections_model):
    return sections_model[1]


def test_the_demo_answers_one_question_after_the_other_and_checks(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    said, full_answer = [], demo.full_answer

    def look_on(*given, **options):
        said.append(capsys.readouterr().out)
        return full_answer(*given, **options)

    monkeypatch.setattr(demo, "full_answer", look_on)
    flags = ["--documents", "6", "--together", "3", "--questions", "2", "--checked", "1"]
    assert main(["demo", "rag", *flags]) == 0
    assert [part.count(" right ") for part in said] == [0, 1], "the first answer is there before the second question is asked"
    text = "".join([*said, capsys.readouterr().out])
    assert "6 documents of Python's documentation" in text
    assert "2 of 2 answers are right, 2 with a full prefill" in text
    assert text.count(" right ") == 3, "two answers, and a heading of the check"
    assert "\nfull prefill  100.0%" in text
    assert "Exact Scan on overlay" in text
    assert max(map(len, text.splitlines())) <= 130


def test_a_library_is_cut_where_headings_stand(tokenizer):
    held, again = (library(tokenizer, 10, seed=4) for _ in range(2))
    assert held == again
    assert len(held.documents) == 10
    assert held.tokens == 3600
    for title, ids in held.documents.items():
        assert tokenizer.decode(ids).startswith(f" Section {title}.")
    for question, home in zip(held.questions, held.homes, strict=True):
        assert " ".join(question.code) in tokenizer.decode(held.documents[home])
        assert question.kind != "heading" or question.text.split()[1] == home


def test_prompts_hold_the_document_that_answers(tokenizer):
    held = library(tokenizer, 10, seed=4)
    asked = prompts(held, 20, 5, seed=1)
    assert asked == prompts(held, 20, 5, seed=1)
    assert all(prompt.home in prompt.titles and len(set(prompt.titles)) == 5 for prompt in asked)
    assert len({prompt.titles for prompt in asked}) == 20


@pytest.mark.parametrize(
    "flags", [["--documents", "2"], ["--documents", "99"], ["--together", "0"], ["--questions", "0"], ["--checked", "999"]]
)
def test_a_demo_that_cannot_be_is_one_line(flags, capsys):
    assert main(["demo", "rag", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1
