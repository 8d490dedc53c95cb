"""The SQLite database under a catalogue's file: transactions that wait for the disk or not, and its errors as those of kvdb.

A row is there once the transaction that wrote it is on the disk (write-ahead log, synchronous=FULL), and names only files that
were on the disk before. A transaction that need not outlive the loss of power waits for no disk (synchronous=NORMAL): it reaches
the disk with the next one that does, and the files that it names before that. Every other commit goes on into the file itself:
where a bit of the log changes, SQLite takes what follows for commits that were never finished, and they would be lost without a
word.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from errno import EIO
from functools import partial
from pathlib import Path

from kvdb.catalog.durable.writer import Writer
from kvdb.errors import CapacityError, IntegrityError, KvdbError, Unavailable

LOCK_SECONDS = 2
"""How long a write waits for a tool that reads the file, such as a backup; no other database has it open."""
READ_BYTES = 1 << 20
UNSYNCED_PAGES = 1000
"""How long the log may grow by transactions that wait for no disk, in pages of 4 KiB."""


class CatalogDatabase:
    """One open SQLite file. Not thread-safe: its owner locks. writer: counts its transactions, None before `prepare` sets it.

    After a write that failed, nothing is written any more until the file is opened again, because nobody knows what reached the
    disk.
    """

    def __init__(self, path: Path, sync_files: Callable[[], None], prepare: Callable[["CatalogDatabase"], None]) -> None:
        """Open the file, or make it. sync_files: waits until the files that rows name are on the disk, and raises Unavailable
        where they may never be. prepare: looks at what was opened before anybody else does, and may raise, which closes it.
        Raises IntegrityError for a file that SQLite cannot read, and Unavailable where it cannot be used."""
        self.path = path
        self._failed = ""
        self._sync_files = sync_files
        self._synced = True
        self.writer: Writer | None = None
        with self.typed_while_opening():
            path.touch(0o600)
            self._identity = _identity(path)
            self.connection = sqlite3.connect(path, LOCK_SECONDS, isolation_level=None, check_same_thread=False)
            # what was changed has a wrong checksum
            self.connection.text_factory = partial(str, encoding="utf-8", errors="replace")
            with ExitStack() as undo:
                undo.callback(self.connection.close)
                self.connection.execute("PRAGMA journal_mode = WAL")
                self._wait_for_disk(True)
                prepare(self)
                undo.pop_all()

    def copy_to(self, path: Path) -> None:
        """Write everything in it to another file. Raises CapacityError or Unavailable."""
        with self.typed(), closing(sqlite3.connect(path)) as copy:
            self.connection.backup(copy)

    def close(self) -> None:
        """Carry everything into the file itself, and close it. Raises Unavailable where files that rows name may be lost."""
        try:
            self._sync_files()
        finally:
            self.connection.close()

    @contextmanager
    def transaction(self, *, synced: bool = True) -> Iterator[sqlite3.Connection]:
        """Everything that the body writes, or nothing. synced: wait until it is on the disk. Raises CapacityError or Unavailable,
        and then none is there as far as anybody can see."""
        if self._failed:
            raise Unavailable(f"the store takes nothing more, because {self._failed}; close it and open it again")
        if synced:
            self._sync_files()
        with self.typed():
            if synced != self._synced:
                self._wait_for_disk(synced)
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                self._check_own()
                yield self.connection
                self.connection.execute("COMMIT")
            except (sqlite3.Error, OSError) as error:
                if isinstance(error, Unavailable):
                    self._failed = str(error)
                elif not isinstance(error, sqlite3.Error) or error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    self._failed = f"{self.path} could not be written ({error})"
                with suppress(sqlite3.Error):
                    if self.connection.in_transaction:
                        self.connection.execute("ROLLBACK")
                raise
            if self.writer is not None:
                self.writer.committed()

    def _check_own(self) -> None:
        """Raises Unavailable where the file that is open is not that of the store any more, or another has opened it."""
        if _identity(self.path) != self._identity:
            raise Unavailable(f"{self.path} was removed or replaced while it was open; nothing reaches the store any more")
        if self.writer is not None:
            self.writer.begin(self.connection)

    @contextmanager
    def typed(self) -> Iterator[None]:
        """Errors of SQLite become errors of kvdb."""
        try:
            yield
        except KvdbError:
            raise
        except OSError as error:
            raise Unavailable(f"{self.path} cannot be used: {error.strerror}") from None
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise CapacityError(f"{self.path.parent} has no room for the catalogue; free some of the disk") from None
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # a table or column that is not there any more
                raise IntegrityError(f"{self.path} was damaged: {error}; nothing of it was touched") from None
            raise Unavailable(f"{self.path} cannot be used: {error}") from None
        except (sqlite3.Error, UnicodeDecodeError) as error:  # names of columns that were changed
            raise IntegrityError(f"{self.path} was damaged: {error}; nothing of it was touched") from None

    @contextmanager
    def typed_while_opening(self) -> Iterator[None]:
        """`typed`, but what looks damaged is read once more before it is called so: to SQLite a page that the disk fails to
        read is a page that is damaged. Whoever this raises for must not use the file any further, because reading it by its path
        gives up the locks of the connection."""
        with self.typed():
            try:
                yield
            except sqlite3.DatabaseError as error:
                if error.sqlite_errorcode == sqlite3.SQLITE_CORRUPT:
                    self._read_again()
                raise

    def _read_again(self) -> None:
        """Raises OSError where it was only the disk that failed, and sqlite3.Error where the file is damaged."""
        for path in (self.path, Path(f"{self.path}-wal")):
            with suppress(FileNotFoundError), path.open("rb") as stream:
                while stream.read(READ_BYTES):
                    pass
        with closing(sqlite3.connect(self.path)) as connection:
            if connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",):
                raise OSError(EIO, "a read of it failed, and the next one did not")

    def _wait_for_disk(self, synced: bool) -> None:
        """Have the transactions that follow wait until they are on the disk and in the file itself, or not."""
        self.connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
        self.connection.execute(f"PRAGMA wal_autocheckpoint = {1 if synced else UNSYNCED_PAGES}")
        self._synced = synced


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from every other, whatever it is called; None for none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
