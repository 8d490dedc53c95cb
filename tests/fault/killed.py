"""A process that uses a store until it is killed, and says what it begins and what was acknowledged.

python -m tests.fault.killed

It starts one for each line that it reads: FIFO FOLDER SEED DURABILITY LIMITS. DURABILITY may be "broken": contexts are said to be
durable, and their files are never synced. LIMITS is "wide" or "narrow". What the process says goes to the FIFO, its number first.
"""

import logging
import os
import sys

import numpy as np

import kvdb.storage.direct_io as direct_io
from tests.fault.story import NARROW, REFUSED, carry_out, choose, open_store


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def break_writer():
    """Have our files written through the page cache, and never synced; SQLite's still are."""
    direct_io.DIRECT = 0
    os.fsync = lambda _file: None


def use(folder, seed, durability, limits):
    """Make calls until the process is killed. After each it says which contexts are there, as some go to make room."""
    if durability == "broken":
        break_writer()
        durability = "durable"
    rng = np.random.default_rng(seed)
    with open_store(folder, **(NARROW if limits == "narrow" else {})) as db:
        for number in range(1_000_000):
            step = choose(rng, [context.info for context in db.contexts()], number)
            say("begins", step)
            try:
                carry_out(db, seed, step, durability)
            except REFUSED:
                say("refused", step)
            else:
                say("did", step)
            if limits == "narrow":
                say("there", *(context.name for context in db.contexts()))


def main():
    logging.getLogger("kvdb").setLevel(logging.ERROR)  # indexes that find no room are warnings
    for line in sys.stdin:
        fifo, folder, seed, durability, limits = line.split()
        child = os.fork()
        if not child:
            os.dup2(os.open(fifo, os.O_WRONLY), sys.stdout.fileno())
            say(os.getpid())
            use(folder, int(seed), durability, limits)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
