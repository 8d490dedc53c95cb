"""Segments: immutable runs of tokens with their KV, shared by contexts and sessions."""

from dataclasses import dataclass
from itertools import count
from threading import Lock

from kvdb.catalog.indexes import IndexSet
from kvdb.catalog.statistics import Statistics
from kvdb.catalog.use import Use
from kvdb.storage.table import BlockTable
from kvdb.types import Tokens

_numbers = count(1)


class Segment:
    """Tokens with one block table a layer. Lives as long as somebody holds a reference.

    tokens: int32 `[n]`, n >= 1. tables: one a layer, each n tokens long; the segment owns them. indexes: over its keys. base: the
    position of its first token when it was computed. alone: whether nothing was before it then, so that it may stand anywhere;
    otherwise it is exact only behind its parent. statistics: of the queries that searched it. use: how often it was opened and
    asked.
    """

    def __init__(
        self,
        tokens: Tokens,
        tables: list[BlockTable],
        indexes: IndexSet | None = None,
        base: int = 0,
        *,
        alone: bool = False,
    ) -> None:
        assert len(tokens) and all(table.length == len(tokens) for table in tables)
        self.base = base
        self.alone = alone
        self.number = next(_numbers)
        self.tokens = tokens
        self.tables = tables
        self.indexes = indexes or IndexSet()
        self.statistics = Statistics()
        self.use = Use()
        self._references = 1
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    @property
    def references(self) -> int:
        return self._references

    def is_old(self, layer: int, queries: int) -> bool:
        """Whether so many queries of each layer were asked since somebody looked at what those of this layer want."""
        return self.use.queries_in_all >= self.statistics.looked_at(layer) + queries * len(self.tables)

    def retain(self) -> None:
        with self._lock:
            assert self._references > 0, "a freed segment was retained"
            self._references += 1

    def release(self) -> None:
        """Drop one reference; the last one frees the blocks."""
        with self._lock:
            self._references -= 1
            gone = self._references == 0
        if gone:
            for table in self.tables:
                table.release()


@dataclass(frozen=True)
class SegmentView:
    """A segment as one context sees it: only its first `visible` tokens count, `shift` positions from where it was computed."""

    segment: Segment
    visible: int
    shift: int = 0

    def __post_init__(self) -> None:
        assert 1 <= self.visible <= len(self.segment)

    @property
    def begin(self) -> int:
        """The position of its first token in the context."""
        return self.segment.base + self.shift

    @property
    def end(self) -> int:
        """The position behind its last visible token."""
        return self.begin + self.visible


Views = tuple[SegmentView, ...]


def visible_tokens(views: Views) -> int:
    """How many tokens the views show."""
    return sum(view.visible for view in views)
