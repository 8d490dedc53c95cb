"""Cuts a new text of a document so that as many as possible of its old chunks are chunks of it again."""

from collections.abc import Callable, Sequence

import numpy as np

from engine_adapter.rag.chunks import cut

TOKEN_NBYTES = 4


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
