"""The state of the indexes over a context: which exist, which are being built, and whether they fit the keys."""

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future

import kvdb.catalog.segments.index_files as index_files
from indexes.base import Index, IndexCorrupt
from kvdb.catalog.segments.index_set import Progress
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.segment_view import Views
from kvdb.errors import IntegrityError, Unavailable
from kvdb.types import IndexInfo

POLL_SECONDS = 0.2
"""How often `is_wanted` is asked while builds are waited for."""


def wait(builds: list[Future[None]], is_wanted: Callable[[], bool]) -> None:
    """Wait until all builds are done. Raises the error of the first that failed, and Unavailable once `is_wanted` says no."""
    while pending := futures.wait(builds, POLL_SECONDS).not_done:
        if not is_wanted():
            raise Unavailable(f"nobody waits any more for {len(pending)} builds of indexes; they go on in the background")
    for build in builds:
        build.result()


def index_infos(views: Views) -> list[IndexInfo]:
    """The indexes over the segments of a context by segment and kind, including those that are unfinished, that failed, and that
    are on disk until a session needs them ("stored")."""
    infos = []
    for view in views:
        segment, built = view.segment, view.segment.indexes.built()
        stored = index_files.kept(segment)
        for kind in dict.fromkeys([*built, *segment.indexes.progress, *stored]):
            finished, files = built.get(kind, []), stored.get(kind, set())
            share = max(len(finished), len(files)) / len(segment.searched)
            progress = segment.indexes.progress.get(kind) or Progress("ready" if finished else "stored", share)
            infos.append(
                IndexInfo(
                    segment=segment.number,
                    tokens=len(segment),
                    kind=kind,
                    layers=len(finished),
                    layers_total=len(segment.searched),
                    nbytes=sum(index.nbytes for index in finished),
                    state=progress.state,
                    progress=progress.share,
                    seconds=progress.seconds,
                    seconds_expected=progress.seconds_expected,
                    error=progress.error,
                )
            )
    return infos


def verify(views: Views) -> int:
    """Check every index over these segments against its keys; the number of indexes. Raises IntegrityError."""
    count = 0
    for view in views:
        segment = view.segment
        for layer in range(len(segment.tables)):
            for index in segment.indexes.of(layer).values():
                with segment.holding(layer):
                    _verify_index(segment, index)
                count += 1
    return count


def _verify_index(segment: Segment, index: Index) -> None:
    try:
        index.verify()
    except IndexCorrupt as error:
        raise IntegrityError(f"index {index.kind} of segment {segment.number} does not fit its keys: {error}") from None
