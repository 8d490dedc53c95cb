"""The stores that `test_segment_stores.py` tries: a line in STORES is all that another one needs to be tried."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvdb.storage.memory_store import MemoryStore
from kvdb.storage.segment_store import SegmentStore
from tests.kvdb.storage.blocks import folder


class Tried(NamedTuple):
    """How a store is tried. new: an empty one, for which a folder is there that nobody else uses. again: another one over the
    same objects, as if the process had ended; the first is used no more. overwrite: replaces all bytes of an object behind the
    store's back, as a broken disk would."""

    new: Callable[[Path], SegmentStore]
    again: Callable[[SegmentStore], SegmentStore]
    overwrite: Callable[[SegmentStore, str, bytes], None]


STORES = {
    "folder": Tried(
        new=folder,
        again=lambda store: folder(store.path),
        overwrite=lambda store, key, content: store.file(key).write_bytes(content) and None,
    ),
    "memory": Tried(
        new=lambda path: MemoryStore(path.name),
        again=lambda store: store,  # its objects end with it
        overwrite=lambda store, key, content: store.objects.update({key: content}),
    ),
}
