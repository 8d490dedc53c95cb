"""An import under way: KV goes straight into blocks, and from there to the disk where it is to be durable; nothing is visible
until the import is complete."""

from collections.abc import Mapping
from contextlib import ExitStack
from threading import Lock
from typing import NamedTuple

import numpy as np

import kvdb.deadlines as deadlines
import kvdb.forks as forks
import kvdb.validate as validate
from kvdb.catalog.segments.overhead import segment_nbytes
from kvdb.catalog.segments.segment_view import Views, release_views, visible_tokens
from kvdb.catalog.segments.stored_queries import StoredQueries
from kvdb.errors import CapacityError, NonFiniteError, PositionError, SessionClosed
from kvdb.ingest.new_segment import NewSegment
from kvdb.ingest.publisher import NewContext, Publisher
from kvdb.session.open_handles import OpenHandles
from kvdb.session.states import SessionStates
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import Reservation
from kvdb.types import Array, ContextInfo, Tokens


class ImportTarget(NamedTuple):
    """The context that an import will become. base: the position of a chunk's first token; None for a prefix."""

    context: NewContext
    tokens: Tokens
    base: int | None = None


class ImportWriter:
    """An import that is being written. It stands among the database's open `handles` until it ends.

    views: the stored prefix, and tables: empty, one a layer; the import takes both over. start: the first token to be written.
    Layers may come in any order and in pieces of any size; the pieces of one layer come in the order of their tokens. Raises
    Unavailable for a closed database, and CapacityError; both release everything.
    """

    def __init__(
        self, handles: OpenHandles, publisher: Publisher, target: ImportTarget, views: Views, tables: list[BlockTable]
    ) -> None:
        self.spec = target.context.spec
        self.views = views
        self.tables = tables
        self.start = visible_tokens(views)
        self._handles = handles
        self._publisher = publisher
        self._tokens = target.tokens
        self._context = target.context
        self._base = target.base
        self._early = publisher.early_file(target.context, len(target.tokens) - self.start)
        self._queries = StoredQueries(publisher.budget)
        self._states = SessionStates(self.spec, publisher.budget)
        self._beside = Reservation(publisher.budget)
        self._lock = Lock()
        self._open = True
        forks.stays_behind(self, *forks.IMPORT)
        with ExitStack() as undo:
            undo.callback(self._release)
            self._beside.resize(segment_nbytes(len(tables), len(target.tokens)))
            handles.add(self)
            undo.pop_all()

    def own_tables(self) -> list[BlockTable]:
        """The tables that are being written."""
        return self.tables

    def write(self, layer: int, k: Array, v: Array, *, indexer: bool = False, start: int | None = None) -> None:
        """Append the KV of the next tokens of one layer, `[kv_heads, n, head_dim]`, from token `start` on. indexer: whether they
        are the keys of its indexer, `[1, n, dim]`, and v has no numbers. start: the position of the first of them, None for the
        next; in a layer with a window it may lie behind that, if no later query sees the tokens between.

        Raises LayerError, ShapeError, DtypeError, NonFiniteError, CapacityError, or PositionError past the last token;
        the import may then go on or be aborted. Raises InvalidArgument for numbers that cannot be quantized, and CapacityError or
        Unavailable where what came before cannot be written to the disk; then it can only be aborted.
        """
        with self._lock:
            deadlines.check()
            self._check_open()
            place = validate.own_place(self.spec, layer, indexer=indexer)
            shape, table, new = self.spec.shape(place), self.tables[place], len(self._tokens) - self.start
            n = validate.keys_values(shape, k, v)
            gap = validate.skipped(shape, start, self.start + table.length, n, layer)
            if table.length + gap + n > new:
                raise PositionError(
                    f"layer {layer} was given {table.length + gap + n} tokens; expected {new}, those from {self.start} on"
                )
            if not n:
                return
            if gap:
                table.skip(gap, k, v)
            else:
                table.append(k, v)
            self._take(place)

    def sample(self, layer: int, q: Array) -> None:
        """Queries of one layer, `[q_heads, m, head_dim]` after RoPE, from which its indexes may learn. The last sample of a layer
        replaces those before it; one without queries is ignored. They are kept as float32 and count in the budget of the CPU tier
        as long as the segment lives.

        Raises LayerError, ShapeError, DtypeError, NonFiniteError or CapacityError.
        """
        with self._lock:
            self._check_open()
            place = validate.place(self.spec, layer)
            n = validate.queries(self.spec.shape(place), q)
            if not self.tables[place].layout.finite(q):
                raise NonFiniteError(f"queries of layer {layer} hold NaN or infinity; expected finite numbers")
            if n:
                self._queries.put(place, q.astype(np.float32))

    def put_state(self, layer: int, arrays: Mapping[str, Array], position: int | None = None) -> None:
        """The state of a layer that keeps one, by the names of its arrays. position: how many tokens it is of, None for all of
        the context. Of each position the states of all such layers are kept, or none.

        Raises LayerError, InvalidArgument, ShapeError, DtypeError, PositionError or CapacityError.
        """
        with self._lock:
            deadlines.check()
            self._check_open()
            total = len(self._tokens)
            self._states.put(layer, arrays, validate.state_position(total if position is None else position, total))

    def commit(self) -> ContextInfo:
        """Publish the context. Raises PositionError while a layer is not whole, AlreadyExists and CapacityError."""
        with self._lock:
            deadlines.check()
            self._check_open()
            new = len(self._tokens) - self.start
            for kept, table in zip(self.spec.kept, self.tables, strict=True):
                if table.length != new:
                    raise PositionError(f"{kept} was given {table.length} of {new} tokens; write the rest, then commit")
            self._open = False
            self._beside.release()
            try:
                if self._base is None:
                    new_segment = self._new_segment(self._tokens[self.start :], self.start)
                    return self._publisher.publish(self._context, self.views, new_segment, self._states.snapshots())
                return self._publisher.publish_chunk(self._context, self.views, self._new_segment(self._tokens, self._base))
            finally:
                self._states.release()
                self._handles.remove(self)

    def abort(self) -> None:
        """Give everything back. After the end it does nothing."""
        with self._lock:
            if self._open:
                self._open = False
                self._release()
                self._handles.remove(self)

    def close(self) -> None:
        """Abort the import, if it has not ended."""
        self.abort()

    def _take(self, layer: int) -> None:
        """Go on with what has come of a layer: it is encoded as soon as it is whole, and goes to the disk as it will be."""
        if self.tables[layer].length == len(self._tokens) - self.start:
            try:
                self._publisher.encode(self._context, self.tables, layer)
            except CapacityError:  # there may be room at the end
                return
        elif self._context.retention.format:
            return
        if self._early is not None:
            self._early.take(layer, self.tables)

    def _release(self) -> None:
        self._beside.release()
        self._states.release()
        self._new_segment(self._tokens, self.start).release()
        release_views(self.views)

    def _new_segment(self, tokens: Tokens, base: int) -> NewSegment:
        """What was written, as the contents of a segment."""
        return NewSegment(tokens, self.tables, base, self._queries, self._early)

    def _check_open(self) -> None:
        if not self._open:
            raise SessionClosed("the import has ended; begin another")
