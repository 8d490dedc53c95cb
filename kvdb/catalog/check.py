"""Checks what is stored of a context against its checksums, as it is on the disk."""

import struct
from collections.abc import Iterable

import indexes.file as index_file
import kvdb.catalog.evidence_file as evidence_file
import kvdb.catalog.scores as scores_file
import kvdb.catalog.statistics_file as statistics_file
from indexes.base import IndexCorrupt
from kvdb.catalog.context import StoredContext, files_of
from kvdb.errors import IntegrityError, Unavailable
from kvdb.storage.beside import INDEX, beside
from kvdb.storage.disk import SegmentFolder
from kvdb.storage.segment_file import SegmentFile
from kvdb.types import Checked


def check(context: StoredContext, disk: SegmentFolder) -> Checked:
    """Read every file of a context, which the caller holds. Raises IntegrityError for one that is not as it was written, and
    Unavailable for one that cannot be read."""
    blocks = nbytes = indexes = 0
    for file in files_of([context]):
        file.verify()
        blocks += file.contents.layers * file.contents.blocks
        nbytes += file.nbytes
        for suffix in disk.kept_beside(file):
            nbytes += _check_beside(disk, file, suffix)
            indexes += INDEX.fullmatch(suffix) is not None
    return Checked(blocks, nbytes, indexes)


def check_copy(file: SegmentFile, suffixes: Iterable[str]) -> None:
    """Read the copy of a segment's file, and those beside it, which nobody else uses. One beside it that was written while it was
    copied, or was damaged before, is removed, as it is made anew. Raises as `check` does."""
    file.verify()
    for suffix in suffixes:
        try:
            _read_beside(file, suffix)
        except FileNotFoundError:  # it was not copied
            pass
        except IntegrityError:
            beside(file, suffix).unlink()


def _check_beside(disk: SegmentFolder, file: SegmentFile, suffix: str) -> int:
    """Check what lies beside a segment's file under that end of its name. Returns its bytes."""
    try:
        return _read_beside(file, suffix)
    except OSError as error:
        if suffix in disk.kept_beside(file):  # nobody removed it meanwhile
            raise Unavailable(f"{beside(file, suffix)} cannot be read: {error.strerror}") from None
        return 0


def _read_beside(file: SegmentFile, suffix: str) -> int:
    """`_check_beside`, which raises OSError where it cannot be read."""
    path, matched = beside(file, suffix), INDEX.fullmatch(suffix)
    try:
        if matched is not None:
            index_file.read(path, matched[1])
        elif suffix == evidence_file.SUFFIX:
            evidence_file.unpack(evidence_file.Owner.of(file), path.read_bytes())
        elif suffix == statistics_file.SUFFIX:
            statistics_file.unpack(file.contents, path.read_bytes())
        elif suffix == scores_file.SUFFIX:
            scores_file.unpack(file.contents, path.read_bytes())
        return path.stat().st_size
    except (IndexCorrupt, ValueError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise IntegrityError(f"{path} was changed: {error}; it is dropped when it is needed, and made anew") from None
