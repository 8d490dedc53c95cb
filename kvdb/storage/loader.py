"""The thread that brings segments back from disk, layer by layer, while what is there already is computed with."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition
from time import perf_counter

from kvdb.errors import InternalError, KvdbError, Unavailable
from kvdb.storage.segment_file import SegmentFile
from kvdb.storage.table import BlockTable

log = logging.getLogger(__name__)
REMEMBERED_BYTES = 256 << 20
"""The rate is that of about the last so many bytes."""


class Loading:
    """The layers of one segment on their way into the blocks of `tables`, one a layer. ready: how many are there.

    They come in order. Made by `Loader.load`.
    """

    def __init__(self, loader: "Loader", file: SegmentFile, tables: Sequence[BlockTable], ready: int, changed: Condition) -> None:
        self.loader = loader
        self.file = file
        self.tables = tables
        self.ready = ready
        self.error: KvdbError | None = None
        self.waited_for = 0
        self._changed = changed

    @property
    def ended(self) -> bool:
        """Whether nothing more comes: everything is there, or `error` says why not."""
        return self.error is not None or self.ready == len(self.tables)

    def wait(self, layer: int) -> None:
        """Until that layer is in its blocks. Raises what kept it from getting there: IntegrityError, Unavailable."""
        if self.ready > layer:
            return
        with self._changed:
            self.waited_for += 1
            try:
                self._changed.wait_for(lambda: self.ready > layer or self.error is not None)
            finally:
                self.waited_for -= 1
            if self.ready <= layer:
                assert self.error is not None
                raise type(self.error)(str(self.error)) from None


class Loader:
    """Loads one layer at a time, on one thread. Thread-safe.

    Of several segments under way, one that somebody waits for is next, then the one that has got least far: a session over many
    segments needs the first layer of each before the second of any.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "kvdb-load")
        self._active: list[Loading] = []
        self._reading: Loading | None = None
        self._working = self._closed = False
        self._nbytes = self._seconds = 0.0
        self._changed = Condition()

    @property
    def rate(self) -> float | None:
        """Bytes a second lately, checked and in their blocks; None before any."""
        with self._changed:
            return self._nbytes / self._seconds if self._seconds else None

    def load(self, file: SegmentFile, tables: Sequence[BlockTable], ready: int = 0) -> Loading:
        """Begin to fill these tables, which hold as many blocks as were written. ready: how many layers are there already.

        Nobody may read a layer's blocks before `Loading.wait`, or free any before it has ended. Raises Unavailable once closed.
        """
        loading = Loading(self, file, tables, ready, self._changed)
        if loading.ended:
            return loading
        with self._changed:
            if self._closed:
                raise _closed()
            self._active.append(loading)
            work = None if self._working else self._start()
        if work is not None:
            work.add_done_callback(self._stopped)
        return loading

    def cancel(self, loading: Loading) -> None:
        """Load no further; when this returns, nothing is written to its blocks any more."""
        with self._changed:
            self._end(loading, Unavailable("the loading was given up, as nobody holds the segment any more"))
            self._changed.wait_for(lambda: self._reading is not loading)

    def close(self) -> None:
        """Stop after the layer under way. Closing twice does nothing."""
        with self._changed:
            self._closed = True
            for loading in list(self._active):
                self._end(loading, _closed())
        self._executor.shutdown()

    def _start(self) -> Future[None] | None:
        """With the lock held."""
        try:
            work = self._executor.submit(self._work)
        except RuntimeError:  # the interpreter ends
            for loading in list(self._active):
                self._end(loading, _closed())
            return None
        self._working = True
        return work

    def _work(self) -> None:
        while (loading := self._next()) is not None:
            layer, started = loading.ready, perf_counter()
            try:
                loading.file.read_layer(layer, loading.tables[layer])
            except KvdbError as error:
                with self._changed:
                    self._reading = None
                    self._end(loading, error)
            else:
                self._came(loading, perf_counter() - started)

    def _next(self) -> Loading | None:
        with self._changed:
            self._working = bool(self._active)
            self._reading = min(self._active, key=lambda loading: (not loading.waited_for, loading.ready), default=None)
            return self._reading

    def _came(self, loading: Loading, seconds: float) -> None:
        """One more layer is there."""
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
        """With the lock held; nothing for one that has ended."""
        if loading in self._active:
            self._active.remove(loading)
            loading.error = error
        self._changed.notify_all()

    def _stopped(self, work: Future[None]) -> None:
        """The thread has nothing more to do, or died of a bug of ours, which those who wait must hear of."""
        error = work.exception()
        if error is not None:
            log.error("the loading of segments has died", exc_info=error)
            with self._changed:
                self._working, self._reading = False, None
                for loading in list(self._active):
                    self._end(loading, InternalError(f"the loading of segments has died: {error!r}"))


def _closed() -> Unavailable:
    return Unavailable("the database was closed while a segment was loaded from disk")
