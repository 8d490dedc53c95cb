"""Kills processes that use a store, again and again, and looks at what is left each time.

python -m tests.fault.kill --kills 1000 --seed 1
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from signal import SIGKILL
from time import sleep

import numpy as np

from kvdb.types import DURABILITIES
from tests.fault.killed import tokens_of
from tests.stores import connect, holds, names


class Told:
    """What killed processes said of a store. contexts: what was acknowledged, tokens by name. doubtful: the name that the last
    call was about, which may have had its effect or not, and the tokens that it then has; None for none."""

    def __init__(self):
        self.contexts = {}
        self.doubtful = None
        self.acknowledged = 0

    def read(self, seed, lines):
        for line in lines:
            said, action, name, step = line.split()
            tokens = tokens_of(seed, int(step)) if action == "put" else None
            if said == "begins":
                self.doubtful = (name, tokens) if action in {"put", "drop"} else None
                continue
            self.acknowledged += 1
            self.doubtful = None
            if action == "put":
                self.contexts[name] = tokens
            elif action == "drop":
                del self.contexts[name]

    def settle(self, found):
        """The last call had its effect, or it had none: what is found says which. Returns whether the store holds just that."""
        if self.doubtful is not None:
            name, tokens = self.doubtful
            if name not in found:
                self.contexts.pop(name, None)
            elif tokens is not None:
                self.contexts[name] = tokens
            self.doubtful = None
        return sorted(self.contexts) == found


def run(folder, kills, seed, durability="durable"):
    """Kill a process `kills` times. Returns how many calls were acknowledged. Raises AssertionError for anything that is lost,
    wrong, half there or left behind, and for contexts of the durability "memory" that outlive their process after all."""
    told = Told()
    rng = np.random.default_rng(seed)
    for number in range(kills):
        run_seed = seed * 100_000 + number
        told.read(run_seed, lines_until_killed(folder, run_seed, rng.uniform(0, 0.4), durability))
        if durability == "memory":
            told.contexts, told.doubtful = {}, None
        with connect(folder) as db:
            assert told.settle(names(db)), (
                f"kill {number} of seed {seed}: {names(db)} are stored, and {sorted(told.contexts)} told"
            )
            for name, tokens in told.contexts.items():
                assert holds(db, tokens), f"kill {number} of seed {seed}: {name} is not what was stored"
            db._transport.check_integrity()
    return told.acknowledged


def lines_until_killed(folder, seed, seconds, durability, before=None):
    """What a process says until it is killed, some seconds after its first word. before: is called just before that."""
    command = [sys.executable, "-m", "tests.fault.killed", str(folder), str(seed), durability]
    errors = None if before is None else subprocess.DEVNULL  # it meets many on a disk that is gone
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        sleep(seconds)  # the very point at which it is killed is up to chance
        if before is not None:
            before()
        process.kill()
        lines += process.stdout.read().splitlines(keepends=True)
        assert process.wait() == -SIGKILL or before is not None, "the process ended by itself"
    return [line for line in lines if line.endswith("\n")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--durability", choices=DURABILITIES, default="durable")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        acknowledged = run(Path(folder) / "store", given.kills, given.seed, given.durability)
    promised = "nothing lost, wrong or half there" if given.durability != "memory" else "nothing outlived its process"
    done = f"{given.kills} kills, {acknowledged:,} calls of durability {given.durability} acknowledged, seed {given.seed}"
    sys.stdout.write(f"{done}: {promised}\n")


if __name__ == "__main__":
    main()
