"""The programs that readers copy from run as they stand, and are short."""

import importlib

import pytest

from tests.architecture.source import ROOT

PROGRAMS = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread):
    """Everywhere here."""


def run(name: str, capsys: pytest.CaptureFixture[str], *given: object) -> str:
    importlib.import_module(f"examples.{name}").main(*given)
    return capsys.readouterr().out


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_compiles_and_is_under_sixty_lines(program):
    text = program.read_text()
    compile(text, program, "exec")
    assert len(text.splitlines()) < 60


def test_a_database_in_the_process_finds_what_it_stored(capsys):
    said = run("embedded", capsys)
    assert "4000 of 4003 tokens need no prefill" in said
    assert "4,003 tokens are found" in said


def test_a_model_answers_right_from_what_another_opening_of_the_store_left(capsys, tmp_path):
    said = run("transformers_store", capsys, tmp_path / "store")
    assert (said.count("(right"), said.count("(wrong")) == (3, 0)


def test_documents_answer_right_in_two_orders(capsys):
    said = run("documents_chat", capsys)
    assert (said.count("; right;"), said.count("; wrong;")) == (2, 0)


def test_a_second_process_finds_what_the_first_client_stored(capfd):
    importlib.import_module("examples.server_and_clients").main()
    assert "finds 1000 tokens" in capfd.readouterr().out


def test_the_error_stays_within_its_budget_and_is_explained(capsys):
    said = run("error_budget", capsys)
    assert "before any proof the error is 0.0e+00" in said
    assert float(said.partition("it is at most ")[2].split()[0]) <= 0.02
    assert "Rule: " in said
