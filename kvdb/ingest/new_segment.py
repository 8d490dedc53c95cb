"""A segment that does not exist yet."""

from contextlib import ExitStack
from typing import NamedTuple

from kvdb.catalog.segments.index_set import IndexSet
from kvdb.catalog.segments.overhead import segment_nbytes
from kvdb.catalog.segments.packed_ids import PackedIds
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import SegmentView
from kvdb.catalog.segments.states import SegmentStates
from kvdb.catalog.segments.stored_queries import StoredQueries
from kvdb.ingest.early_file import EarlyFile
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import CpuBudget, Reservation
from kvdb.types import Tokens


class NewSegment(NamedTuple):
    """The contents of a segment that does not exist yet. It owns the tables and the queries.

    tokens: int32 `[n]`. tables: one a layer, of n tokens. base: the position of its first token when it was computed. queries:
    some queries that were asked of it. early: its file, where its blocks were written while they came.
    """

    tokens: Tokens
    tables: list[BlockTable]
    base: int
    queries: StoredQueries
    early: EarlyFile | None = None

    def view(self, budget: CpuBudget, *, standalone: bool, shift: int = 0) -> SegmentView:
        """All of the segment, which has taken everything over. Raises CapacityError, or Unavailable where its file cannot be
        written, and then everything was given back."""
        with ExitStack() as undo:
            undo.callback(self.release)
            beside = Reservation(budget, segment_nbytes(len(self.tables), len(self.tokens)))
            undo.callback(beside.release)
            stored = None if self.early is None else self.early.finish(self.tables)
            undo.pop_all()
        indexes = IndexSet(self.queries, budget)
        states = SegmentStates(budget)
        segment = Segment(
            PackedIds(self.tokens), self.tables, indexes, self.base, standalone=standalone, beside=beside, states=states
        )
        if self.early is not None and stored is not None:
            segment.stand_on(self.early.disk, stored)
        return SegmentView(segment, len(segment), shift)

    def release(self) -> None:
        """Release everything, because no segment is made."""
        if self.early is not None:
            self.early.abandon()  # first, as it reads the blocks
        self.queries.release()
        for table in self.tables:
            table.release()
