"""Building indexes in the background, while sessions go on."""

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from threading import Lock

import indexes.registry as registry
import kvdb.check as check
from indexes.base import IndexCorrupt
from kvdb.catalog.segment import Segment, Views
from kvdb.errors import IntegrityError, Unavailable, Unsupported
from kvdb.types import IndexInfo

LOOK_SECONDS = 0.2
"""How often somebody who waits for a build looks whether it is still wanted."""


class IndexBuilder:
    """Builds one kind of index over one segment at a time and thread, layer by layer, each offered as soon as it stands.

    A segment lives as long as something is built over it. Thread-safe.
    """

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvdb-index")
        self._running: dict[tuple[int, str], Future[None]] = {}
        self._stopping = False
        self._lock = Lock()

    def want(self, segment: Segment, kind: str) -> Future[None]:
        """Build that kind over the segment, if it is not there and nobody is at it. Raises InvalidArgument or Unavailable.

        The future raises Unsupported where the kind's library is missing, and Unavailable when the database was closed.
        """
        key = (segment.number, check.kind(kind))
        with self._lock:
            if self._stopping:
                raise Unavailable("the database is closed; connect again")
            running = self._running.get(key)
            if running is not None:
                return running
            segment.retain()
            running = self._running[key] = self._executor.submit(self._build, segment, kind)
        running.add_done_callback(lambda _: self._ended(segment, key))  # at once when it is done, so without the lock
        return running

    def close(self) -> None:
        """Stop after the layers under way. Closing twice does nothing."""
        with self._lock:
            self._stopping = True
        self._executor.shutdown(cancel_futures=True)

    def _build(self, segment: Segment, kind: str) -> None:
        for layer, table in enumerate(segment.tables):
            if self._stopping:
                raise Unavailable("the database was closed while an index was built")
            if kind in segment.indexes.of(layer):
                continue
            try:
                index = registry.build(kind, table.keys(len(segment)), segment.indexes.samples.get(layer))
            except ModuleNotFoundError as error:
                raise Unsupported(
                    f"an index of the kind {kind!r} needs {error.name}, which is not installed; pip install 'kvdb[hnsw]'"
                ) from None
            segment.indexes.put(layer, index)

    def _ended(self, segment: Segment, key: tuple[int, str]) -> None:
        with self._lock:
            self._running.pop(key, None)
        segment.release()


def wait(builds: list[Future[None]], wanted: Callable[[], bool]) -> None:
    """Until all are done. Raises what the first that failed raised, and Unavailable once they are no longer `wanted`."""
    while pending := futures.wait(builds, LOOK_SECONDS).not_done:
        if not wanted():
            raise Unavailable(f"nobody waits any more for {len(pending)} builds of indexes; they go on in the background")
    for build in builds:
        try:
            build.result()
        except CancelledError:
            raise Unavailable("the database was closed while an index was to be built") from None


def infos(views: Views) -> list[IndexInfo]:
    """What is built over the segments of a context, by segment and kind."""
    return [
        IndexInfo(
            segment=view.segment.number,
            tokens=len(view.segment),
            kind=kind,
            layers=len(built),
            layers_total=len(view.segment.tables),
            nbytes=sum(index.nbytes for index in built),
        )
        for view in views
        for kind, built in view.segment.indexes.built().items()
    ]


def verify(views: Views) -> int:
    """Check every index over these segments against its keys; how many were checked. Raises IntegrityError."""
    count = 0
    for view in views:
        for kind, built in view.segment.indexes.built().items():
            for index in built:
                try:
                    index.verify()
                except IndexCorrupt as error:
                    raise IntegrityError(
                        f"index {kind} of segment {view.segment.number} does not fit its keys: {error}"
                    ) from None
                count += 1
    return count
