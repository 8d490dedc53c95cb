"""Stored contexts opened without a prompt, and KV read back from them."""

from collections.abc import Sequence
from contextlib import ExitStack, closing

from kvdb.catalog.catalog import Catalog
from kvdb.catalog.overlay import Overlay
from kvdb.catalog.snapshot import Snapshot
from kvdb.session.open_handles import OpenHandles, counted_call
from kvdb.session.services import SessionServices
from kvdb.session.state import SessionState
from kvdb.session.terms import SessionTerms
from kvdb.storage.store import BlockStore
from kvdb.types import KeysValues


class ReadOperations:
    """The calls of a database that read what a context holds. The database sets what they work on. Thread-safe."""

    handles: OpenHandles
    _catalog: Catalog
    _blocks: BlockStore
    _services: SessionServices

    @counted_call
    def open_context(self, name: str, tokens: int | None = None) -> SessionState:
        """A session over what a context holds. tokens: only over so many of its first tokens, so that no segment behind them is
        brought back from disk. Raises NotFound, CapacityError or Unavailable."""
        context = self._catalog.acquire(name)
        if context.plain:
            snapshot = Snapshot.prefix(context.views)
        else:
            overlay = context.overlay or Overlay(self._blocks.tables(context.spec))
            snapshot = Snapshot.blended(context.spec, context.layout, overlay)
        if tokens is not None and tokens < snapshot.layout.length:
            with ExitStack() as whole:
                whole.callback(snapshot.release)
                snapshot = snapshot.cut(tokens)
        tails = self._blocks.tables(context.spec)
        return SessionState(self._services, context.spec, snapshot, tails, context.tokens, SessionTerms(salt=context.salt))

    @counted_call
    def read(
        self, name: str, layers: Sequence[int], start: int, stop: int | None = None, out: Sequence[KeysValues] | None = None
    ) -> list[KeysValues]:
        """KV of a context's tokens [start, stop), None for all behind `start`; see `kvdb.session.state.SessionState.read`, whose
        errors it raises, and those of `open_context`."""
        with closing(self.open_context(name, stop)) as session:
            return session.read(layers, start, stop, out)
