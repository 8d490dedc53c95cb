"""A process that uses a store until it is killed, and says what it begins and what was acknowledged.

python -m tests.fault.killed

One is forked for each line that comes in: FIFO FOLDER SEED DURABILITY LIMITS. DURABILITY may be "broken": contexts are said to be
durable, and their files are never synced. LIMITS is "wide" or "narrow". What the process says goes to the FIFO, its number first.
"""

import logging
import os

import numpy as np

import kvdb.storage.direct_io as direct_io
import kvdb.storage.segment_head as segment_head
from tests.fault.processes import fork_for_each_line, say
from tests.fault.story import NARROW, REFUSED, carry_out, choose, open_store


def break_writer():
    """Have our files written through the page cache, and never synced; SQLite's still are."""
    direct_io.DIRECT = 0
    os.fsync = lambda _file: None


def use(folder, seed, durability, limits):
    """Make calls until the process is killed. After each it says which contexts are there, as some go to make room."""
    if durability == "broken":
        break_writer()
        durability = "durable"
    rng = np.random.default_rng(int(seed))
    with open_store(folder, **(NARROW if limits == "narrow" else {})) as db:
        for number in range(1_000_000):
            step = choose(rng, [context.info for context in db.contexts()], number)
            say("begins", step)
            try:
                carry_out(db, int(seed), step, durability)
            except REFUSED:
                say("refused", step)
            else:
                say("did", step)
            if limits == "narrow":
                say("there", *(context.name for context in db.contexts()))


def main():
    segment_head.PIECE_BYTES = 1 << 13  # a block: imports of a few are written while they come
    logging.getLogger("kvdb").setLevel(logging.ERROR)  # indexes that find no room are warnings
    fork_for_each_line(use)


if __name__ == "__main__":
    main()
