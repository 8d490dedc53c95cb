"""The demo, on a short document: a real server process, real answers, and the tokens of plain transformers."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine_adapter.models import vault
from kvdb.__main__ import main


def test_the_demo_answers_right_and_says_so(capsys):
    assert main(["demo", "--tokens", "1500", "--facts", "10", "--questions", "3", "--seed", "1", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "ready on kvdb://127.0.0.1:" in said
    assert "3 of 3 answers are right; all 18 tokens equal those of plain transformers." in said
    plan = said[said.index("Merge on layer") :].splitlines()
    assert "(actual time=" in plan[0]
    assert plan[3].startswith("  ->  Exact Scan on segment ")
    assert any(line.startswith("Missed: 0.00% of the softmax mass") for line in plan)
    assert "Nothing was searched or compared: reading this much takes no longer than a search." in said


def test_what_a_newcomer_sees_are_questions_answers_and_times_and_where_the_log_is(capsys):
    assert main(["demo", "--tokens", "1500", "--facts", "10", "--questions", "2", "--seed", "1"]) == 0
    said = capsys.readouterr().out
    table = [line.split() for line in said[said.index("Beside plain transformers") :].splitlines()]
    head = table.index(["question", "answer", "kvdb", "plain", "faster", "tokens"])
    for row in table[head + 1 : head + 3]:
        assert re.fullmatch(r"Vault \w+ \w+ \d{5} right \S+ ms \S+ s \d+x the same", " ".join(row))
    assert "Merge on layer" not in said
    last = said.splitlines()[-1]
    assert Path(last.removeprefix("The server's log: ")).stat().st_size > 0
    assert len(max(said.splitlines(), key=len)) <= 100


def test_a_demo_that_searches_shows_what_the_search_took(capsys):
    flags = ["--tokens", "4500", "--facts", "10", "--questions", "2", "--seed", "1", "--retrieval", "dipr", "--explain"]
    assert main(["demo", *flags]) == 0
    said = capsys.readouterr().out
    first, stored, answers = (said.index(words) for words in ("2,048 tokens reused", "stored as", "4,500 tokens reused"))
    assert first < stored < answers, "an answer comes before all of the document is there"
    (search,) = (line for line in said.splitlines() if "Index Search using flat on segment" in line)
    assert "(actual time=" in search
    assert "Execution Time: " in said


def test_a_missing_library_is_told_before_anything_is_loaded():
    """In a process of its own, in which torch cannot be imported."""
    program = "import sys; sys.modules['torch'] = None; from kvdb.__main__ import main; sys.exit(main(['demo']))"
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert ended.stderr == "kvdb: the demo needs torch, which is not installed; pip install 'kvdb[demo]'\n"
    assert (ended.stdout, ended.returncode != 0) == ("", True)


def test_a_document_is_the_same_for_a_seed_and_holds_its_facts(vault_model):
    _, tokenizer = vault_model
    document, again, other = (vault.document(tokenizer, 3000, 20, seed) for seed in (5, 5, 6))
    assert document == again
    assert document.ids != other.ids
    assert len(document.ids) == 3000
    text = tokenizer.decode(document.ids)
    assert all(fact.sentence in text for fact in document.facts)
    fact = random.Random(0).choice(document.facts)
    assert fact.answered_by(" " + " ".join(fact.code) + ". and so on")
    assert not fact.answered_by(" " + " ".join(fact.code[:-1]))


@pytest.mark.parametrize("flags", [["--tokens", "10"], ["--facts", "0"], ["--facts", "99999999"], ["--questions", "0"]])
def test_a_demo_that_cannot_be_is_one_line(flags, capsys):
    assert main(["demo", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1
