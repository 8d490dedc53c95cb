"""The tables of a catalogue's file, and how their rows are written and read."""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvdb.catalog.durable.catalog_records import ContextRecord, LifeRecord, Row, SegmentRecord, SpecRecord, checksum, parse

APPLICATION, FIRST_VERSION, THIRD_VERSION = 0x6B766462, 1, 3
"""What SQLite keeps in its header: "kvdb", and the version of the tables, which is that of the store; here the oldest that is
read."""
LIFE_TABLE = """
CREATE TABLE life (name TEXT PRIMARY KEY, pinned INTEGER, expires REAL, metadata TEXT, created REAL, used REAL, uses INTEGER,
    crc INTEGER);
"""
WRITER_TABLE = "CREATE TABLE writer (number INTEGER PRIMARY KEY, id TEXT, commits INTEGER);"
SCHEMA = """
CREATE TABLE spec (digest TEXT PRIMARY KEY, fields TEXT, crc INTEGER);
CREATE TABLE segment (file TEXT PRIMARY KEY, spec TEXT, block_size INTEGER, base INTEGER, standalone INTEGER, tokens BLOB,
    crc INTEGER, format TEXT, rounding TEXT, digest TEXT);
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
UPGRADE_FIRST = (
    LIFE_TABLE,
    "ALTER TABLE context ADD COLUMN salt TEXT",
    "ALTER TABLE context ADD COLUMN overlay BLOB",
    "ALTER TABLE segment ADD COLUMN format TEXT",
    "ALTER TABLE segment ADD COLUMN rounding TEXT",
    *map(CHANGED.format, SUMMED),
)
"""Makes the tables of version 1 those of version 2."""
UPGRADE_SECOND = ("ALTER TABLE segment ADD COLUMN digest TEXT", WRITER_TABLE)
"""Makes the tables of version 2 those of version 3."""


R = TypeVar("R", SpecRecord, SegmentRecord, ContextRecord, LifeRecord)


@dataclass(frozen=True)
class Table(Generic[R]):
    """How the records of one table are written and read. from_row: makes a record of the columns but the last, the checksum."""

    insert: str
    select: str
    from_row: Callable[..., R]

    def write(self, db: sqlite3.Connection, row: Row) -> None:
        """Write the row of a record, with its checksum."""
        db.execute(self.insert, (*row, checksum(row)))


SPECS = Table("INSERT OR IGNORE INTO spec VALUES (?, ?, ?)", "SELECT * FROM spec ORDER BY rowid", SpecRecord.from_row)
SEGMENTS = Table(
    "INSERT OR IGNORE INTO segment (file, spec, block_size, base, standalone, tokens, format, rounding, digest, crc) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "SELECT file, spec, block_size, base, standalone, tokens, format, rounding, digest, crc FROM segment ORDER BY rowid",
    SegmentRecord.from_row,
)
CONTEXTS = Table(
    "INSERT INTO context (name, spec, length, prefix_end, views, tokens, salt, overlay, crc) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "SELECT name, spec, length, prefix_end, views, tokens, salt, overlay, crc FROM context ORDER BY rowid",
    ContextRecord.from_row,
)
ONE_CONTEXT = replace(CONTEXTS, select=CONTEXTS.select.replace("ORDER BY rowid", "WHERE name = ?"))
FIRST_CONTEXTS = replace(CONTEXTS, select="SELECT name, spec, length, prefix_end, views, tokens, crc FROM context ORDER BY rowid")
FIRST_SEGMENTS = replace(
    SEGMENTS, select="SELECT file, spec, block_size, base, standalone, tokens, crc FROM segment ORDER BY rowid"
)
SECOND_SEGMENTS = replace(SEGMENTS, select=SEGMENTS.select.replace("digest, ", ""))
LIVES = Table("REPLACE INTO life VALUES (?, ?, ?, ?, ?, ?, ?, ?)", "SELECT * FROM life", LifeRecord.from_row)


class Reading:
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


def schema(version: int) -> str:
    """The statements that make the tables of a new file of that version."""
    triggers = "".join((CAME_AND_WENT + CHANGED).format(table) for table in SUMMED)
    return (
        f"{SCHEMA} {LIFE_TABLE} {WRITER_TABLE} {triggers} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {version};"
    )
