"""Makes the mistakes of people and of their jobs: removes the lock file of an open store, lets a second process write to it, puts
an older catalogue in place, damages a backup.

python -m tests.fault.mistakes --stores 100 --seed 1
"""

import argparse
import fcntl
import logging
import shutil
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np

from kvdb.errors import IntegrityError, KvdbError, NotFound, Unavailable
from tests.fault.flips import change
from tests.fault.story import open_store, tokens_of
from tests.stores import holds, names, put

OTHER = np.arange(63, 0, -1)
"""Tokens that begin unlike all others."""
MEMORY = Path("/dev/shm")


class Kept:
    """A store, and the contexts that it acknowledged, tokens by name."""

    def __init__(self, folder, rng):
        self.folder = folder
        self.acknowledged = {}
        self._rng = rng

    def put(self, db):
        """Import one more context. Raises what that raises, and then nothing was acknowledged."""
        number = int(self._rng.integers(1 << 30))
        tokens = tokens_of(number, 0)
        put(db, tokens, str(number))
        self.acknowledged[str(number)] = tokens

    def drop(self, db):
        name = min(self.acknowledged)
        db.drop(name)
        del self.acknowledged[name]

    def use(self, db, calls):
        for _ in range(calls):
            if len(self.acknowledged) > 2 and self._rng.random() < 0.3:
                self.drop(db)
            else:
                self.put(db)

    def check(self):
        """Raises AssertionError where what is there is not what was acknowledged."""
        with open_store(self.folder) as db:
            assert names(db) == sorted(self.acknowledged), f"{names(db)} and not {sorted(self.acknowledged)}"
            assert all(holds(db, tokens) for tokens in self.acknowledged.values()), "a context is not whole"
            db._transport.check_integrity()
            assert not db.verify_store()


def lock_removed(kept, rng):
    """The lock file goes while the store is open, and another wants to open it."""
    with open_store(kept.folder) as db:
        kept.use(db, 3)
        (kept.folder / "lock").unlink()
        try:
            with open_store(kept.folder):
                raise AssertionError("a second process opened the store")
        except Unavailable:
            pass
        kept.use(db, int(rng.integers(1, 4)))
    kept.check()


def second_writer(kept, rng):
    """Nothing can be locked, and two write to the store by turns."""
    with patch.object(fcntl, "flock", lambda _file, _how: None), open_store(kept.folder) as first:
        kept.use(first, 3)
        with open_store(kept.folder) as second:
            for db in rng.choice([first, second], 8):
                with suppress(Unavailable, NotFound):  # the first knows nothing of what the second has
                    kept.use(db, 1)
    kept.check()


def older_catalogue(kept, rng):
    """A copy of the catalogue that was made in use comes back, is used, and then the newest one is put back."""
    older = kept.folder.with_name("older.db")
    with open_store(kept.folder) as db:
        kept.use(db, 3)
        shutil.rmtree(kept.folder.with_name("backup"), ignore_errors=True)
        db.backup(kept.folder.with_name("backup"))
        shutil.copy(kept.folder.with_name("backup") / "catalog.db", older)
        for _ in range(int(rng.integers(1, 6))):
            kept.put(db)  # what is dropped is gone, whichever catalogue is there
    newest = kept.folder.with_name("newest.db")
    shutil.copy(kept.folder / "catalog.db", newest)
    before = set(kept.folder.glob("segments/*.segment"))
    _lay(older, kept.folder)
    for _ in range(int(rng.integers(1, 4))):
        with open_store(kept.folder) as db:
            assert all(holds(db, kept.acknowledged[name]) for name in names(db) if name != "other")
            if "other" not in names(db):
                put(db, OTHER, "other")  # shares nothing, so that no compaction removes what both catalogues name
    assert before <= set(kept.folder.glob("segments/*.segment")), "opening removed a newer segment"
    _lay(newest, kept.folder)
    kept.check()
    with open_store(kept.folder) as db:
        assert db.unknown_files(remove=True), "what the older catalogue got is not listed"
    kept.check()


def _lay(catalogue, folder):
    for path in folder.glob("catalog.db*"):
        path.unlink()
    shutil.copy(catalogue, folder / "catalog.db")


def damaged_backup(kept, rng):
    """Bits change in every file of a backup that was copied: the store is whole, and the backup never answers wrongly."""
    backup = kept.folder.with_name("backup")
    shutil.rmtree(backup, ignore_errors=True)
    with open_store(kept.folder) as db:
        kept.use(db, 3)
        db.backup(backup)
    for path in backup.glob("segments/*"):
        change(path, rng, cut=False)
    kept.check()
    with suppress(KvdbError), open_store(backup) as db:
        for tokens in kept.acknowledged.values():
            with suppress(IntegrityError, NotFound):
                holds(db, tokens)


def linked_backup(kept, rng):
    """A bit changes in a backup of hard links, which is the store's own: it is told, and never answered from."""
    backup = kept.folder.with_name("backup")
    shutil.rmtree(backup, ignore_errors=True)
    with open_store(kept.folder) as db:
        kept.use(db, 3)
        assert db.backup(backup, link=True).linked
    path = min(backup.glob("segments/*.segment"))
    before = path.read_bytes()
    change(path, rng, cut=False)
    with open_store(kept.folder) as db:
        for tokens in kept.acknowledged.values():
            with suppress(IntegrityError, NotFound):
                holds(db, tokens)
    path.write_bytes(before)
    kept.check()


MISTAKES = (lock_removed, second_writer, older_catalogue, damaged_backup, linked_backup)


def run(stores, seed):
    """Make each mistake with so many stores. Returns how often each was made. Raises AssertionError for what is lost or wrong."""
    made = Counter()
    for number in range(stores):
        for mistake in MISTAKES:
            rng = np.random.default_rng((seed, number, len(made)))
            with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as root:
                try:
                    mistake(Kept(Path(root) / "store", rng), rng)
                except (AssertionError, KvdbError) as error:
                    raise AssertionError(f"{mistake.__name__}, store {number} of seed {seed}: {error}") from error
            made[mistake.__name__.replace("_", " ")] += 1
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.getLogger("kvdb").setLevel(logging.CRITICAL)
    made = run(given.stores, given.seed)
    sys.stdout.write(f"{', '.join(f'{count} {what}' for what, count in made.items())}: nothing lost, nothing wrong\n")


if __name__ == "__main__":
    main()
