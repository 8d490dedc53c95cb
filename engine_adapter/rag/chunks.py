"""Cuts a document into chunks."""

import re
from collections.abc import Callable, Sequence

from kvdb.errors import InvalidArgument

CHUNK_TOKENS = 512
"""Longer chunks answer better, because tokens that are cut off from what they depend on must be recomputed; shorter ones are
shared more."""

LineEnd = re.compile(r"\n")
SentenceEnd = re.compile(r"[.!?][\"')\]]*\s|[\u3002\uff01\uff1f]")  # the latter end Chinese and Japanese ones
CHARACTER_TOKENS = 4
"""The most tokens of one character: the most bytes of a character in UTF-8."""

HalfCharacter = "\N{REPLACEMENT CHARACTER}"
"""The text that tokenizers make of a token that holds only some bytes of a character."""


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
