"""Cuts a document into chunks, and a new text of one so that as many as possible of its old chunks are chunks of it again."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from engine_adapter.rag.answers import HalfCharacter
from kvdb.errors import InvalidArgument

CHUNK_TOKENS = 512
"""Longer chunks answer better, because tokens that are cut off from what they depend on must be recomputed; shorter ones are
shared more."""

LineEnd = re.compile(r"\n")
SentenceEnd = re.compile(r"[.!?][\"')\]]*\s|[\u3002\uff01\uff1f]")  # the latter end Chinese and Japanese ones
CHARACTER_TOKENS = 4
"""The most tokens of one character: the most bytes of a character in UTF-8."""
TOKEN_NBYTES = 4


def cut(ids: Sequence[int], size: int, text_of: Callable[[list[int]], str]) -> list[list[int]]:
    """The chunks of a document's token ids, in order; joined they are the document.

    A chunk has at most `size` tokens. It ends at the end of a line or else of a sentence, if there is one within its last
    quarter, and never in the middle of a character of several tokens, unless there is no other place. The last two chunks share
    what remains, so that neither is very short. text_of: the text of some tokens. Raises InvalidArgument for a size below 1.
    """
    if isinstance(size, bool) or size < 1:
        raise InvalidArgument(f"chunk_tokens is {size!r}; expected at least 1, such as {CHUNK_TOKENS}")
    chunks: list[list[int]] = []
    begin, total = 0, len(ids)
    while begin < total:
        end = _end(ids, begin, size, text_of)
        chunks.append(list(ids[begin:end]))
        begin = end
    return chunks


def _end(ids: Sequence[int], begin: int, size: int, text_of: Callable[[list[int]], str]) -> int:
    """The best place to end the chunk that begins at `begin`, the latest if several are as good."""
    left = len(ids) - begin
    if left <= size:
        return len(ids)
    longest = min(size, (left + 1) // 2)  # half of what fits in two
    shortest = max(1, size // 4, longest - max(longest // 4, CHARACTER_TOKENS))

    def rank(end: int) -> int:
        if text_of(list(ids[max(begin, end - CHARACTER_TOKENS) : end])).endswith(HalfCharacter):
            return 0
        around = text_of(list(ids[end - 1 : end + 1]))
        return 3 if LineEnd.search(around) else 2 if SentenceEnd.search(around) else 1

    return max(range(begin + shortest, begin + longest + 1), key=lambda end: (rank(end), end))


def recut(ids: Sequence[int], known: Sequence[Sequence[int]], size: int, text_of: Callable[[list[int]], str]) -> list[list[int]]:
    """The chunks of a document's token ids, in order; joined they are the document. What lies between old chunks is cut anew; it
    takes the chunk beside it along where it would be much shorter than a chunk.

    known: the chunks of its old text, wherever they are now. size, text_of: as in `cut`.
    """
    chunks: list[list[int]] = []
    begin = 0
    for first, last in _found(ids, known):
        if begin < first < begin + size // 4:
            chunks += cut(ids[begin:last], size, text_of)
        else:
            chunks += [*cut(ids[begin:first], size, text_of), list(ids[first:last])]
        begin = last
    rest = len(ids) - begin
    if chunks and 0 < rest < size // 4:
        begin -= len(chunks.pop())
    return chunks + cut(ids[begin:], size, text_of)


def _found(ids: Sequence[int], known: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Where old chunks stand in the new text, [first, last) each, ascending, none over another; the next is always the one that
    begins soonest, and of these the longest."""
    text = np.asarray(ids, np.int32).tobytes()
    ahead = {chunk: _find(text, chunk, 0) for chunk in {np.asarray(one, np.int32).tobytes() for one in known if len(one)}}
    places: list[tuple[int, int]] = []
    begin = 0
    while True:
        ahead = {chunk: at if at >= begin else _find(text, chunk, begin) for chunk, at in ahead.items() if at >= 0}
        ahead = {chunk: at for chunk, at in ahead.items() if at >= 0}
        if not ahead:
            return places
        first, longest = min((at, -len(chunk) // TOKEN_NBYTES) for chunk, at in ahead.items())
        begin = first - longest
        places.append((first, begin))


def _find(text: bytes, chunk: bytes, begin: int) -> int:
    """The first token from `begin` on at which the chunk stands, -1 for nowhere."""
    at = text.find(chunk, begin * TOKEN_NBYTES)
    while at % TOKEN_NBYTES and at >= 0:
        at = text.find(chunk, at + 1)
    return at // TOKEN_NBYTES if at >= 0 else -1
