"""A process that makes a few calls of a store, one of each kind, and says which were acknowledged and which failed.

python -m tests.fault.few_calls

One is forked for each line that comes in: FIFO GO FOLDER WRITER. It begins when the FIFO `GO` was opened and closed. WRITER is
"good", or "retrying": one that takes a sync that failed for done when a second one succeeds.
"""

import logging
import os
from pathlib import Path

import kvdb.storage.segment_head as segment_head
from kvdb.errors import KvdbError
from tests.fault.processes import fork_for_each_line, say
from tests.fault.story import Step, carry_out, open_store

SEED = 5
BEFORE = [Step("put", "kept", "", 1), Step("put", "other", "", 2)]
"""What was stored before."""
CALLS = [
    Step("open", "other", "", 3),
    Step("put", "first", "", 4),
    Step("fork", "second", "first", 5),
    Step("blend", "third", "other", 6),
    Step("note", "first", "", 7),
    Step("rename", "other", "another", 8),
    Step("index", "first", "", 9),
    Step("offload", "first", "", 10),
    Step("drop", "kept", "", 11),
    Step("compact", "first", "", 12),
]


def break_writer():
    """Have a sync that fails tried again, and its second answer believed."""
    fsync = os.fsync

    def twice(file):
        try:
            fsync(file)
        except OSError:
            fsync(file)

    os.fsync = twice


def attempt(db, step):
    say("begins", step)
    try:
        carry_out(db, SEED, step, "durable")
    except KvdbError:
        say("failed", step)
    else:
        say("did", step)


def use(go, folder, writer):
    if writer == "retrying":
        break_writer()
    try:
        Path(go).read_bytes()
        db = open_store(folder)
    except (KvdbError, OSError):  # the wait for the tracer itself may be what is to fail
        return
    with db:
        for step in CALLS:
            attempt(db, step)


def main():
    segment_head.PIECE_BYTES = 1 << 13  # a block: imports of a few are written while they come
    logging.getLogger("kvdb").setLevel(logging.CRITICAL)
    fork_for_each_line(use)


if __name__ == "__main__":
    main()
