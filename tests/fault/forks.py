"""Forks processes while their threads ask databases, and compares every answer, of parents and children, with the right one.

python -m tests.fault.forks --forks 100 --seed 1

Each child has to be refused by whatever its parent has open, gets right answers of what it opens itself, and ends in one way or
another, after which the parent has everything that it had.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread

import numpy as np

import kvdb
from kvdb.errors import ForkedProcess
from tests.fault.processes import say
from tests.forking import server, status_of
from tests.stores import SPEC, connect, holds, put
from tests.waiting import SECONDS_MAX

TOKENS = np.arange(40, dtype=np.int32)
KINDS = ("shared memory", "gRPC", "memory", "store")
CHILDREN = 25
"""How many are forked of one parent, at most."""


def opened(kind, target, folder):
    """A client of a database of this kind."""
    if kind in {"memory", "store"}:
        return connect(folder / "store" if kind == "store" else None)
    db = kvdb.connect(target)
    if kind == "gRPC":
        db._transport._connected().lanes.close()
    return db


class Asker(Thread):
    """Asks a session of its own again and again; each value in the session is the same number, so that is the answer."""

    def __init__(self, db, number):
        super().__init__(daemon=True)
        self.session = db.create_session(SPEC, [])
        self.right, self.wrong = 0, []
        self._number = np.float32(number)
        self._ended = Event()

    def ask(self):
        """Append a token and ask for it. Raises AssertionError for a wrong answer."""
        one = np.ones((SPEC.q_heads, 1, SPEC.head_dim), np.float32)
        out = self.session.attend(0, one, one[:1], one[:1] * self._number)
        assert np.abs(out - self._number).max() < 1e-3, f"{out.flat[0]}, and {self._number} is right"
        self.right += 1

    def run(self):
        try:
            while not self._ended.is_set():
                self.ask()
        except (AssertionError, kvdb.KvdbError) as error:
            self.wrong.append(repr(error))

    def end(self):
        self._ended.set()
        self.join(SECONDS_MAX)
        assert not self.wrong, f"an answer of the parent: {self.wrong}"


def refused(call):
    """Whether what the parent has open refuses a call."""
    try:
        call()
    except ForkedProcess as error:
        return str(os.getppid()) in str(error) and str(os.getpid()) in str(error)
    return False


def check_child(kind, db, askers, again):
    """What a child asks. again: opens a database as `db` is, or another where that is its parent's. Raises AssertionError."""
    remote = kind in {"shared memory", "gRPC"}
    for asker in askers:
        assert refused(asker.ask), "a session of the parent's answered"
        asker.session.close()
    if not remote:
        assert refused(db.contexts), "a database of the parent's answered"
        db.close()
    for own in (db, again()) if remote else (again(),):
        asker = Asker(own, 100 + os.getpid() % 1000)
        for _ in range(20):
            asker.ask()
        assert not remote or holds(own, TOKENS)
        own.close()


def end_child(how):
    """End this process."""
    if how == "_exit":
        os._exit(0)
    raise SystemExit(0)


def parent(kind, target, folder, children, seed):
    """Fork children, and say how many answers of the parent's were right. Raises AssertionError."""
    rng = random.Random(seed)
    with opened(kind, target, folder) as db:
        if not any(context.name == "doc" for context in db.contexts()):
            put(db, TOKENS, "doc")
        askers = [Asker(db, number) for number in range(1, 1 + rng.randint(1, 2))]
        for asker in askers:
            asker.start()
        for _ in range(children):
            time.sleep(rng.random() * 0.02)
            how = rng.choice(["_exit", "exit"])
            child = os.fork()
            if not child:
                check_child(kind, db, askers, lambda: opened("memory" if kind == "store" else kind, target, folder))
                end_child(how)
            status = status_of(child)
            assert status == 0, f"a child of {kind} that was to end by {how} ended with {status}"
        for asker in askers:
            asker.end()
            asker.ask()
            assert asker.session.stats().queries >= 2
        assert holds(db, TOKENS)
        assert db.verify_store() == [] if kind == "store" else True
    say(sum(asker.right for asker in askers))


def run(forks, seed):
    """Fork so many children, at least, as many of each kind of database. Returns how many answers of their parents were right.
    Raises AssertionError."""
    right, children = 0, -(-forks // len(KINDS))
    with server() as target, tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            for done in range(0, children, CHILDREN):
                here = min(CHILDREN, children - done)
                command = "-m", "tests.fault.forks", "--parent", kind, target, folder, here, seed + done
                ended = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)
                assert ended.returncode == 0, f"{kind}: {ended.stderr}"
                right += int(ended.stdout)
    return right


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parent", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.parent:
        kind, target, folder, *numbers = given.parent
        parent(kind, target, Path(folder), *map(int, numbers))
        return
    right = run(given.forks, given.seed)
    say(f"{given.forks} forks, of clients by {', '.join(KINDS)}; {right} answers of their parents meanwhile, none wrong")


if __name__ == "__main__":
    main()
