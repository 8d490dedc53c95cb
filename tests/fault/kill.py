"""Kills processes that use a store, again and again, and looks at what is left each time.

python -m tests.fault.kill --kills 1000 --seed 1
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from time import sleep
from typing import NamedTuple

import numpy as np

from kvdb.types import DURABILITIES
from tests.fault.processes import Processes
from tests.fault.story import Step, after, is_whole, lives, open_store, possible
from tests.waiting import until


class Told:
    """What processes said of a store until they ended. states: what may be stored, each contexts by name: what was acknowledged,
    and that with the effects of calls that failed, which are in doubt. begun: the call that is under way, None for none. may_go:
    which contexts may be gone without a call, as a function of one. calls: how many were acknowledged, by action."""

    def __init__(self, may_go=lambda kept: False):
        self.states = [{}]
        self.begun = None
        self.may_go = may_go
        self.calls = Counter()

    def read(self, seed, lines):
        for line in lines:
            said, *words = line.split()
            if said == "there":
                self._forget(words)
                continue
            step = Step.from_words(*words)
            if said == "begins":
                self.begun = step
                continue
            if said == "did":
                self.calls[step.action] += 1
                self.states = self._after(seed, step)
            elif said == "failed":
                self.states += self._after(seed, step)
            self.begun = None
        if self.begun is not None:
            self.states += self._after(seed, self.begun)
            self.begun = None

    def _after(self, seed, step):
        return [after(state, seed, step) for state in self.states if possible(state, step)]

    def _forget(self, there):
        """What has to be there is one of these names, and they are no others."""
        (state,) = self.states
        gone = [name for name in state if name not in there]
        assert all(self.may_go(state[name]) for name in gone), f"{gone} went while the process lived"
        assert len(there) == len(state) - len(gone), f"{there} are there, and {sorted(state)} were told"
        self.states = [{name: kept for name, kept in state.items() if name in there}]

    def settle(self, found):
        """What is found says which calls had their effect. found: lives by name. Returns the number of contexts that are gone as
        they may. Raises AssertionError where what was told is not what is found."""
        for state in sorted(self.states, key=lambda one: len(one.keys() - found.keys())):
            gone = state.keys() - found.keys()
            left = {name: kept for name, kept in state.items() if name in found}
            if all(self.may_go(state[name]) for name in gone) and {name: kept.life for name, kept in left.items()} == found:
                self.states = [left]
                return len(gone)
        told = [{name: kept.life for name, kept in state.items()} for state in self.states]
        raise AssertionError(f"{found} are stored, and {told} told")

    def check(self, folder, where, *, files_may_stay=False):
        """Compare a store with what was told. files_may_stay: whether files may be left that its catalogue does not know. Returns
        the number of contexts that are gone as they may. Raises AssertionError or IntegrityError for anything that is lost,
        wrong, half there or left behind."""
        with open_store(folder) as db:
            try:
                gone = self.settle(lives(db))
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from None
            for name, kept in self.states[0].items():
                assert is_whole(db, name, kept), f"{where}: {name} is not what was stored"
            db._transport.check_integrity()
            assert not db.verify_store(), f"{where}: contexts are damaged"
            assert files_may_stay or not db.unknown_files(), f"{where}: {db.unknown_files()} are left behind"
        return gone


class Moment(NamedTuple):
    """When a process is killed: so many seconds after it has said so many lines."""

    lines: int
    seconds: float

    @classmethod
    def random(cls, rng):
        """The very point is up to chance, as the processor's other work decides how far the process comes."""
        return cls(int(rng.integers(1, 16)), float(rng.uniform(0, 0.03)))


def lines_until_killed(processes, folder, seed, moment, durability, *, limits="wide", before=None):
    """What a process says until it is killed. before: is called just before that, when the process can say nothing more."""
    child, said = processes.start(folder, seed, durability, limits)
    with said:
        lines = [said.readline() for _ in range(moment.lines)]
        sleep(moment.seconds)
        if before is not None:
            _stop(child)
            before()
        with suppress(ProcessLookupError):
            os.kill(child, SIGKILL)
        lines += said.read().splitlines(keepends=True)
    ended = processes.ended()
    assert ended == -SIGKILL or before is not None, "the process ended by itself"
    return [line for line in lines if line.endswith("\n")]


def _stop(process):
    """Stop a process, so that none of its threads comes back from a call of the system any more."""
    with suppress(ProcessLookupError, FileNotFoundError):  # it may have ended by itself
        os.kill(process, SIGSTOP)
        tasks = Path(f"/proc/{process}/task")
        until(lambda: not any(task.joinpath("stat").read_text().rpartition(") ")[2].startswith("R") for task in tasks.iterdir()))


def run(folder, kills, seed, durability="durable", limits="wide"):
    """Kill a process `kills` times. Returns how many calls were acknowledged, by action. Raises AssertionError for anything that
    is lost, wrong, half there or left behind, and for contexts of the durability "memory" that outlive their process."""
    told = Told((lambda kept: not kept.pinned) if limits == "narrow" else (lambda kept: False))
    rng = np.random.default_rng(seed)
    with Processes("tests.fault.killed") as processes:
        for number in range(kills):
            run_seed = seed * 100_000 + number
            lines = lines_until_killed(processes, folder, run_seed, Moment.random(rng), durability, limits=limits)
            told.read(run_seed, lines)
            if durability == "memory":
                told.states = [{}]
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
