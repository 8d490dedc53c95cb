"""Where documents are cut."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine_adapter.rag.chunks import cut
from kvdb.errors import InvalidArgument
from tests.engine_adapter.rag.characters import Bytes

tokenizer = Bytes()


def pieces(text, size):
    return [tokenizer.decode(ids) for ids in cut(tokenizer.encode(text), size, tokenizer.decode)]


@given(st.lists(st.integers(0, 255), max_size=400), st.integers(1, 60))
def test_chunks_are_the_document_in_pieces_of_a_size(ids, size):
    chunks = cut(ids, size, tokenizer.decode)
    assert [token for chunk in chunks for token in chunk] == ids
    assert all(1 <= len(chunk) <= size for chunk in chunks)


@given(st.text(alphabet="abc .\n", max_size=600), st.integers(8, 60))
@example(". aaaaaaa", 8)
def test_chunks_are_neither_many_nor_tiny(text, size):
    chunks = pieces(text, size)
    assert len(chunks) <= 1 + len(text) / (size * 0.75 - 1)
    assert len(chunks) == 1 or all(len(chunk) >= size // 4 for chunk in chunks) or not chunks


@given(st.text(alphabet="aé漢🙂", min_size=1, max_size=200), st.integers(16, 40))
def test_no_character_is_cut_in_two(text, size):
    assert "".join(pieces(text, size)) == text


def test_a_chunk_ends_with_a_line_or_else_a_sentence():
    assert pieces("one two three.\nfour five six seven eight", 20)[0] == "one two three.\n"
    assert pieces("It is so far. And then on and on it goes.", 17)[0] == "It is so far. "[:-1]
    assert pieces("pi is 3.14159 as many have said of it before", 16)[0] == "pi is 3.14159 as"


def test_a_document_that_grows_at_its_end_keeps_its_first_chunks():
    ids = list(range(200)) * 3
    before, after = (cut(ids[:n], 50, tokenizer.decode) for n in (500, 600))
    assert after[:8] == before[:8]


def test_a_short_document_is_one_chunk_and_none_is_none():
    assert pieces("short", 5) == ["short"]
    assert pieces("", 5) == []


@pytest.mark.parametrize("size", [0, -3, True])
def test_a_size_that_cannot_be(size):
    with pytest.raises(InvalidArgument, match="chunk_tokens"):
        cut([1], size, tokenizer.decode)
