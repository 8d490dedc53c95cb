"""The file of a durable catalogue: an SQLite database of the segments and contexts that are stored, and their models' specs.

SQLite has no checksums, so each row has one, and `summary` counts the rows and adds up their checksums: a row that was changed,
or lost, is noticed. A row that is wrong is never used.
"""

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from kvdb.catalog.contexts.life import Life
from kvdb.catalog.durable.catalog_database import CatalogDatabase
from kvdb.catalog.durable.catalog_records import (
    ContextRecord,
    LifeRecord,
    Records,
    SegmentRecord,
    SpecRecord,
    ViewRecord,
    checksum,
)
from kvdb.catalog.durable.catalog_tables import (
    APPLICATION,
    CONTEXTS,
    FIRST_CONTEXTS,
    FIRST_SEGMENTS,
    FIRST_VERSION,
    LIVES,
    ONE_CONTEXT,
    SECOND_SEGMENTS,
    SEGMENTS,
    SPECS,
    THIRD_VERSION,
    UPGRADE_FIRST,
    UPGRADE_SECOND,
    Reading,
    schema,
)
from kvdb.catalog.durable.writer import Writer
from kvdb.errors import CapacityError, IntegrityError, Unavailable
from kvdb.storage.store_folder import VERSION, unreadable

log = logging.getLogger(__name__)


class CatalogFile:
    """The catalogue of one store. Not thread-safe: its owner locks. writer: who has it open."""

    def __init__(self, path: Path, sync_files: Callable[[], None]) -> None:
        """Open the file, or make it. sync_files: waits until the files that rows name are on the disk, and raises Unavailable
        where they may never be. Raises IntegrityError for a file that is no catalogue, Unsupported for one of another version,
        and Unavailable where it cannot be used."""
        self._db = CatalogDatabase(path, sync_files, _prepare)
        assert self._db.writer is not None
        self.writer = self._db.writer

    def enter(self) -> bool:
        """Say in it who has it open from now on, so that no other writes to it unnoticed. Where that cannot be written, the first
        transaction that can be does it. Returns whether it was."""
        try:
            with self._db.transaction():
                return True
        except (CapacityError, IntegrityError, Unavailable) as error:
            log.warning("the store is open, and may take nothing more: %s", error)
            return False

    def read(self) -> Records:
        """Everything in it, for whoever opens it. Raises IntegrityError where SQLite cannot read it, and Unavailable."""
        db = self._db.connection
        with self._db.typed_while_opening():
            reading = Reading(db)
            specs, segments = reading.records(SPECS), reading.records(SEGMENTS)
            others = len(reading.wrong)
            contexts = reading.records(CONTEXTS)
            summary = db.execute("SELECT * FROM summary").fetchall()
            lives = Reading(db).records(LIVES)
        whole = not reading.wrong and summary == [(reading.rows, reading.total)]
        by_file = {one.file: one for one in segments}
        return Records(dict(specs), by_file, contexts, dict(lives), reading.wrong[others:], whole)

    def insert(
        self, spec: SpecRecord, segments: Sequence[SegmentRecord], context: ContextRecord, life: Life, *, synced: bool = True
    ) -> None:
        """Add a context, and those of its segments that are not there, and its spec. synced: wait until they are on the disk.
        Raises CapacityError or Unavailable, and then none is there as far as anybody can see."""
        with self._db.transaction(synced=synced) as db:
            SPECS.write(db, spec.row())
            for segment in segments:
                SEGMENTS.write(db, segment.row())
            CONTEXTS.write(db, context.row())
            LIVES.write(db, LifeRecord(context.name, life).row())

    def replace(
        self, segments: Sequence[SegmentRecord], views: Mapping[str, tuple[ViewRecord, ...]], gone: Sequence[str]
    ) -> None:
        """Let contexts have these views, by their names, of segments some of which are added, and remove segments that none has
        any more, by their files. Raises as `insert` does, and IntegrityError for a context that was damaged meanwhile."""
        changed = []
        for name, listed in views.items():
            with self._db.typed():
                found = Reading(self._db.connection).records(ONE_CONTEXT, name)
            if not found:
                raise IntegrityError(
                    f"context {name!r} was damaged in {self._db.path}; drop it, import it anew, and check the disk"
                )
            row = found[0]._replace(views=listed).row()
            changed.append((row[4], checksum(row), name))
        with self._db.transaction() as db:
            for segment in segments:
                SEGMENTS.write(db, segment.row())
            db.executemany("UPDATE context SET views = ?, crc = ? WHERE name = ?", changed)
            _delete_segments(db, gone)

    def write_lives(self, lives: Sequence[LifeRecord]) -> None:
        """Keep what changed of contexts. Raises as `insert` does."""
        with self._db.transaction() as db:
            for record in lives:
                LIVES.write(db, record.row())

    def rename(self, name: str, record: LifeRecord) -> None:
        """Give a context the name in `record`, and keep that. Raises as `insert` does."""
        with self._db.transaction() as db:
            for (_, *rest), crc in [(tuple(row[:-1]), row[-1]) for row in db.execute(ONE_CONTEXT.select, (name,))]:
                right = crc == checksum((name, *rest))  # one that was damaged meanwhile stays so
                changed = record.name, checksum((record.name, *rest)) if right else crc, name
                db.execute("UPDATE context SET name = ?, crc = ? WHERE name = ?", changed)
            db.execute("DELETE FROM life WHERE name = ?", (name,))
            LIVES.write(db, record.row())

    def delete(self, names: Sequence[str], segments: Sequence[str]) -> None:
        """Remove contexts, and segments that no other context names, by their files. Raises as `insert` does."""
        with self._db.transaction() as db:
            db.executemany("DELETE FROM context WHERE name = ?", [(name,) for name in names])
            db.executemany("DELETE FROM life WHERE name = ?", [(name,) for name in names])
            _delete_segments(db, segments)

    def delete_segments(self, segments: Sequence[str]) -> None:
        """Remove segments that no context names, by their files. Raises as `insert` does."""
        if segments:
            with self._db.transaction() as db:
                _delete_segments(db, segments)

    def copy_to(self, path: Path) -> None:
        """Write everything in it to another file, and read that. Raises CapacityError or Unavailable, and IntegrityError where
        the copy is another."""
        self._db.copy_to(path)
        unlogged = f"{path.as_uri()}?immutable=1"  # nothing is written beside it, for which there may be no room
        with self._db.typed(), closing(sqlite3.connect(unlogged, uri=True)) as copy:
            copy.text_factory = self._db.connection.text_factory
            if _sums(copy) != _sums(self._db.connection):
                raise IntegrityError(f"{path} is not what {self._db.path} holds; check the disk")

    def close(self) -> None:
        """See `CatalogDatabase.close`."""
        self._db.close()


def _prepare(database: CatalogDatabase) -> None:
    """Make the tables of a new file, and those of an older version ones of today. Raises IntegrityError for what is no
    catalogue, and Unsupported for one of another version."""
    db = database.connection
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if not application and not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        db.executescript(f"BEGIN IMMEDIATE; {schema(VERSION)} COMMIT;")
    elif application != APPLICATION:
        raise IntegrityError(f"{database.path} is no catalogue of kvdb; nothing of it was touched")
    elif not FIRST_VERSION <= version <= VERSION:
        raise unreadable(str(database.path), version)
    elif version < VERSION:
        _upgrade(database, version)
    database.writer = Writer(db)


def _upgrade(database: CatalogDatabase, version: int) -> None:
    """Make a catalogue of an older version one of version 4, which has the tables of version 3. A row that was damaged stays so,
    because its checksum stays."""
    first, older = version == FIRST_VERSION, version < THIRD_VERSION
    with database.transaction() as db:
        for statement in (*(UPGRADE_FIRST if first else ()), *(UPGRADE_SECOND if older else ())):
            db.execute(statement)
        for segment in Reading(db).records(FIRST_SEGMENTS if first else SECOND_SEGMENTS) if older else ():
            *_, tokens, kept_as, rounding, digest = row = segment.row()
            changed = tokens, kept_as, rounding, digest, checksum(row), segment.file
            db.execute("UPDATE segment SET tokens = ?, format = ?, rounding = ?, digest = ?, crc = ? WHERE file = ?", changed)
        for record in Reading(db).records(FIRST_CONTEXTS) if first else ():
            row = record.row()
            db.execute("UPDATE context SET salt = ?, crc = ? WHERE name = ?", (record.salt, checksum(row), record.name))
            LIVES.write(db, LifeRecord(record.name, Life()).row())
        db.execute(f"PRAGMA user_version = {VERSION}")


def _sums(db: sqlite3.Connection) -> list[tuple[int, int, list[str]]]:
    """How many rows each table has, the sum of their checksums, and the keys of rows that do not match theirs."""
    readings = [Reading(db) for _ in range(4)]
    readings[0].records(SPECS)
    readings[1].records(SEGMENTS)
    readings[2].records(CONTEXTS)
    readings[3].records(LIVES)
    return [(reading.rows, reading.total, reading.wrong) for reading in readings]


def _delete_segments(db: sqlite3.Connection, segments: Sequence[str]) -> None:
    db.executemany("DELETE FROM segment WHERE file = ?", [(file,) for file in segments])


def is_gone(path: Path) -> bool:
    """Whether a catalogue is not there, or empty: it never is, once it was made."""
    return not path.exists() or not path.stat().st_size
