"""Changes single bits of a store's files, or cuts one short, and looks at what is answered from it.

python -m tests.fault.flips --flips 10000 --seed 1
"""

import argparse
import logging
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from kvdb.errors import IntegrityError, KvdbError
from tests.stores import connect, holds, names, put

CONTEXTS = {"doc": np.arange(300) % 50, "longer": np.r_[np.arange(300) % 50, 7, 8], "other": np.arange(200) % 31}
MEMORY = Path("/dev/shm")


def make(folder):
    """A store of three contexts, whose catalogue is one file and its log another, as a killed process leaves them."""
    with connect(folder / "open") as db:
        for name, tokens in CONTEXTS.items():
            put(db, tokens, name)
        shutil.copytree(folder / "open", folder / "good")


class Said(logging.Handler):
    """What a store says of itself in the log."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.anything = False

    def emit(self, record):
        self.anything = True


def outcome(folder):
    """What a store that was changed does: "refused" to be opened, "told" that something is damaged, or "harmless". Raises
    AssertionError for a wrong answer, and for a context that is gone without a word."""
    said = Said()
    logger = logging.getLogger("kvdb")
    logger.addHandler(said)
    try:
        with connect(folder) as db:
            told = False
            for name, tokens in CONTEXTS.items():
                try:
                    found = holds(db, tokens) and name in names(db)
                except IntegrityError:
                    told = True
                else:
                    told |= not found
                    assert found or said.anything, f"{name} is gone, and nobody was told"
            return "told" if told or said.anything else "harmless"
    except KvdbError:
        return "refused"
    finally:
        logger.removeHandler(said)


def run(flips, seed):
    """The number of changes by what came of them."""
    rng = np.random.default_rng(seed)
    outcomes = Counter()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        root = Path(name)
        make(root)
        files = sorted(path.relative_to(root / "good") for path in (root / "good").rglob("*") if path.is_file())
        for number in range(flips):
            shutil.copytree(root / "good", root / "changed")
            path = root / "changed" / files[int(rng.integers(len(files)))]
            content = bytearray(path.read_bytes())
            if content:
                at = int(rng.integers(len(content)))
                if number % 8:
                    content[at] ^= 1 << int(rng.integers(8))
                else:
                    del content[at:]
                path.write_bytes(content)
            outcomes[outcome(root / "changed")] += 1
            shutil.rmtree(root / "changed")
    return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.getLogger("kvdb").propagate = False
    sys.stdout.write(f"{given.flips} changes: {dict(run(given.flips, given.seed))}, no wrong answer\n")


if __name__ == "__main__":
    main()
