"""A disk that is full at every point of every call: what finds no room is a CapacityError, or not kept, and nothing else is lost.

python -m tests.fault.no_room --every 8192
"""

import argparse
import logging
import os
import sys
from collections import Counter
from contextlib import suppress

import kvdb.client.context_file as context_file
from kvdb.errors import CapacityError
from tests.fault.kill import Told
from tests.fault.limits import small_file_system
from tests.fault.power import NoLoopMounts
from tests.fault.story import Step, carry_out, open_store
from tests.stores import connect, holds, names, put

SEED = 9
SIZE_BYTES = 2 << 20
BEFORE = [Step("put", "a", "", 1), Step("put", "b", "", 2), Step("fork", "c", "a", 3)]
CALLS = [
    Step("put", "new", "", 4),
    Step("fork", "new", "a", 5),
    Step("blend", "new", "a", 6),
    Step("index", "a", "", 7),
    Step("note", "b", "", 8),
    Step("rename", "b", "new", 9),
    Step("offload", "a", "", 10),
    Step("compact", "a", "", 11),
    Step("drop", "a", "", 12),
]
"""The calls that meet a full disk, each in a store of its own."""


def fill(folder, room):
    """Leave about `room` bytes of the file system."""
    with (folder / "filler").open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(max(0, os.fstat(file.fileno()).st_size - room))


def met(step, room):
    """Make a call where only `room` bytes are left. Returns whether it was refused. Raises AssertionError or IntegrityError for
    anything lost, wrong, half there or left behind."""
    told = Told()
    told.read(SEED, [f"did {one}" for one in BEFORE])
    with small_file_system(SIZE_BYTES) as folder:
        with open_store(folder / "store") as db:
            for one in BEFORE:
                carry_out(db, SEED, one, "durable")
            fill(folder, room)
            try:
                carry_out(db, SEED, step, "durable")
            except CapacityError:
                refused = True
            else:
                refused = False
                told.read(SEED, [f"did {step}"])
            db._transport.check_integrity()
            for number, kept in enumerate(told.states[0].values()):  # what is there goes on being answered from
                assert holds(db, kept.tokens) or kept.recomputed, f"{step}, {room} bytes left: {number} is lost"
        (folder / "filler").unlink()
        told.check(folder / "store", f"{step}, {room} bytes left")
    return refused


def copies(room):
    """Back a store up, and export a context, to where only `room` bytes are left. Returns what was refused."""
    refused = set()
    with small_file_system(SIZE_BYTES) as folder, small_file_system(SIZE_BYTES) as target:
        with open_store(folder / "store") as db:
            for one in BEFORE:
                carry_out(db, SEED, one, "durable")
            fill(target, room)
            try:
                context_file.write(db.get("a"), target / "a.safetensors")
            except OSError:
                refused.add("export")
                left = [path.name for path in target.iterdir() if path.name.startswith("a.")]
                assert not left, f"{room} bytes left: {left} are left behind"
            try:
                db.backup(target / "backup")
            except CapacityError:
                refused.add("backup")
                assert not (target / "backup" / "store.json").exists()
        (target / "filler").unlink()
        if "backup" not in refused:
            with open_store(target / "backup") as copy:
                assert len(copy.contexts()) == len(BEFORE)
    return refused


def offloaded(room):
    """Contexts leave main memory for a disk with `room` bytes. Returns whether an import was refused."""
    tokens = [[number, *range(300)] for number in range(8)]
    with small_file_system(SIZE_BYTES) as folder, connect(None, disk_path=str(folder), cpu_bytes_max=400_000) as db:
        fill(folder, room)
        stored = 0
        with suppress(CapacityError):
            for number in range(len(tokens)):
                put(db, tokens[number], str(number))
                stored += 1
        (folder / "filler").unlink()  # to read what has left memory, others have to leave it
        assert names(db) == [str(number) for number in range(stored)]
        assert all(holds(db, tokens[int(name)]) for name in names(db))
        db._transport.check_integrity()
    return stored < len(tokens)


def run_all(every):
    """How often each call was refused, by its action."""
    refused = Counter()
    for room in range(0, 400_000, every):
        for step in CALLS:
            refused[step.action] += met(step, room)
        refused.update(copies(room))
        refused["import over a full memory"] += offloaded(room)
    return refused


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=8192, help="bytes from one room that is left to the next")
    given = parser.parse_args()
    logging.getLogger("kvdb").setLevel(logging.ERROR)  # indexes that find no room are warnings
    try:
        refused = run_all(given.every)
    except NoLoopMounts as reason:
        sys.exit(f"tests.fault.no_room cannot mount file systems here: {reason}")
    calls = ", ".join(f"{count} {action}" for action, count in sorted(refused.items()))
    sys.stdout.write(f"a disk with 0 to 400,000 bytes left, refused: {calls}; nothing lost, wrong or half there\n")


if __name__ == "__main__":
    main()
