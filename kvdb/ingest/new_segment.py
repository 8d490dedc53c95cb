"""A segment that does not exist yet."""

from contextlib import ExitStack
from typing import NamedTuple

from kvdb.catalog.index_set import IndexSet
from kvdb.catalog.overhead import segment_nbytes
from kvdb.catalog.segment import Segment
from kvdb.catalog.segment_view import SegmentView
from kvdb.catalog.stored_queries import StoredQueries
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import CpuBudget, Reservation
from kvdb.types import Tokens


class NewSegment(NamedTuple):
    """The contents of a segment that does not exist yet. It owns the tables and the queries.

    tokens: int32 `[n]`. tables: one a layer, of n tokens. base: the position of its first token when it was computed. queries:
    some queries that were asked of it.
    """

    tokens: Tokens
    tables: list[BlockTable]
    base: int
    queries: StoredQueries

    def view(self, budget: CpuBudget, *, standalone: bool, shift: int = 0) -> SegmentView:
        """All of the segment, which has taken everything over. Raises CapacityError, and then everything was given back."""
        with ExitStack() as undo:
            undo.callback(self.release)
            beside = Reservation(budget, segment_nbytes(len(self.tables), len(self.tokens)))
            undo.pop_all()
        segment = Segment(self.tokens, self.tables, IndexSet(self.queries), self.base, standalone=standalone, beside=beside)
        return SegmentView(segment, len(segment), shift)

    def release(self) -> None:
        """Release everything, because no segment is made."""
        self.queries.release()
        for table in self.tables:
            table.release()
