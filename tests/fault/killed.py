"""A process that uses a store until it is killed, and says what it begins and what was acknowledged.

python -m tests.fault.killed FOLDER SEED [DURABILITY]

DURABILITY may be "broken": contexts are said to be durable, and their files are never synced.
"""

import os
import sys

import numpy as np

import kvdb.storage.direct_io as direct_io
from tests.stores import connect, names, put

CONTEXTS = 12
"""Names that contexts may have."""


def tokens_of(seed, step):
    """The tokens of the context that a step imports: many begin alike."""
    rng = np.random.default_rng((seed, step))
    shared = int(rng.integers(0, 4)) * 60
    return np.r_[np.arange(shared), rng.integers(0, 64, int(rng.integers(1, 300)))]


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def break_writer():
    """Have our files written through the page cache, and never synced; SQLite's still are."""
    direct_io.DIRECT = 0
    os.fsync = lambda _file: None


def main():
    folder, seed, durability = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or ["durable"])[0]
    if durability == "broken":
        break_writer()
        durability = "durable"
    rng = np.random.default_rng(seed)
    with connect(folder) as db:
        stored = set(names(db))
        for step in range(1_000_000):
            name = f"c{int(rng.integers(CONTEXTS))}"
            action = "put" if name not in stored else str(rng.choice(["drop", "offload", "open"]))
            say("begins", action, name, step)
            if action == "put":
                put(db, tokens_of(seed, step), name, durability)
                stored.add(name)
            elif action == "drop":
                db.drop(name)
                stored.remove(name)
            elif action == "offload":
                db.offload(name)
            say("did", action, name, step)


if __name__ == "__main__":
    main()
