"""Who had a catalogue open, one after the other, and how many transactions each of them wrote.

The store's folder is locked by whoever has it open. Should another get in all the same, as where a file system has no such locks,
it enters itself behind this one, and from then on every transaction of this one fails, instead of writing over what the other
wrote.
"""

import secrets
import sqlite3

from kvdb.errors import Unavailable

KEPT = 1000
"""How many writers are remembered."""


class Writer:
    """One that has a catalogue open. It enters itself with its first transaction. commits: how many transactions it wrote."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """Look who had it open before."""
        self.commits = 0
        self._id = secrets.token_hex(8)
        self._number = self._entering = _last(db)
        self._before = dict(db.execute("SELECT id, commits FROM writer").fetchall())
        self._entered = False

    def stamp(self) -> str:
        """What has been written to the catalogue so far."""
        return f"{self._id} {self.commits}"

    def is_past(self, stamp: str) -> bool:
        """Whether all that a stamp says, of one who had the catalogue open before, stood in it when it was opened. That is not so
        where the catalogue is an older copy, or is not the one that was open then."""
        who, _, commits = stamp.partition(" ")
        known = self._before.get(who)
        return isinstance(known, int) and commits.isdecimal() and known >= int(commits)

    def begin(self, db: sqlite3.Connection) -> None:
        """Count a transaction, which has begun. Raises Unavailable where another entered itself meanwhile."""
        if _last(db) != self._number:
            raise Unavailable(
                "another process opened the store while this one had it open, and nothing was written over what it wrote"
            )
        if not self._entered:
            self._entering = db.execute("INSERT INTO writer (id, commits) VALUES (?, 0)", (self._id,)).lastrowid or 0
            db.execute("DELETE FROM writer WHERE number <= ?", (self._entering - KEPT,))
        db.execute("UPDATE writer SET commits = commits + 1 WHERE number = ?", (self._entering,))

    def committed(self) -> None:
        """The transaction that had begun was written."""
        self._number, self._entered = self._entering, True
        self.commits += 1


def _last(db: sqlite3.Connection) -> int:
    """The number of the last one that entered itself, 0 for none."""
    return int(db.execute("SELECT ifnull(max(number), 0) FROM writer").fetchone()[0])
