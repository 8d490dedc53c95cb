"""How one layer's run is divided: what is searched, what of it is read whole for some KV heads, and everything else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from indexes.base import Index
from indexes.retrieval import Retrieval
from kvdb.attention.away import Away
from kvdb.attention.run import Reads, Run, Words
from kvdb.attention.span import Span
from kvdb.types import Float32, Observation

HeadMask = npt.NDArray[np.bool_]


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
    """The division of a run that may grow behind what is searched. away: what the CPU leaves to somebody else."""

    def __init__(
        self, searched: Sequence[Searched], block_size: int, whole: Sequence[ReadWhole] = (), away: Away | None = None
    ) -> None:
        self.searched = tuple(searched)
        self.whole = tuple(whole)
        self.away = away
        parts: tuple[Searched | ReadWhole, ...] = (*searched, *whole)
        spans = {part.span for part in parts}
        elsewhere = () if away is None else away.spans
        self.tokens = sum(span.tokens for span in spans)
        self._block_size = block_size
        self._grows = away is None or not away.tail
        self._window = _Outside([self._blocks(span) for span in (*spans, *elsewhere)], self._grows)
        self._here = _Outside([self._blocks(span) for span in elsewhere], self._grows)
        self._until: int | None = None

    def read_whole(self, run: Run) -> Reads:
        """The blocks of which nothing is searched, and which are not away. run: always the same one, with the same overlay."""
        return self._window.of(run)

    def here(self, run: Run) -> Reads:
        """The blocks that are not away."""
        return self._here.of(run)

    def causal(self, n: int) -> int:
        """Of n queries how many are those of the last tokens here, which see no later ones: all or none."""
        return n if n > 1 and self._grows else 0  # one query sees all, also where its own token is searched

    def behind(self, run: Run) -> int:
        """How many tokens follow everything that is searched: queries of so many last tokens see all of it."""
        if self._until is None:
            self._until = int(run.counts[: self._window.until].sum())
        return run.read_tokens - self._until

    def blocks(self, run: Run, span: Span) -> Reads:
        """The blocks of a span."""
        return run.part(slice(*self._blocks(span)))

    def _blocks(self, span: Span) -> tuple[int, int]:
        size = self._block_size
        assert span.begin % size == 0
        return span.first_block + span.begin // size, span.first_block + -(-span.end // size)


class _Outside:
    """The blocks of a run that lie outside of some ranges; with what the tail grew by, if that `grows` here.

    until: the block behind the last range.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], grows: bool) -> None:
        edges = [0, *(block for begin, end in sorted(ranges) for block in (begin, end))]
        self._edges = [slice(begin, end) for begin, end in list(pairwise(edges))[::2]]
        self.until = edges[-1]
        self._grows = grows
        self._before: Reads | None = None
        self._base = 0

    def of(self, run: Run) -> Reads:
        """run: always the same one, with the same overlay."""
        if self._before is None:  # all that does not grow
            self._base = max(self.until, run.base_blocks)
            self._before = run.part(*self._edges, slice(self.until, self._base))
        if not self._grows:
            return self._before
        addresses, counts, placement = self._before
        grown = slice(self._base, None)
        return Reads(np.concatenate([addresses, run.addresses[grown]]), np.concatenate([counts, run.counts[grown]]), placement)
