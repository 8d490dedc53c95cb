"""File systems with a limit, and a process with few open files: what is refused is a typed error, and what was stored stays.

python -m tests.fault.limits [--only-files]
"""

import faulthandler
import resource
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import kvdb
from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.errors import CapacityError, KvdbError, Unavailable
from kvdb.server.serve import Server
from tests.fault.power import Disk, NoLoopMounts, call
from tests.fault.story import open_config
from tests.stores import connect, holds, names, put

TMPFS_BYTES = 600 << 10
FILES_MAX = 64
FILES_SECONDS_MAX = 200
"""A process with few open files that takes longer says where its threads are, and ends."""


@contextmanager
def small_file_system(nbytes=TMPFS_BYTES):
    """The folder of a file system of that size. Raises NoLoopMounts."""
    with tempfile.TemporaryDirectory() as folder:
        call("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", folder)
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
    """Raises AssertionError unless that many contexts are there, and whole, in a client of an embedded database."""
    _check(db, db._transport, count)


def _check(db, engine, count):
    assert names(db) == sorted(f"c{number}" for number in range(count))
    assert all(holds(db, tokens_of(number)) for number in range(count))
    engine.check_integrity()


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
    file system while a file is open for writing; see `read_only_in_use` for what a store that is open may meet."""
    with small_file_system() as folder:
        with connect(folder / "store") as db:
            put(db, tokens_of(0), "c0")
        call("mount", "-o", "remount,ro", str(folder))
        with refused(Unavailable):
            connect(folder / "store")
        call("mount", "-o", "remount,rw", str(folder))
        with connect(folder / "store") as db:
            check(db, 1)
            put(db, tokens_of(1), "c1")
            check(db, 2)


def read_only_in_use():
    """A file system that becomes read-only while a store is used, as ext4 does by itself when it meets an error: what changes the
    store is refused, everything that is there is answered from, and is there when it can be written again."""
    with tempfile.TemporaryDirectory() as root:
        disk = Disk(Path(root))
        store = disk.folder / "store"
        with disk.mounted("loop,errors=remount-ro"):
            with connect(store) as db:
                put(db, tokens_of(0), "c0")
                put(db, tokens_of(1), "c1")
                disk.fail()
                for change in (
                    lambda: put(db, tokens_of(2), "c2"),
                    lambda: db.pin("c0"),
                    lambda: db.rename("c0", "c3"),
                    lambda: db.drop("c0"),
                ):
                    with refused(Unavailable):
                        change()
                db.build_index("c0")
                db.offload("c1")
                check(db, 2)
            with refused(Unavailable):
                connect(store)
        with disk.mounted(), connect(store) as db:
            check(db, 2)


@contextmanager
def refused(*kinds):
    """Raises AssertionError unless the body raises one of these errors."""
    try:
        yield
    except kinds:
        return
    raise AssertionError("what has to be refused was done")


def few_files(folder):
    """FILES_MAX open files, for a store with indexes and a server of it: typed errors where they do not suffice, and none is left
    open. Returns how many contexts were stored with those that there are."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_MAX, before[1]))
        with Database(open_config(path=str(folder / "store"))) as engine:
            server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
            server.start()
            try:
                with kvdb.connect(server.target) as db:
                    count = _use_few_files(db, engine)
            finally:
                server.stop(grace=0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return count


def _use_few_files(db, engine):
    """Store as many contexts as there are names, with indexes, have them go to disk and come back; then take all files away."""
    count, error = fill(db, most=24)
    assert error is None, repr(error)
    for number in range(count):
        db.build_index(f"c{number}")
        db.offload(f"c{number}")
    _check(db, engine, count)
    assert engine.wait_for_builds(60), "indexes that sessions asked for would give files back"
    taken = _take_all_files()
    try:
        with refused(Unavailable, CapacityError):
            put(db, tokens_of(count), "no file is left")
    finally:
        for file in taken:
            file.close()
    _check(db, engine, count)
    return count


def _take_all_files():
    taken = []
    while True:
        try:
            taken.append(open("/dev/null"))  # noqa: SIM115, closed by the caller
        except OSError:
            return taken


def main():
    faulthandler.dump_traceback_later(FILES_SECONDS_MAX, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(f"{FILES_MAX} open files: {few_files(Path(folder))} contexts stored, nothing lost\n")
    faulthandler.cancel_dump_traceback_later()
    if "--only-files" in sys.argv:
        return
    try:
        sys.stdout.write(f"a full disk of {TMPFS_BYTES:,} bytes: {full_disk()} contexts found room, nothing lost or half there\n")
        read_only_disk()
        sys.stdout.write("a file system that was remounted read-only: the store was refused, and as it was afterwards\n")
        read_only_in_use()
        sys.stdout.write("a file system that became read-only in use: changes were refused, queries answered, nothing lost\n")
    except NoLoopMounts as reason:
        sys.exit(f"tests.fault.limits cannot mount file systems here: {reason}")


if __name__ == "__main__":
    main()
