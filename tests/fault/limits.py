"""File systems with a limit, and a process with few open files: what is refused is a typed error, and what was stored stays.

python -m tests.fault.limits
"""

import resource
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvdb.errors import CapacityError, KvdbError, Unavailable
from tests.fault.power import NoLoopMounts, call
from tests.stores import connect, holds, names, put

TMPFS_BYTES = 600 << 10
FILES_MAX = 64


@contextmanager
def small_file_system():
    """The folder of a file system of TMPFS_BYTES. Raises NoLoopMounts."""
    with tempfile.TemporaryDirectory() as folder:
        call("mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "none", folder)
        try:
            yield Path(folder)
        finally:
            call("umount", folder)


def tokens_of(number):
    """Tokens that begin like no others."""
    return np.r_[number, np.arange(200) % 60]


def fill(db, most=64):
    """Store contexts until one is refused. Returns how many there are, and the error, None for none."""
    for number in range(most):
        try:
            put(db, tokens_of(number), f"c{number}")
        except KvdbError as error:
            return number, error
    return most, None


def check(db, count):
    """Raises AssertionError unless that many contexts are there, and whole."""
    assert names(db) == sorted(f"c{number}" for number in range(count))
    assert all(holds(db, tokens_of(number)) for number in range(count))
    db._transport.check_integrity()


def full_disk():
    """No room: CapacityError, nothing half there, and room again after a drop. Returns how many contexts found room."""
    with small_file_system() as folder:
        with connect(folder / "store") as db:
            count, error = fill(db)
            assert isinstance(error, CapacityError), repr(error)
            assert count > 1
            check(db, count)
            db.drop(f"c{count - 1}")
            put(db, tokens_of(count - 1), f"c{count - 1}")
        with connect(folder / "store") as db:
            check(db, count)
    return count


def read_only_disk():
    """A file system that is read-only now: the store is refused, and is as it was when it can be written again. Linux remounts no
    file system while a file is open for writing, so that a store that is open is never met by this."""
    with small_file_system() as folder:
        with connect(folder / "store") as db:
            put(db, tokens_of(0), "c0")
        call("mount", "-o", "remount,ro", str(folder))
        try:
            connect(folder / "store").close()
        except Unavailable:
            pass
        else:
            raise AssertionError("a store that cannot be written was opened")
        call("mount", "-o", "remount,rw", str(folder))
        with connect(folder / "store") as db:
            check(db, 1)
            put(db, tokens_of(1), "c1")
            check(db, 2)


def few_files(folder):
    """FILES_MAX open files: typed errors where they do not suffice, and none is left open. Returns how many contexts were stored
    with those that there are."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_MAX, before[1]))
        with connect(folder / "store") as db:
            count, error = fill(db, most=24)
            assert error is None, repr(error)
            for number in range(count):
                db.offload(f"c{number}")
            check(db, count)
            taken = _take_all_files()
            try:
                put(db, tokens_of(count), "no file is left")
            except (Unavailable, CapacityError):
                pass
            else:
                raise AssertionError("a context was stored without a file")
            finally:
                for file in taken:
                    file.close()
            check(db, count)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return count


def _take_all_files():
    taken = []
    while True:
        try:
            taken.append(open("/dev/null"))  # noqa: SIM115, closed by the caller
        except OSError:
            return taken


def main():
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(f"{FILES_MAX} open files: {few_files(Path(folder))} contexts stored, nothing lost\n")
    try:
        sys.stdout.write(f"a full disk of {TMPFS_BYTES:,} bytes: {full_disk()} contexts found room, nothing lost or half there\n")
        read_only_disk()
        sys.stdout.write("a file system that was remounted read-only: the store was refused, and as it was afterwards\n")
    except NoLoopMounts as reason:
        sys.exit(f"tests.fault.limits cannot mount file systems here: {reason}")


if __name__ == "__main__":
    main()
