"""Checks what is stored of a context against its checksums, as it is on the disk."""

import struct
from collections.abc import Iterable

import indexes.file as index_file
import kvdb.catalog.evidence.evidence_file as evidence_file
import kvdb.catalog.evidence.statistics_file as statistics_file
import kvdb.catalog.segments.scores as scores_file
import kvdb.catalog.segments.states as states_file
from indexes.base import IndexCorrupt
from kvdb.catalog.contexts.context import StoredContext, stored_of
from kvdb.errors import IntegrityError, NotFound, Unavailable
from kvdb.storage.beside import INDEX, beside
from kvdb.storage.disk import DiskTier
from kvdb.storage.segment_store import SegmentStore, missing
from kvdb.storage.stored_segment import StoredSegment
from kvdb.types import Checked


def check(context: StoredContext, disk: DiskTier) -> Checked:
    """Read everything that is stored of a context, which the caller holds. Raises IntegrityError for what is not as it was
    written, and Unavailable for what cannot be read."""
    blocks = nbytes = indexes = 0
    for segment in stored_of([context]):
        segment.verify()
        blocks += sum(segment.contents.blocks)
        nbytes += segment.nbytes
        for suffix in disk.kept_beside(segment):
            nbytes += _check_beside(disk, segment, suffix)
            indexes += INDEX.fullmatch(suffix) is not None
    return Checked(blocks, nbytes, indexes)


def check_copy(store: SegmentStore, segment: StoredSegment, suffixes: Iterable[str]) -> None:
    """Read the copy of a segment in a store, and what is beside it, which nobody else uses. What of that was written while it was
    copied, or was damaged before, is removed, as it is made anew. Raises as `check` does."""
    segment.verify()
    for suffix in suffixes:
        try:
            _read_beside(store, segment, suffix)
        except NotFound:  # it was not copied
            pass
        except IntegrityError:
            store.remove(beside(segment.key, suffix))


def _check_beside(disk: DiskTier, segment: StoredSegment, suffix: str) -> int:
    """Check what lies beside a segment under that end of its key. Returns its bytes."""
    try:
        return _read_beside(disk.store, segment, suffix)
    except (NotFound, Unavailable) as error:
        if suffix in disk.kept_beside(segment):  # nobody removed it meanwhile
            raise Unavailable(str(error)) from None
        return 0


def _read_beside(store: SegmentStore, segment: StoredSegment, suffix: str) -> int:
    """`_check_beside`, which raises NotFound where it is not there, and Unavailable where it cannot be read."""
    key, matched = beside(segment.key, suffix), INDEX.fullmatch(suffix)
    try:
        if matched is not None:
            with store.local(key) as path:
                index_file.read(path, matched[1])
                return path.stat().st_size
        content = store.get(key)
        if content is None:
            raise missing(store.where, key)
        if suffix == evidence_file.SUFFIX:
            evidence_file.unpack(evidence_file.Owner.of(segment), content)
        elif suffix == statistics_file.SUFFIX:
            statistics_file.unpack(segment.contents, content)
        elif suffix == scores_file.SUFFIX:
            scores_file.unpack(segment.contents, content)
        elif (states := states_file.SUFFIX.fullmatch(suffix)) is not None:
            states_file.unpack(segment.contents.key, int(states[1]), content)
        return len(content)
    except (IndexCorrupt, ValueError, KeyError, TypeError, OverflowError, struct.error) as error:
        place = f"{store.where}/{key}"
        raise IntegrityError(f"{place} was changed: {error}; it is dropped when it is needed, and made anew") from None
