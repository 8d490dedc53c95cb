"""What can be asked of a whole store, and done with it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import kvdb.catalog.check as context_check
import kvdb.catalog.residency as residency
import kvdb.indexing.status as status
from kvdb.catalog.catalog import Catalog
from kvdb.catalog.segment import Segment
from kvdb.catalog.space import space_of
from kvdb.errors import IntegrityError, NotFound
from kvdb.events import Kind
from kvdb.gpu.interface import GpuInterface
from kvdb.indexing.builder import IndexBuilder
from kvdb.session.open_handles import OpenHandles, counted_call
from kvdb.storage.store import BlockStore, Owners
from kvdb.types import BackedUp, Checked, Space, UnknownFile


class StoreOperations:
    """The calls of a database that are about all that it stores. The database sets what they work on. Thread-safe."""

    handles: OpenHandles
    gpu: GpuInterface | None
    _catalog: Catalog
    _blocks: BlockStore
    _builder: IndexBuilder

    @counted_call
    def check(self, name: str) -> Checked:
        """Read everything that is on disk of a context, and compare it with its checksums, and indexes in memory with their keys.
        Raises NotFound, IntegrityError, Unavailable, and CapacityError where the keys of such an index find no room."""
        with self._catalog.borrow(name) as context, self._damage_told():
            disk = self._blocks.disk
            checked = Checked(0, 0, 0) if disk is None else context_check.check(context, disk)
            indexed = tuple(view for view in context.views if view.segment.indexes.built())
            with residency.pinned(indexed, self._blocks.loader):
                return replace(checked, indexes=max(checked.indexes, status.verify(indexed)))

    @contextmanager
    def _damage_told(self) -> Iterator[None]:
        """Tell of what the body finds damaged."""
        try:
            yield
        except IntegrityError as error:
            self._catalog.events.tell(Kind.CHECKSUM_FAILED, what=str(error))
            raise

    @counted_call
    def check_store(self) -> list[str]:
        """Prove what `check_integrity` proves. Returns the names of contexts that were found damaged when the store was opened.
        Raises IntegrityError."""
        self.check_integrity()
        return self._catalog.damaged()

    @counted_call
    def space(self, prefix: str = "") -> Space:
        """How much space the stored contexts take whose names begin with `prefix`. It takes time with their number."""
        with ExitStack() as held:
            borrowed = []
            for context in self._catalog.contexts(prefix):
                with suppress(NotFound):  # it was dropped meanwhile
                    borrowed.append(held.enter_context(self._catalog.borrow(context.name)))
            return space_of(borrowed)

    @counted_call
    def backup(self, folder: str, link: bool = False) -> BackedUp:
        """Copy the store to a new folder, or an empty one, which is a store then, while sessions and imports go on, and read the
        copies. link: make hard links to files that are never written again. What is in memory only is left out.

        Raises InvalidArgument for a folder that is not empty and for links that cannot be, Unsupported for a database without a
        store, IntegrityError, CapacityError and Unavailable; then the folder is no store.
        """
        return self._catalog.backup(Path(folder), link=link)

    @counted_call
    def unknown_files(self, remove: bool = False) -> list[UnknownFile]:
        """The files of the store's segments that its catalogue did not know when it was opened. remove: remove them. Raises
        IntegrityError where they may be of contexts that were damaged, and Unavailable where one cannot be removed."""
        return self._catalog.unknown_files(remove=remove)

    def check_integrity(self) -> None:
        """Prove that free and used blocks add up and that every reference has its owner, as every file. Raises IntegrityError.

        Call it while no session or import is being written; builds of indexes may go on, and contexts be dropped.
        """
        self._blocks.check_integrity(self._owners)

    def _owners(self) -> Owners:
        tables, files = self.handles.owners(self._catalog.alive(), self._held_segments())
        return Owners(tables, files, None if self.gpu is None else self.gpu.owned())

    def _held_segments(self) -> list[Segment]:
        """The segments that what works in the background holds."""
        return [*self._builder.held_segments(), *(self.gpu.held_segments() if self.gpu is not None else ())]
