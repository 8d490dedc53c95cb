"""The sessions and imports that are open in a database."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from threading import Condition
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvdb.catalog.contexts.context import StoredContext
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import Views
from kvdb.errors import Unavailable
from kvdb.storage.block_table import BlockTable
from kvdb.storage.stored_segment import StoredSegment

P = ParamSpec("P")
R = TypeVar("R")


class HasHandles(Protocol):
    """A database, whose handles count its calls."""

    handles: "OpenHandles"


D = TypeVar("D", bound=HasHandles)


def counted_call(method: Callable[Concatenate[D, P], R]) -> Callable[Concatenate[D, P], R]:
    """A method of a database that closing waits for, and that raises Unavailable once the database is closed."""

    @wraps(method)
    def counted(self: D, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.handles.begin_call()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.handles.end_call()

    return counted


class Handle(Protocol):
    """A session or an import: it holds blocks and references to segments until it is closed."""

    @property
    def views(self) -> Views:
        """The segments that it holds."""
        ...

    def own_tables(self) -> Sequence[BlockTable]:
        """The tables of its own, beside those of its segments."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class OpenHandles:
    """What is open in a database, and how many of its calls are under way, so that closing it waits for them. Thread-safe."""

    def __init__(self) -> None:
        self._handles: dict[Handle, None] = {}  # in the order in which they were opened
        self._calls = 0
        self._closed = False
        self._changed = Condition()

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: Handle) -> None:
        """Add a handle. Raises Unavailable once the database is closed; then the caller has to release the handle."""
        with self._changed:
            self._check_open()
            self._handles[handle] = None

    def remove(self, handle: Handle) -> None:
        with self._changed:
            self._handles.pop(handle, None)

    def open(self) -> list[Handle]:
        """What is open, in the order in which it was opened."""
        with self._changed:
            return list(self._handles)

    def begin_call(self) -> None:
        """A call of the database begins, for which closing it waits. Raises Unavailable once the database is closed."""
        with self._changed:
            self._check_open()
            self._calls += 1

    def end_call(self) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def refuse(self) -> bool:
        """Refuse calls and handles from now on; returns whether they were accepted before."""
        with self._changed:
            first, self._closed = not self._closed, True
            return first

    def owners(self, contexts: Sequence[StoredContext], held: Iterable[Segment]) -> tuple[list[BlockTable], list[StoredSegment]]:
        """Every table that holds blocks, and everything stored, of open handles, of these contexts, and of segments that others
        hold."""
        segments = {*held, *(view.segment for context in contexts for view in context.views)}
        tables = [table for context in contexts if context.overlay is not None for table in context.overlay.tables]
        with self._changed:
            for handle in self._handles:
                segments.update(view.segment for view in handle.views)
                tables += handle.own_tables()
        tables += [table for segment in segments for table in segment.tables]
        once = {id(table): table for table in tables}  # an import has its tables still while they are a segment's already
        stored = {context.overlay.stored for context in contexts if context.overlay is not None}
        stored.update(segment.stored for segment in segments)
        return list(once.values()), [one for one in stored if one is not None]

    def seen(self) -> dict[Segment, int]:
        """How many tokens of each segment some open handle sees, at most."""
        most: dict[Segment, int] = {}
        with self._changed:
            for view in (view for handle in self._handles for view in handle.views):
                most[view.segment] = max(view.visible, most.get(view.segment, 0))
        return most

    def close(self) -> None:
        """Close everything that is open, and wait for calls under way. After `refuse`."""
        with self._changed:
            handles = list(self._handles)
        for handle in handles:
            handle.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._calls)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the database is closed; connect again")
