"""Segments: immutable runs of tokens with their KV, shared by contexts and sessions."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from threading import Lock

import kvdb.catalog.evidence.evidence_file as evidence_file
import kvdb.catalog.evidence.statistics_file as statistics_file
from kvdb.catalog.evidence.evidence import Evidence
from kvdb.catalog.evidence.statistics import Statistics
from kvdb.catalog.evidence.usage import SegmentUsage
from kvdb.catalog.segments.index_set import IndexSet
from kvdb.catalog.segments.packed_ids import PackedIds
from kvdb.catalog.segments.scores import SegmentScores
from kvdb.catalog.segments.states import SegmentStates
from kvdb.codecs.base import Rounding
from kvdb.errors import CapacityError
from kvdb.storage.block_table import BlockTable, reserve_together
from kvdb.storage.budget import Reservation
from kvdb.storage.disk import DiskTier
from kvdb.storage.loader import Loader, Loading
from kvdb.storage.paged_segment import PagedSegment, pinned
from kvdb.storage.segment_writing import unseen_of
from kvdb.storage.stored_segment import StoredSegment
from kvdb.types import Tokens

_numbers = count(1)


class Segment:
    """Tokens with one block table a layer. It lives as long as somebody holds a reference.

    ids: of its n >= 1 tokens. tables: one for each layer, each n tokens long; the segment owns them. indexes:
    those over its keys. base: the position of its first token when it was computed. standalone: whether nothing was before it
    then, so that it may stand anywhere; otherwise it is exact only behind its parent. statistics: averages over its queries.
    evidence: the errors of its answers. usage: how often it was used. pins: how often pinned. rounding: what encoding changed.
    scores: what a selector said of its tokens. states: snapshots of the states of layers that keep no tokens.

    Its blocks are in main memory until it is offloaded, and as long as it is pinned. Afterwards the tables are empty, and
    `stored` holds their contents; it is never written again, because a segment never changes. The evidence goes to disk and back
    with them, each time anew. A layer is read once the segment is pinned and the layer waited for. Where its blocks do not fit
    into main memory together it is paged: each layer comes in when it is read, and has to be pinned meanwhile (`holding`).
    """

    def __init__(
        self,
        ids: PackedIds,
        tables: list[BlockTable],
        indexes: IndexSet | None = None,
        base: int = 0,
        *,
        standalone: bool = False,
        beside: Reservation | None = None,
        states: SegmentStates | None = None,
    ) -> None:
        """beside: what it takes of the budget beside blocks."""
        assert len(ids) and all(table.length in {0, len(ids)} for table in tables)
        self.base = base
        self.standalone = standalone
        self.number = next(_numbers)
        self.ids = ids
        self.tables = tables
        self.indexes = indexes or IndexSet()
        self._statistics = Statistics()
        self.evidence = Evidence()
        self.usage = SegmentUsage()
        self.scores = SegmentScores(tables)
        self.states = states or SegmentStates()
        self.rounding = Rounding.of_all([table.rounding for table in tables])
        self._beside = beside
        self.stored: StoredSegment | None = None
        self._disk: DiskTier | None = None
        self._loading: Loading | None = None
        self._paged: PagedSegment | None = None
        self.pins = 0
        self._evict_when_unpinned = False
        self._references = 1
        self._lock = Lock()
        self._write_lock = Lock()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> Tokens:
        """The ids of its tokens, int32 `[n]`, unpacked anew each time."""
        return self.ids.unpack()

    @property
    def nbytes(self) -> int:
        """The bytes of its blocks, wherever they are."""
        blocks = self.tables[0].layout.blocks_for(len(self))
        unseen = self.unseen or len(self.tables) * (0,)
        each = zip((table.layout for table in self.tables), unseen, strict=True)
        return sum((blocks - gone // layout.block_size) * layout.nbytes for layout, gone in each)

    @property
    def searched(self) -> list[int]:
        """The numbers of the tables that indexes are of use for."""
        return [number for number, table in enumerate(self.tables) if table.searched]

    @property
    def unseen(self) -> tuple[int, ...]:
        """How many tokens at the beginning of each table no query sees; none without any."""
        return unseen_of(self.tables) if self.stored is None else self.stored.contents.unseen

    @property
    def format(self) -> str:
        return next((table.layout.format for table in self.tables if table.layout.format), "")

    @property
    def resident(self) -> bool:
        """Whether its blocks are in main memory, or on their way there, or come in when they are read."""
        return bool(self.tables[0].length)

    @property
    def place(self) -> tuple[DiskTier, StoredSegment] | None:
        """The tier that it is stored in, and what is stored; None while it is in main memory only."""
        disk, stored = self._disk, self.stored
        return None if disk is None or stored is None else (disk, stored)

    @property
    def references(self) -> int:
        return self._references

    @property
    def paged(self) -> PagedSegment | None:
        """Its layers in the buffer pool, if it is paged; this stays as it is while it is pinned."""
        return self._paged

    @property
    def statistics(self) -> Statistics:
        """Averages over its queries, and over those of earlier databases that had the store."""
        if not self._statistics.version and self._disk is not None and self.stored is not None:
            statistics_file.bring_back(self._statistics, self._disk, self.stored)
        return self._statistics

    @property
    def whole(self) -> bool:
        """Whether its blocks stay in main memory while it is pinned, so that others may share them."""
        return self.resident and self._paged is None

    def is_due_for_probe(self, layer: int, queries: int) -> bool:
        """Whether `queries` more queries of each layer were asked since this layer was last probed for what they retrieve."""
        return self.usage.queries_in_all >= self.statistics.probed_at(layer) + queries * len(self.tables)

    def known_evidence(self) -> Evidence:
        """Its evidence, in memory or on disk, for reading only: what is added to it may be lost."""
        with self._lock:
            if self.resident or self.stored is None or self._disk is None:
                return self.evidence
            return evidence_file.look(self._disk, self.stored) or self.evidence

    def retain(self) -> None:
        with self._lock:
            assert self._references > 0, "a freed segment was retained"
            self._references += 1

    def try_retain(self) -> bool:
        """Take a first reference for a new owner. Returns False if the segment is freed already."""
        with self._lock:
            self._references += self._references > 0
            return self._references > 0

    def release(self) -> None:
        """Drop one reference; the last one frees the blocks and removes what is stored."""
        with self._lock:
            self._references -= 1
            if self._references == 0:
                assert not self.pins, "a pinned segment was freed"
                self._free()
                self.indexes.release()
                self.scores.release()
                self.states.release()
                if self._beside is not None:
                    self._beside.release()
                if self.stored is not None and self._disk is not None:
                    self._disk.remove(self.stored)
                    self.stored = None

    def pin(self, loader: Loader) -> None:
        """Keep the blocks in main memory until `unpin`. A segment on disk is loaded once for all who pin it, layer by layer (see
        `wait`); after a failed loading, the missing layers are tried again. One that does not fit is paged until it is offloaded.
        Raises CapacityError without room for one layer, and Unavailable once the database is closed; then it is not pinned."""
        with self._lock:
            if not self.resident:
                self._load(loader)
            elif self._loading is not None and self._loading.error is not None:
                self._loading = loader.load(self._loading.segment, self.tables, self._loading.ready)
            elif self._paged is not None and not self.pins:
                self._paged.pool.open(self._paged)
            self.pins += 1
            self._evict_when_unpinned = False

    def wait(self, layer: int) -> None:
        """Wait until that layer is there; the caller pins the segment. Raises IntegrityError, Unavailable; `pin` tries again."""
        if (loading := self._loading) is not None:
            loading.wait(layer)

    @contextmanager
    def holding(self, layer: int) -> Iterator[None]:
        """Keep a layer's tokens in its blocks while the body runs; the caller pins the segment. Raises what `Pool.pin` does."""
        self.wait(layer)
        with pinned(() if self._paged is None else (self._paged.layers[layer],)):
            yield

    def unpin(self) -> None:
        """Undo one `pin`. With the last, the blocks are freed if the segment was offloaded meanwhile."""
        with self._lock:
            assert self.pins > 0, "an unpinned segment was unpinned"
            self.pins -= 1
            if self._paged is not None and not self.pins:
                self._paged.pool.close(self._paged)
            if self._evict_when_unpinned and not self.pins:
                self._evict()

    def write(self, disk: DiskTier, spec: str, *, synced: bool = True) -> StoredSegment:
        """Write the segment to disk, if it is not there yet. Returns it. spec: the digest of its model's spec. synced: see
        `DiskTier.write`. The caller holds a reference. Raises CapacityError or Unavailable; then it is as it was."""
        with self._write_lock:  # not `_lock`: sessions may be opened over it meanwhile
            if self.stored is None:
                stored = disk.write(spec, len(self), self.tables, synced=synced)
                with self._lock:
                    self.stored, self._disk = stored, disk
                self.scores.put_away(disk, stored)
                self.states.put_away(disk, stored)
            return self.stored

    def stand_on(self, disk: DiskTier, stored: StoredSegment) -> None:
        """Stand on what is stored of the segment already."""
        assert self.stored is None
        self.stored, self._disk = stored, disk
        self.scores.put_away(disk, stored)
        self.states.put_away(disk, stored)

    def offload(self, disk: DiskTier, spec: str) -> int:
        """Write the segment to disk, if it is not there yet, and free its blocks and indexes: at once, or with the last pin,
        unless it is pinned again before that. Returns the bytes of blocks that were freed at once. Raises as `write` does."""
        self.write(disk, spec)
        with self._lock:
            self._evict_when_unpinned = self.resident and bool(self.pins)
            return self._evict() if self.resident and not self.pins else 0

    def put_away(self) -> None:
        """Keep its evidence and statistics beside it, if it is stored, because the database ends."""
        with self._lock:
            if self.stored is not None and self._disk is not None:
                statistics_file.put_away(self._statistics, self._disk, self.stored)
            if self.resident and self.stored is not None and self._disk is not None:
                evidence_file.put_away(self.evidence, self._disk, self.stored)

    def _load(self, loader: Loader) -> None:
        assert self.stored is not None
        with ExitStack() as undo:
            undo.callback(self._free)
            try:
                reserve_together(self.tables, len(self), self.stored.contents.unseen)
            except CapacityError:
                scores = self.scores.of_blocks(self.place, self.tables[0].layout.block_size) if loader.pool.share else None
                self._paged = PagedSegment(loader.pool, self.stored, self.tables, scores)
                loader.pool.open(self._paged)
            else:
                self._loading = loader.load(self.stored, self.tables)
            undo.pop_all()
        if self._disk is not None:
            evidence_file.bring_back(self.evidence, self._disk, self.stored)

    def _evict(self) -> int:
        """Free the blocks of a segment on disk, and the indexes; called with the lock held. Returns the bytes of the blocks."""
        nbytes = self._paged.resident_nbytes if self._paged is not None else self.nbytes
        self._evict_when_unpinned = False
        self.indexes.clear()
        self.states.evict()
        self._free()
        if self.stored is not None and self._disk is not None:
            evidence_file.put_away(self.evidence, self._disk, self.stored)
        return nbytes

    def _free(self) -> None:
        """Free the blocks, and stop loading them; called with the lock held."""
        if self._loading is not None:
            self._loading.loader.cancel(self._loading)
            self._loading = None
        if self._paged is not None:
            self._paged.pool.drop(self._paged)
            self._paged = None
        for table in self.tables:
            table.release()
