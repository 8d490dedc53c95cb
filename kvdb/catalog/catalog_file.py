"""The file of a durable catalogue: an SQLite database of the segments and contexts that are stored, and their models' specs.

A row is there once the transaction that wrote it is on the disk (write-ahead log, synchronous=FULL), and names only files that
were on the disk before. A transaction that need not outlive the loss of power waits for no disk (synchronous=NORMAL): it reaches
the disk with the next one that does, and the files that it names before that. Every other commit goes on into the file itself:
where a bit of the log changes, SQLite takes what follows for commits that were never finished, and they would be lost without a
word. SQLite has no checksums, so each row has one, and `summary` counts the rows and adds up their checksums: a row that was
changed, or lost, is noticed. A row that is wrong is never used.
"""

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from kvdb.catalog.catalog_records import (
    ContextRecord,
    LifeRecord,
    Records,
    Row,
    SegmentRecord,
    SpecRecord,
    ViewRecord,
    checksum,
    parse,
)
from kvdb.catalog.life import Life
from kvdb.errors import CapacityError, IntegrityError, Unavailable, Unsupported
from kvdb.storage.store_folder import VERSION

APPLICATION, FIRST_VERSION = 0x6B766462, 1
"""What SQLite keeps in its header: "kvdb", and the version of the tables, which is that of the store; here the oldest that is
read."""
LOCK_SECONDS = 2
"""How long a write waits for a tool that reads the file, such as a backup; no other database has it open."""
UNSYNCED_PAGES = 1000
"""How long the log may grow by transactions that wait for no disk, in pages of 4 KiB."""
LIFE_TABLE = """
CREATE TABLE life (name TEXT PRIMARY KEY, pinned INTEGER, expires REAL, metadata TEXT, created REAL, used REAL, uses INTEGER,
    crc INTEGER);
"""
SCHEMA = """
CREATE TABLE spec (digest TEXT PRIMARY KEY, fields TEXT, crc INTEGER);
CREATE TABLE segment (file TEXT PRIMARY KEY, spec TEXT, block_size INTEGER, base INTEGER, standalone INTEGER, tokens BLOB,
    crc INTEGER);
CREATE TABLE context (name TEXT PRIMARY KEY, spec TEXT, length INTEGER, prefix_end INTEGER, views TEXT, tokens BLOB, crc INTEGER,
    salt TEXT, overlay BLOB);
CREATE TABLE summary (rows INTEGER, total INTEGER);
INSERT INTO summary VALUES (0, 0);
"""
SUMMED = ("spec", "segment", "context")
"""The tables whose rows `summary` counts. Lives come and go with contexts and are written often; one that is lost is noticed by
its context."""
CAME_AND_WENT = """
CREATE TRIGGER {0}_came AFTER INSERT ON {0} BEGIN UPDATE summary SET rows = rows + 1, total = total + NEW.crc; END;
CREATE TRIGGER {0}_went AFTER DELETE ON {0} BEGIN UPDATE summary SET rows = rows - 1, total = total - OLD.crc; END;
"""
CHANGED = "CREATE TRIGGER {0}_changed AFTER UPDATE ON {0} BEGIN UPDATE summary SET total = total + NEW.crc - OLD.crc; END;"


R = TypeVar("R", SpecRecord, SegmentRecord, ContextRecord, LifeRecord)


@dataclass(frozen=True)
class Table(Generic[R]):
    """How the records of one table are written and read. from_row: makes a record of the columns but the last, the checksum."""

    insert: str
    select: str
    from_row: Callable[..., R]


SPECS = Table("INSERT OR IGNORE INTO spec VALUES (?, ?, ?)", "SELECT * FROM spec ORDER BY rowid", SpecRecord.from_row)
SEGMENTS = Table(
    "INSERT OR IGNORE INTO segment VALUES (?, ?, ?, ?, ?, ?, ?)", "SELECT * FROM segment ORDER BY rowid", SegmentRecord.from_row
)
CONTEXTS = Table(
    "INSERT INTO context (name, spec, length, prefix_end, views, tokens, salt, overlay, crc) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "SELECT name, spec, length, prefix_end, views, tokens, salt, overlay, crc FROM context ORDER BY rowid",
    ContextRecord.from_row,
)
ONE_CONTEXT = replace(CONTEXTS, select=CONTEXTS.select.replace("ORDER BY rowid", "WHERE name = ?"))
FIRST_CONTEXTS = replace(CONTEXTS, select="SELECT name, spec, length, prefix_end, views, tokens, crc FROM context ORDER BY rowid")
LIVES = Table("REPLACE INTO life VALUES (?, ?, ?, ?, ?, ?, ?, ?)", "SELECT * FROM life", LifeRecord.from_row)


class _Reading:
    """Counts the rows that are read, and notes the keys of those that are not as they were written."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.rows = self.total = 0
        self.wrong: list[str] = []

    def records(self, table: Table[R], *key: str) -> list[R]:
        found = []
        for *row, crc in self._db.execute(table.select, key):
            self.rows += 1
            self.total += crc if isinstance(crc, int) else 0
            record = parse(table.from_row, tuple(row), crc)
            if record is None:
                self.wrong.append(str(row[0]))
            else:
                found.append(record)
        return found


class CatalogFile:
    """The catalogue of one store. Not thread-safe: its owner locks.

    After a write that failed, nothing is written any more until the store is opened again, because nobody knows what reached the
    disk.
    """

    def __init__(self, path: Path, sync_files: Callable[[], None]) -> None:
        """Open the file, or make it. sync_files: waits until the files that rows name are on the disk, and raises Unavailable
        where they may never be. Raises IntegrityError for a file that is no catalogue, Unsupported for one of another version,
        and Unavailable where it cannot be used."""
        self._path = path
        self._failed = ""
        self._sync_files = sync_files
        self._synced = True
        with self._typed():
            path.touch(0o600)
            self._db = sqlite3.connect(path, LOCK_SECONDS, isolation_level=None, check_same_thread=False)
            self._db.text_factory = partial(str, encoding="utf-8", errors="replace")  # what was changed has a wrong checksum
            with ExitStack() as undo:
                undo.callback(self._db.close)
                self._open()
                undo.pop_all()

    def read(self) -> Records:
        """Everything in it. Raises IntegrityError where SQLite cannot read it, and Unavailable."""
        with self._typed():
            reading = _Reading(self._db)
            specs, segments = reading.records(SPECS), reading.records(SEGMENTS)
            others = len(reading.wrong)
            contexts = reading.records(CONTEXTS)
            summary = self._db.execute("SELECT * FROM summary").fetchall()
            lives = _Reading(self._db).records(LIVES)
        whole = not reading.wrong and summary == [(reading.rows, reading.total)]
        by_file = {one.file: one for one in segments}
        return Records(dict(specs), by_file, contexts, dict(lives), reading.wrong[others:], whole)

    def insert(
        self, spec: SpecRecord, segments: Sequence[SegmentRecord], context: ContextRecord, life: Life, *, synced: bool = True
    ) -> None:
        """Add a context, and those of its segments that are not there, and its spec. synced: wait until they are on the disk.
        Raises CapacityError or Unavailable, and then none is there as far as anybody can see."""
        with self._transaction(synced=synced):
            self._write(SPECS, spec.row())
            for segment in segments:
                self._write(SEGMENTS, segment.row())
            self._write(CONTEXTS, context.row())
            self._write(LIVES, LifeRecord(context.name, life).row())

    def replace(
        self, segments: Sequence[SegmentRecord], views: Mapping[str, tuple[ViewRecord, ...]], gone: Sequence[str]
    ) -> None:
        """Let contexts have these views, by their names, of segments some of which are added, and remove segments that none has
        any more, by their files. Raises as `insert` does, and IntegrityError for a context that was damaged meanwhile."""
        changed = []
        for name, listed in views.items():
            with self._typed():
                found = _Reading(self._db).records(ONE_CONTEXT, name)
            if not found:
                raise IntegrityError(f"context {name!r} was damaged in {self._path}; drop it, import it anew, and check the disk")
            row = found[0]._replace(views=listed).row()
            changed.append((row[4], checksum(row), name))
        with self._transaction():
            for segment in segments:
                self._write(SEGMENTS, segment.row())
            self._db.executemany("UPDATE context SET views = ?, crc = ? WHERE name = ?", changed)
            self._delete_segments(gone)

    def write_lives(self, lives: Sequence[LifeRecord]) -> None:
        """Keep what changed of contexts. Raises as `insert` does."""
        with self._transaction():
            for record in lives:
                self._write(LIVES, record.row())

    def rename(self, name: str, record: LifeRecord) -> None:
        """Give a context the name in `record`, and keep that. Raises as `insert` does."""
        with self._transaction():
            for (_, *rest), crc in [(tuple(row[:-1]), row[-1]) for row in self._db.execute(ONE_CONTEXT.select, (name,))]:
                right = crc == checksum((name, *rest))  # one that was damaged meanwhile stays so
                changed = record.name, checksum((record.name, *rest)) if right else crc, name
                self._db.execute("UPDATE context SET name = ?, crc = ? WHERE name = ?", changed)
            self._db.execute("DELETE FROM life WHERE name = ?", (name,))
            self._write(LIVES, record.row())

    def delete(self, name: str, segments: Sequence[str]) -> None:
        """Remove a context, and segments that no other context names, by their files. Raises as `insert` does."""
        with self._transaction():
            self._db.execute("DELETE FROM context WHERE name = ?", (name,))
            self._db.execute("DELETE FROM life WHERE name = ?", (name,))
            self._delete_segments(segments)

    def delete_segments(self, segments: Sequence[str]) -> None:
        """Remove segments that no context names, by their files. Raises as `insert` does."""
        if segments:
            with self._transaction():
                self._delete_segments(segments)

    def copy_to(self, path: Path) -> None:
        """Write everything in it to another file. Raises CapacityError or Unavailable."""
        with self._typed(), closing(sqlite3.connect(path)) as copy:
            self._db.backup(copy)

    def close(self) -> None:
        """Carry everything into the file itself, and close it. Raises Unavailable where files that rows name may be lost."""
        try:
            self._sync_files()
        finally:
            self._db.close()

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._wait_for_disk(True)
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if not application and not self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            triggers = "".join((CAME_AND_WENT + CHANGED).format(table) for table in SUMMED)
            marks = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION};"
            self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {LIFE_TABLE} {triggers} {marks} COMMIT;")
        elif application != APPLICATION:
            raise IntegrityError(f"{self._path} is no catalogue of kvdb; nothing of it was touched")
        elif not FIRST_VERSION <= version <= VERSION:
            raise Unsupported(f"{self._path} has version {version}; this kvdb reads versions {FIRST_VERSION} to {VERSION}")
        elif version == FIRST_VERSION:
            self._upgrade_first()

    def _upgrade_first(self) -> None:
        """Make a catalogue of version 1 one of version 2. A context that was damaged stays so, because its checksum stays."""
        with self._transaction():
            columns = ("ALTER TABLE context ADD COLUMN salt TEXT", "ALTER TABLE context ADD COLUMN overlay BLOB")
            for statement in (LIFE_TABLE, *columns, *map(CHANGED.format, SUMMED)):
                self._db.execute(statement)
            for record in _Reading(self._db).records(FIRST_CONTEXTS):
                row = record.row()
                changed = record.salt, checksum(row), record.name
                self._db.execute("UPDATE context SET salt = ?, crc = ? WHERE name = ?", changed)
                self._write(LIVES, LifeRecord(record.name, Life()).row())
            self._db.execute(f"PRAGMA user_version = {VERSION}")

    def _write(self, table: Table[R], row: Row) -> None:
        self._db.execute(table.insert, (*row, checksum(row)))

    def _delete_segments(self, segments: Sequence[str]) -> None:
        self._db.executemany("DELETE FROM segment WHERE file = ?", [(file,) for file in segments])

    def _wait_for_disk(self, synced: bool) -> None:
        """Have the transactions that follow wait until they are on the disk and in the file itself, or not."""
        self._db.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {1 if synced else UNSYNCED_PAGES}")
        self._synced = synced

    @contextmanager
    def _transaction(self, *, synced: bool = True) -> Iterator[None]:
        if self._failed:
            raise Unavailable(f"the store takes nothing more, because {self._failed}; close it and open it again")
        if synced:
            self._sync_files()
        with self._typed():
            if synced != self._synced:
                self._wait_for_disk(synced)
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    self._failed = f"{self._path} could not be written ({error})"
                with suppress(sqlite3.Error):
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """Errors of SQLite become errors of kvdb."""
        try:
            yield
        except OSError as error:
            raise Unavailable(f"{self._path} cannot be used: {error.strerror}") from None
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise CapacityError(f"{self._path.parent} has no room for the catalogue; free some of the disk") from None
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # a table or column that is not there any more
                raise IntegrityError(f"{self._path} was damaged: {error}; nothing of it was touched") from None
            raise Unavailable(f"{self._path} cannot be used: {error}") from None
        except (sqlite3.Error, UnicodeDecodeError) as error:  # names of columns that were changed
            raise IntegrityError(f"{self._path} was damaged: {error}; nothing of it was touched") from None
