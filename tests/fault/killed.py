"""A process that uses a store until it is killed, and says what it begins and what was acknowledged.

python -m tests.fault.killed FOLDER SEED
"""

import sys

import numpy as np

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


def main():
    folder, seed = sys.argv[1], int(sys.argv[2])
    rng = np.random.default_rng(seed)
    with connect(folder) as db:
        stored = set(names(db))
        for step in range(1_000_000):
            name = f"c{int(rng.integers(CONTEXTS))}"
            action = "put" if name not in stored else str(rng.choice(["drop", "offload", "open"]))
            say("begins", action, name, step)
            if action == "put":
                put(db, tokens_of(seed, step), name)
                stored.add(name)
            elif action == "drop":
                db.drop(name)
                stored.remove(name)
            elif action == "offload":
                db.offload(name)
            say("did", action, name, step)


if __name__ == "__main__":
    main()
