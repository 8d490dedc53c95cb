"""Which documents are found in a prompt, and which marks are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.vllm.marks import BlendOptions, Marked
from kvdb.errors import InvalidArgument

OPEN, CLOSE = (1, 2), (3,)
OPTIONS = BlendOptions(OPEN, CLOSE, 0.2)


@given(st.lists(st.tuples(st.lists(st.integers(4, 9)), st.lists(st.integers(4, 9))), max_size=4), st.lists(st.integers(4, 9)))
def test_documents_stand_between_their_marks(pairs, tail):
    tokens, spans = [], []
    for before, document in pairs:
        tokens += [*before, *OPEN]
        if document:
            spans.append((len(tokens), len(tokens) + len(document)))
        tokens += [*document, *CLOSE]
    assert OPTIONS.find([*tokens, *tail], {}) == (Marked(tuple(spans), 0.2) if spans else None)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([9, 1, 2, 5, 6], "does not close"),
        ([1, 2, 5, 1, 2, 6, 3], "is open where another opens"),
        ([5, 3, 1, 2, 6, 3], "where none is open"),
        ([1, 2, 5, 3, 3], "where none is open"),
    ],
)
def test_marks_that_do_not_close_are_refused(tokens, reason):
    with pytest.raises(InvalidArgument, match=reason):
        OPTIONS.find(tokens, {})


def test_a_request_says_its_own_documents_and_ratio():
    given = {"kvdb_parts": [[0, 2], [2, 4]], "kvdb_recompute": 1}
    assert OPTIONS.find([1, 2, 5, 6, 7], given) == Marked(((0, 2), (2, 4)), 1.0)
    assert BlendOptions().find([1, 2, 5, 6, 7], {}) is None
    assert OPTIONS.find([1, 2, 5], {"kvdb_parts": []}) is None


@pytest.mark.parametrize("spans", [5, [3], [[1, 2, 3]], [[2, 1]], [[0, 2], [1, 3]], [[0, 6]], [[-1, 2]], [[0, True]], [[0, 1.5]]])
def test_spans_that_are_not_in_the_prompt_are_refused(spans):
    with pytest.raises(InvalidArgument, match="kvdb_parts"):
        OPTIONS.find([5] * 5, {"kvdb_parts": spans})


@pytest.mark.parametrize("ratio", ["much", -0.1, 1.5, True])
def test_a_ratio_is_a_share(ratio):
    with pytest.raises(InvalidArgument, match="ratio"):
        OPTIONS.find([5] * 5, {"kvdb_parts": [[0, 2]], "kvdb_recompute": ratio})


@pytest.mark.parametrize(
    "options", [[], {"separator": [1]}, {"open": [1]}, {"open": [1], "close": [1]}, {"open": 1, "close": [2]}, {"recompute": 2}]
)
def test_options_that_are_none_are_refused(options):
    with pytest.raises(InvalidArgument):
        BlendOptions.parse(options)


def test_options_of_a_configuration():
    assert BlendOptions.parse(None) is None
    assert BlendOptions.parse({"open": [1, 2], "close": [3], "recompute": 0.2}) == OPTIONS
    assert BlendOptions.parse({}) == BlendOptions()
