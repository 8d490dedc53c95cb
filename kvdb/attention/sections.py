"""How one layer's run is divided: what is searched, what of it is read whole for some KV heads, and everything else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from indexes.base import Index
from indexes.retrieval import Retrieval
from kvdb.attention.run import Reads, Run, Words
from kvdb.types import Float32, Observation

HeadMask = npt.NDArray[np.bool_]


class Span(NamedTuple):
    """Tokens [begin, end) of one segment or tail, whole blocks. first_block: where its blocks begin in the run."""

    begin: int
    end: int
    first_block: int

    @property
    def tokens(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Searched:
    """A span that an index is asked for. retrieval: None for that of the question. asked: bool `[kv_heads]`, None for all.

    estimate_tail: whether what is not retrieved is estimated. observe: takes what the search for an observed question shows.
    turn: makes of queries those for keys that were moved. hidden: a bit for each token of the segment that nobody sees.
    """

    index: Index
    span: Span
    retrieval: Retrieval | None = None
    asked: HeadMask | None = None
    estimate_tail: bool = False
    observe: Callable[[Observation], None] | None = None
    turn: Callable[[Float32], Float32] | None = None
    hidden: Words | None = None


@dataclass(frozen=True)
class ReadWhole:
    """A span of which some KV heads are read whole, bool `[kv_heads]`, while others are searched."""

    span: Span
    heads: HeadMask


class Sections:
    """The division of a run that may grow behind what is searched."""

    def __init__(self, searched: Sequence[Searched], block_size: int, whole: Sequence[ReadWhole] = ()) -> None:
        self.searched = tuple(searched)
        self.whole = tuple(whole)
        parts: tuple[Searched | ReadWhole, ...] = (*searched, *whole)
        spans = sorted({part.span for part in parts}, key=lambda span: span.first_block + span.begin // block_size)
        self.tokens = sum(span.tokens for span in spans)
        self._block_size = block_size
        self._edges: list[tuple[int, int]] = []
        at = 0
        for span in spans:
            first, last = self._blocks(span)
            self._edges.append((at, first))
            at = last
        self._rest = at
        self._until: int | None = None
        self._before: Reads | None = None
        self._until_base = 0

    def read_whole(self, run: Run) -> Reads:
        """The blocks of which nothing is searched. run: always the same one, with the same overlay."""
        if self._before is None:  # all that does not grow
            self._until_base = max(self._rest, run.base_blocks)
            self._before = run.part(*(slice(*edge) for edge in self._edges), slice(self._rest, self._until_base))
        addresses, counts, placement = self._before
        grown = slice(self._until_base, None)
        return Reads(np.concatenate([addresses, run.addresses[grown]]), np.concatenate([counts, run.counts[grown]]), placement)

    def behind(self, run: Run) -> int:
        """How many tokens follow everything that is searched: queries of so many last tokens see all of it."""
        if self._until is None:
            self._until = int(run.counts[: self._rest].sum())
        return run.read_tokens - self._until

    def blocks(self, run: Run, span: Span) -> Reads:
        """The blocks of a span."""
        return run.part(slice(*self._blocks(span)))

    def _blocks(self, span: Span) -> tuple[int, int]:
        size = self._block_size
        assert span.begin % size == span.end % size == 0
        return span.first_block + span.begin // size, span.first_block + span.end // size
