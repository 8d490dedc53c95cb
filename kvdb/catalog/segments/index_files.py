"""The indexes of a segment, kept as `N.KIND.LAYER.index` beside `N.segment`; see `indexes.file` for what is in them.

An index is written as soon as it is built, where its segment is stored, and loaded when a session opens over the segment. A file
with any fault is dropped, and the index built anew.
"""

import logging

import indexes.registry as registry
from indexes.base import Index, IndexCorrupt
from indexes.blocks import Blocks
from kvdb.catalog.segments.segment import Segment
from kvdb.errors import KvdbError, NotFound, Unavailable
from kvdb.storage.beside import INDEX

log = logging.getLogger(__name__)


def keep(segment: Segment, layer: int, index: Index) -> None:
    """Write an index beside its segment, if that is stored. Where that fails, the index is in memory only, and a line
    in the log says so."""
    suffix = _suffix(index.kind, layer)
    if segment.place is None or not INDEX.fullmatch(suffix):
        return
    disk, stored = segment.place
    try:
        disk.save_beside(stored, suffix, index.save)
    except KvdbError as error:
        log.warning("an index stays in main memory: %s", error)


def load(segment: Segment, kind: str, layer: int, keys: Blocks) -> Index | None:
    """The index of that kind over one layer, None where no file of it is, or one with a fault, which is dropped with a line in
    the log. keys: of that layer, which is in main memory."""
    suffix = _suffix(kind, layer)
    if segment.place is None or suffix not in segment.place[0].kept_beside(segment.place[1]):
        return None
    disk, stored = segment.place
    try:
        with disk.local_beside(stored, suffix) as path:
            return registry.load(kind, path, keys)
    except (IndexCorrupt, NotFound, Unavailable) as error:
        log.warning("an index is dropped, and built anew: %s", error)
        disk.remove_beside(stored, suffix)
        return None


def kept(segment: Segment) -> dict[str, set[int]]:
    """The layers whose indexes have files, by kind; kinds that are not registered are left out."""
    found: dict[str, set[int]] = {}
    if segment.place is not None:
        disk, stored = segment.place
        for suffix in disk.kept_beside(stored):
            matched = INDEX.fullmatch(suffix)
            if matched is not None and matched[1] in registry.KINDS and int(matched[2]) < len(segment.tables):
                found.setdefault(matched[1], set()).add(int(matched[2]))
    return found


def _suffix(kind: str, layer: int) -> str:
    return f".{kind}.{layer}.index"
