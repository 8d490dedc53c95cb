"""Segments: immutable runs of tokens with their KV, shared by contexts and sessions."""

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from threading import Lock

from kvdb.catalog.indexes import IndexSet
from kvdb.catalog.statistics import Statistics
from kvdb.catalog.use import Use
from kvdb.storage.folder import SegmentFolder
from kvdb.storage.loader import Loader, Loading
from kvdb.storage.segment_file import SegmentFile
from kvdb.storage.table import BlockTable
from kvdb.types import Tokens

_numbers = count(1)


class Segment:
    """Tokens with one block table a layer. Lives as long as somebody holds a reference.

    tokens: int32 `[n]`, n >= 1. tables: one a layer, each n tokens long; the segment owns them. indexes: over its keys. base: the
    position of its first token when it was computed. alone: whether nothing was before it then, so that it may stand anywhere;
    otherwise it is exact only behind its parent. statistics: of the queries that searched it. use: how often it was opened and
    asked.

    Its blocks are in main memory while it is pinned, and until it is offloaded; then the tables are empty, and `file` holds what
    they held. Who reads a layer pins the segment and waits for that layer first. The file stays, as what it holds never changes.
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
        self.file: SegmentFile | None = None
        self._disk: SegmentFolder | None = None
        self._loading: Loading | None = None
        self._pins = 0
        self._leaves = False
        self._references = 1
        self._lock = Lock()
        self._writing = Lock()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Of its blocks, wherever they are."""
        layout = self.tables[0].layout
        return len(self.tables) * layout.blocks_for(len(self)) * layout.nbytes

    @property
    def resident(self) -> bool:
        """Whether its blocks are in main memory, or on their way there."""
        return bool(self.tables[0].length)

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
        """Drop one reference; the last one frees the blocks and removes the file."""
        with self._lock:
            self._references -= 1
            if self._references == 0:
                assert not self._pins, "a pinned segment was freed"
                self._free()
                if self.file is not None and self._disk is not None:
                    self._disk.remove(self.file)

    def pin(self, loader: Loader) -> None:
        """Keep the blocks in main memory until `unpin`; from disk, they begin to come in layer by layer, see `wait`.

        Once for everybody who pins it meanwhile; after a loading that failed, the layers that are missing are tried again. Raises
        CapacityError without room for them, Unavailable once the database is closed, and then it is not pinned.
        """
        with self._lock:
            if not self.resident:
                self._load(loader)
            elif self._loading is not None and self._loading.error is not None:
                self._loading = loader.load(self._loading.file, self.tables, self._loading.ready)
            self._pins += 1
            self._leaves = False

    def wait(self, layer: int) -> None:
        """Until the blocks of that layer hold its tokens. For who pins it. Raises IntegrityError or Unavailable, which another
        `pin` tries again."""
        loading = self._loading
        if loading is not None:
            loading.wait(layer)

    def unpin(self) -> None:
        """Give the blocks of a segment free to leave, which they do if it was offloaded meanwhile."""
        with self._lock:
            assert self._pins > 0, "an unpinned segment was unpinned"
            self._pins -= 1
            if self._leaves and not self._pins:
                self._drop()

    def offload(self, disk: SegmentFolder, spec: str) -> int:
        """Write it to disk, if it is not there yet, and free its blocks and indexes: now, or when it is no longer pinned, unless
        somebody pins it anew before that. Bytes of blocks freed now. spec: the digest of its model's. For who holds a reference.

        Raises CapacityError or Unavailable where it cannot be written, and then it is as it was.
        """
        with self._writing:  # not `_lock`: sessions may be opened over it meanwhile
            if self.file is None:
                file = disk.write(spec, self.tables[0].layout, len(self), self.tables)
                with self._lock:
                    self.file, self._disk = file, disk
        with self._lock:
            if not self.resident:
                return 0
            self._leaves = bool(self._pins)
            return 0 if self._pins else self._drop()

    def _load(self, loader: Loader) -> None:
        assert self.file is not None
        with ExitStack() as undo:
            for table in self.tables:
                undo.callback(table.release)
                table.reserve(len(self))
            self._loading = loader.load(self.file, self.tables)
            undo.pop_all()

    def _drop(self) -> int:
        """Free the blocks, and the indexes over them; how many bytes of blocks. With the lock held, of a segment on disk."""
        nbytes = sum(table.nbytes for table in self.tables)
        self._leaves = False
        self.indexes.clear()
        self._free()
        return nbytes

    def _free(self) -> None:
        """With the lock held."""
        if self._loading is not None:
            self._loading.loader.cancel(self._loading)
            self._loading = None
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
