"""The thread that loads segments from disk, layer by layer, while the model computes with the layers that have arrived."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition
from time import perf_counter

from kvdb.errors import IntegrityError, InternalError, KvdbError, Unavailable
from kvdb.events import Events, Kind
from kvdb.storage.block_table import BlockTable
from kvdb.storage.buffer_pool import BufferPool
from kvdb.storage.stored_segment import StoredSegment

log = logging.getLogger(__name__)
REMEMBERED_BYTES = 256 << 20
"""The measured rate is an average over about this many of the last bytes."""


class Loading:
    """One segment that is being loaded into the blocks of `tables`, one a layer. Made by `Loader.load`.

    ready: the number of layers that have arrived, in order. error: why no more will come. waiters: the number of threads that
    wait for a layer.
    """

    def __init__(
        self, loader: "Loader", segment: StoredSegment, tables: Sequence[BlockTable], ready: int, changed: Condition
    ) -> None:
        self.loader = loader
        self.segment = segment
        self.tables = tables
        self.ready = ready
        self.error: KvdbError | None = None
        self.waiters = 0
        self._changed = changed

    @property
    def ended(self) -> bool:
        """Whether nothing more comes, because all layers are there or because of `error`."""
        return self.error is not None or self.ready == len(self.tables)

    def wait(self, layer: int) -> None:
        """Wait until that layer is in its blocks. Raises IntegrityError or Unavailable if it will never be."""
        if self.ready > layer:
            return
        with self._changed:
            self.waiters += 1
            try:
                self._changed.wait_for(lambda: self.ready > layer or self.error is not None)
            finally:
                self.waiters -= 1
            if self.ready <= layer:
                assert self.error is not None
                raise type(self.error)(str(self.error)) from None


class Loader:
    """Loads one layer at a time, on one thread. Thread-safe.

    The next layer is of a segment that somebody waits for, if there is one, and otherwise of the segment with the fewest layers:
    a session over many segments needs the first layer of each before the second of any.
    """

    def __init__(self, pool: BufferPool) -> None:
        """pool: takes the segments that do not fit as a whole. Whoever reads `events` is told of contents that were changed."""
        self.pool = pool
        self.events = Events()
        self._executor = ThreadPoolExecutor(1, "kvdb-load")
        self._active: list[Loading] = []
        self._reading: Loading | None = None
        self._running = self._closed = False
        self._nbytes = self._seconds = 0.0
        self._changed = Condition()

    @property
    def rate(self) -> float | None:
        """The recent rate in bytes per second, for reading, checking and filling blocks; None before the first."""
        with self._changed:
            return self._nbytes / self._seconds if self._seconds else None

    def load(self, segment: StoredSegment, tables: Sequence[BlockTable], ready: int = 0) -> Loading:
        """Begin to fill these tables, which hold as many blocks as were written. ready: the number of layers that are there
        already.

        Nobody may read a layer's blocks before `Loading.wait` returns, or free any before the loading has ended. Raises
        Unavailable once closed.
        """
        loading = Loading(self, segment, tables, ready, self._changed)
        if loading.ended:
            return loading
        with self._changed:
            if self._closed:
                raise _closed()
            self._active.append(loading)
            loop = None if self._running else self._start()
        if loop is not None:
            loop.add_done_callback(self._loop_ended)
        return loading

    def cancel(self, loading: Loading) -> None:
        """Stop loading a segment; when this returns, nothing is written to its blocks any more."""
        with self._changed:
            self._end(loading, Unavailable("the loading was given up, as nobody holds the segment any more"))
            self._changed.wait_for(lambda: self._reading is not loading)

    def close(self) -> None:
        """Stop after the layer under way. Closing twice does nothing."""
        with self._changed:
            self._closed = True
            for loading in list(self._active):
                self._end(loading, _closed())
        self.pool.shut_down()
        self._executor.shutdown()

    def _start(self) -> Future[None] | None:
        """Start the thread's loop; None if the interpreter is ending. Called with the lock held."""
        try:
            loop = self._executor.submit(self._load_all)
        except RuntimeError:  # the interpreter ends
            for loading in list(self._active):
                self._end(loading, _closed())
            return None
        self._running = True
        return loop

    def _load_all(self) -> None:
        while (loading := self._next()) is not None:
            layer, started = loading.ready, perf_counter()
            try:
                loading.segment.read_layer(layer, loading.tables[layer])
            except KvdbError as error:
                if isinstance(error, IntegrityError):
                    self.events.tell(Kind.CHECKSUM_FAILED, what=str(error))
                with self._changed:
                    self._reading = None
                    self._end(loading, error)
            else:
                self._count_arrived(loading, perf_counter() - started)

    def _next(self) -> Loading | None:
        with self._changed:
            self._running = bool(self._active)
            self._reading = min(self._active, key=lambda loading: (not loading.waiters, loading.ready), default=None)
            return self._reading

    def _count_arrived(self, loading: Loading, seconds: float) -> None:
        """Count a layer that has arrived, and tell those who wait."""
        with self._changed:
            self._reading = None
            nbytes = loading.tables[loading.ready].nbytes
            keep = max(0.0, 1 - nbytes / REMEMBERED_BYTES)
            self._nbytes, self._seconds = keep * self._nbytes + nbytes, keep * self._seconds + seconds
            if loading in self._active:  # it may have been given up meanwhile
                loading.ready += 1
                if loading.ended:
                    self._active.remove(loading)
            self._changed.notify_all()

    def _end(self, loading: Loading, error: KvdbError) -> None:
        """End a loading that has not ended with an error; with the lock held."""
        if loading in self._active:
            self._active.remove(loading)
            loading.error = error
        self._changed.notify_all()

    def _loop_ended(self, loop: Future[None]) -> None:
        """Called when the loop ends, because there is nothing to load or because of a bug of ours, which waiting threads must
        learn of."""
        error = loop.exception()
        if error is not None:
            log.error("the loading of segments has died", exc_info=error)
            with self._changed:
                self._running, self._reading = False, None
                for loading in list(self._active):
                    self._end(loading, InternalError(f"the loading of segments has died: {error!r}"))


def _closed() -> Unavailable:
    return Unavailable("the database was closed while a segment was loaded from disk")
