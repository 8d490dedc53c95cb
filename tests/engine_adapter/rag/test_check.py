"""Blended answers against full prefill."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.rag.check import Check, CheckPrompt, CheckRow, check, f1
from kvdb.errors import InvalidArgument, NotFound


def test_a_check_compares_with_the_models_own_answers(rag, write):
    for i in range(4):
        rag.add(f"{i}", write(70, seed=i))
    whole = rag.answer("and so?", ["2", "0"], recompute=1, max_new_tokens=6, do_sample=False).text
    told = []
    found = rag.check(
        [("and so?", ["2", "0"], whole.upper()), ("why", ["1", "3"], lambda text: False), ("what", ["1"])],
        ratios=(0, 0.5, 1, None),
        max_new_tokens=6,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, 15) for done in range(1, 16)], "three prompts, at four ratios and by a full prefill"
    assert [row.ratio for row in found.rows[:3]] == [0, 0.5, 1]
    assert (found.rows[2].same, found.rows[2].leading, found.rows[2].right) == (1, 1, 0.5)
    assert found.rows[2].texts == found.full.texts
    assert found.full.right == 0.5
    assert found.rows[0].recomputed == 0 < found.rows[1].recomputed < found.rows[2].recomputed
    assert found.rows[0].leading <= 1
    assert found.rows[2].f1 == 1
    assert found.rows[2].kl < 1e-5 < found.rows[0].kl
    assert found.rows[2].nll == pytest.approx(found.full.nll, abs=1e-4)
    assert (found.full.f1, found.full.kl) == (1, 0)
    chosen = found.rows[3]
    assert chosen.chosen
    assert 0 < chosen.ratio <= 1
    lines = str(found).splitlines()
    assert len({len(line) for line in lines[:-2]}) == 1
    assert lines[4].lstrip().startswith(f"chosen {chosen.ratio:.2f}")
    assert lines[5].startswith("full prefill")
    assert "100.0%" in lines[3]
    assert lines[-2].startswith("3 prompts")


def test_a_table_without_known_answers_says_so():
    rows = tuple(
        CheckRow(ratio, same, same, same, 0, 1, None, 0.1, 0, ("",))
        for ratio, same in ((0, 0.99), (0.1, 0.5), (0.3, 0.98), (1, 1.0))
    )
    found = Check(rows, CheckRow(None, 1, 1, 1, 0, 1, None, 0.2, 0, ("",)))
    assert " - " in str(found)
    assert "2.0x" in str(found)


def test_what_is_right():
    assert CheckPrompt("q", [], "4 8 2").right(" 4  8 2.")
    assert not CheckPrompt("q", [], "4 8 2").right("48 2")
    assert CheckPrompt("q", [], str.isupper).right("ABC")
    assert CheckPrompt("q", []).right("x") is None


def test_samples_that_cannot_be(rag):
    rag.add("one", "text")
    for sample in (["question"], [("q",)], [("q", ["one"], "x", "y")], []):
        with pytest.raises(InvalidArgument):
            rag.check(sample)
    with pytest.raises(InvalidArgument):
        rag.check([("q", ["one"])], ratios=())
    with pytest.raises(InvalidArgument, match="ratio"):
        rag.check([("q", ["one"])], ratios=(2,))
    with pytest.raises(NotFound):
        rag.check([("q", ["none"])])


def test_a_check_can_be_of_anything_that_answers():
    with pytest.raises(InvalidArgument, match="at least one of both"):
        check([], [0.1], blended=lambda asked, ratio: None, fed=lambda asked, ratio, tokens: None, full=lambda asked: None)


@given(*[st.lists(st.sampled_from(["red", "Blue", "green.", "4"]), max_size=6).map(" ".join)] * 2)
def test_f1_is_of_the_words_that_both_have(text, whole):
    """The oracle counts pairs of equal words one by one."""
    ours, theirs = ([word.strip(".").lower() for word in each.split()] for each in (text, whole))
    left = list(theirs)
    common = sum(left.remove(word) is None for word in ours if word in left)
    expected = 2 * common / (len(ours) + len(theirs)) if ours or theirs else 1
    assert f1(text, whole) == pytest.approx(expected)
    assert f1(text, whole) == f1(whole, text)
