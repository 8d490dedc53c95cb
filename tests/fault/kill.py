"""Kills processes that use a store, again and again, and looks at what is left each time.

python -m tests.fault.kill --kills 1000 --seed 1
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from time import sleep

import numpy as np

from kvdb.types import DURABILITIES
from tests.fault.story import Step, after, is_whole, lives, open_store


class Told:
    """What killed processes said of a store. state: what was acknowledged, contexts by name. doubtful: what is stored if the last
    call had its effect after all, None where there is no doubt. may_go: which contexts may be gone without a call, as a function
    of one. calls: how many were acknowledged, by action."""

    def __init__(self, may_go=lambda kept: False):
        self.state = {}
        self.doubtful = None
        self.may_go = may_go
        self.calls = Counter()

    @property
    def acknowledged(self):
        return self.calls.total()

    def read(self, seed, lines):
        for line in lines:
            said, *words = line.split()
            if said == "there":
                self._forget(words)
                continue
            step = Step.from_words(*words)
            if said == "begins":
                self.doubtful = after(self.state, seed, step)
                continue
            if said == "did":
                self.calls[step.action] += 1
                self.state = self.doubtful
            self.doubtful = None

    def _forget(self, there):
        """What has to be there is one of these names, and they are no others."""
        gone = [name for name in self.state if name not in there]
        assert all(self.may_go(self.state[name]) for name in gone), f"{gone} went while the process lived"
        assert len(there) == len(self.state) - len(gone), f"{there} are there, and {sorted(self.state)} were told"
        self.state = {name: kept for name, kept in self.state.items() if name in there}

    def settle(self, found):
        """The last call had its effect, or it had none: what is found says which. found: lives by name. Returns the number of
        contexts that are gone as they may. Raises AssertionError where what was told is not what is found."""
        told = [self.state] if self.doubtful is None else [self.doubtful, self.state]
        self.doubtful = None
        for state in sorted(told, key=lambda one: len(one.keys() - found.keys())):
            gone = state.keys() - found.keys()
            left = {name: kept for name, kept in state.items() if name in found}
            if all(self.may_go(state[name]) for name in gone) and {name: kept.life for name, kept in left.items()} == found:
                self.state = left
                return len(gone)
        raise AssertionError(f"{found} are stored, and {[{name: kept.life for name, kept in one.items()} for one in told]} told")

    def check(self, folder, where):
        """Compare a store with what was told. Returns the number of contexts that are gone as they may. Raises AssertionError or
        IntegrityError for anything that is lost, wrong, half there or left behind."""
        with open_store(folder) as db:
            try:
                gone = self.settle(lives(db))
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from None
            for name, kept in self.state.items():
                assert is_whole(db, name, kept), f"{where}: {name} is not what was stored"
            db._transport.check_integrity()
            assert not db.check_store(), f"{where}: contexts are damaged"
        return gone


class Processes:
    """Starts processes that use a store and kills them. One that has everything imported forks them, as a start takes longer than
    all that is done afterwards."""

    def __init__(self, *, heard=True):
        """heard: whether to show what they say of errors."""
        self._folder = tempfile.TemporaryDirectory()
        self._fifo = Path(self._folder.name) / "said"
        os.mkfifo(self._fifo)
        command = [sys.executable, "-m", "tests.fault.killed"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # one that forks has no other threads
        errors = None if heard else subprocess.DEVNULL
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, bufsize=1, env=environment)

    def lines_until_killed(self, folder, seed, seconds, durability, *, limits="wide", before=None):
        """What a process says until it is killed, some seconds after its first step. before: is called just before that."""
        self._process.stdin.write(f"{self._fifo} {folder} {seed} {durability} {limits}\n")
        with self._fifo.open() as said:
            child = int(said.readline())
            lines = [said.readline()]
            sleep(seconds)  # the very point at which it is killed is up to chance
            if before is not None:
                before()
            with suppress(ProcessLookupError):
                os.kill(child, SIGKILL)
            lines += said.read().splitlines(keepends=True)
        ended = int(self._process.stdout.readline())
        assert ended == -SIGKILL or before is not None, "the process ended by itself"
        return [line for line in lines if line.endswith("\n")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


def run(folder, kills, seed, durability="durable", limits="wide"):
    """Kill a process `kills` times. Returns how many calls were acknowledged, by action. Raises AssertionError for anything that
    is lost, wrong, half there or left behind, and for contexts of the durability "memory" that outlive their process."""
    told = Told((lambda kept: not kept.pinned) if limits == "narrow" else (lambda kept: False))
    rng = np.random.default_rng(seed)
    with Processes() as processes:
        for number in range(kills):
            run_seed = seed * 100_000 + number
            told.read(run_seed, processes.lines_until_killed(folder, run_seed, rng.uniform(0, 0.4), durability, limits=limits))
            if durability == "memory":
                told.state, told.doubtful = {}, None
            told.check(folder, f"kill {number} of seed {seed}")
    return told.calls


def counted(calls):
    """How many calls were acknowledged, in words."""
    return f"{calls.total():,} calls acknowledged ({', '.join(f'{count:,} {action}' for action, count in sorted(calls.items()))})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--durability", choices=DURABILITIES, default="durable")
    parser.add_argument("--limits", choices=("wide", "narrow"), default="wide", help="whether contexts have to go to make room")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = run(Path(folder) / "store", given.kills, given.seed, given.durability, given.limits)
    promised = "nothing lost, wrong or half there" if given.durability != "memory" else "nothing outlived its process"
    sys.stdout.write(f"{given.kills} kills, {counted(calls)}: {promised}\n")


if __name__ == "__main__":
    main()
