"""Contexts that another copy of a store's catalogue knows, and this one does not, are taken into it."""

import shutil
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from kvdb.catalog.contexts.life import Life
from kvdb.catalog.durable.catalog_file import CatalogFile
from kvdb.catalog.durable.catalog_records import ContextRecord, Records, SegmentRecord, SpecRecord
from kvdb.errors import IntegrityError, NotFound
from kvdb.storage.store import segment_store
from kvdb.storage.store_folder import StoreFolder


class Adopted(NamedTuple):
    """What came of a catalogue's contexts. taken: the names of those that the store has now. left: why others, which it has not,
    were left, by their names."""

    taken: list[str]
    left: dict[str, str]


def adopt(store: Path, catalogue: Path) -> Adopted:
    """Take into a store, which no process has open, the contexts of another copy of its catalogue whose files are there.

    Nothing is copied but rows, and what a file holds is compared with its row's digest when it is first read. A context whose
    name the store has is left as it is there. Raises NotFound where either is not there, IntegrityError where the store's
    catalogue is damaged or the other is none, Unavailable and CapacityError where the store cannot be written.
    """
    if not (store / "catalog.db").is_file():
        raise NotFound(f"no store is at {store}; expected its folder")
    if not catalogue.is_file():
        raise NotFound(f"no catalogue is at {catalogue}; expected a copy of catalog.db")
    with closing(StoreFolder(store)) as folder, closing(CatalogFile(folder.catalog, folder.sync)) as file:
        folder.stamp()
        own, other, stored = file.read(), _read(catalogue), segment_store(folder).list()
        if not own.whole:
            raise IntegrityError(f"{folder.catalog} is damaged; kvdb verify says what of it, and nothing was taken in")
        found = Adopted([], dict.fromkeys(other.damaged, "its row is damaged"))
        names = {context.name for context in own.contexts}
        for context in other.contexts:
            if context.name in names:
                continue
            if (reason := _missing(context, other, own.segments, stored)) is not None:
                found.left[context.name] = reason
                continue
            spec = SpecRecord(context.spec, other.specs[context.spec])
            segments = [other.segments[view.file] for view in context.views]
            file.insert(spec, segments, context, other.lives.get(context.name, Life()))
            found.taken.append(context.name)
    return found


def _read(catalogue: Path) -> Records:
    """Everything in a catalogue, of which only a copy is opened, because that writes to it."""
    with TemporaryDirectory() as scratch:
        copy = Path(shutil.copy(catalogue, Path(scratch, "catalog.db")))
        with closing(CatalogFile(copy, lambda: None)) as file:
            return file.read()


def _missing(context: ContextRecord, other: Records, own: Mapping[str, SegmentRecord], stored: Collection[str]) -> str | None:
    """Why a context of the other catalogue cannot be taken in, None where it can."""
    if context.spec not in other.specs or any(view.file not in other.segments for view in context.views):
        return "a row that it needs is damaged"
    files = {view.file for view in context.views} | ({context.overlay.file} - {""} if context.overlay is not None else set())
    for name in sorted(files):
        if name not in stored:
            return f"its file {name} is gone"
        if name in own and name in other.segments and own[name].row() != other.segments[name].row():
            return f"{name} is another segment in this store"
    return None
