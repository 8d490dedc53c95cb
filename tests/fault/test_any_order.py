"""Any order of calls, ends and kills leaves what a dictionary of what was acknowledged says."""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvdb.errors import AlreadyExists
from kvdb.types import DURABILITIES
from tests.fault.story import NARROW, READ, REFUSED, Step, after, carry_out, is_whole, lives, open_store, tokens_of
from tests.stores import put

MEMORY = Path("/dev/shm")
"""A file system without a disk, where there is one, as contexts are synced often."""
SEED = 3
PICK = {"pick": st.integers(0, 5)}
NEW = {"name": st.sampled_from("abcdef"), "durability": st.sampled_from(DURABILITIES)}


class StoreMachine(RuleBasedStateMachine):
    """A store beside a dictionary. Tokens follow from the number of the step.

    A kill is played by going on with a copy of the folder as it is: all that a process that was killed leaves are its files. In a
    store with little room, contexts that are not pinned go; where nothing can, a call is refused and has done nothing.
    """

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.folders = self.steps = 0
        self.state = {}
        self.in_memory = set()  # names that need not outlive the process
        self.limits = {}

    @initialize(narrow=st.booleans())
    def begin(self, narrow):
        self.limits = NARROW if narrow else {}
        self.open()

    @property
    def folder(self):
        return self.root / str(self.folders)

    def open(self):
        self.db = open_store(self.folder, **self.limits)

    def take(self, action, name="-", other="", durability=None):
        """Make a call, and note what is there then. Returns whether it was carried out."""
        self.steps += 1
        step = Step(action, name, other, self.steps)
        try:
            carry_out(self.db, SEED, step, durability)
        except REFUSED:
            assert self.limits
            done = False
        else:
            self.state = after(self.state, SEED, step)
            if durability == "memory":
                self.in_memory.add(name)
            elif action == "rename" and name in self.in_memory:
                self.in_memory ^= {name, other}
            done = True
        self.forget()
        return done

    def forget(self):
        """Contexts that are not pinned may have gone to make room."""
        there = lives(self.db)
        gone = self.state.keys() - there.keys()
        assert not gone or (self.limits and not any(self.state[name].pinned for name in gone))
        self.state = {name: kept for name, kept in self.state.items() if name in there}
        self.in_memory &= self.state.keys()

    def picked(self, pick, *, exact=False):
        """A name that is stored, None for none. exact: of no blend."""
        names = sorted(name for name, kept in self.state.items() if not (exact and kept.recomputed))
        return names[pick % len(names)] if names else None

    @rule(**NEW)
    def put(self, name, durability):
        if name in self.state:
            with pytest.raises(AlreadyExists):
                put(self.db, tokens_of(SEED, self.steps), name, durability)
        else:
            self.take("put", name, durability=durability)

    @rule(**NEW, **PICK, action=st.sampled_from(("fork", "blend")))
    def go_on_from_another(self, name, durability, pick, action):
        other = self.picked(pick, exact=True)
        if other is not None and name not in self.state:
            self.take(action, name, other, durability)

    # Without preconditions: what has gone to make room is another context the next time, and rules that may be drawn should not
    # depend on that.
    @rule(**PICK, action=st.sampled_from(("drop", "pin", "unpin", "note", *READ)))
    def change(self, pick, action):
        name = self.picked(pick)
        if name is not None and self.take(action, name) and action == "drop":
            self.in_memory.discard(name)

    @rule(**PICK, name=st.sampled_from("abcdef"))
    def rename(self, pick, name):
        other = self.picked(pick)
        if other is not None and name not in self.state:
            self.take("rename", other, name)

    @rule()
    def reopen(self):
        self.db.close()
        self.open()
        if self.limits:  # what was in memory only may have found no room as the store was closed
            kept = lives(self.db).keys() | (self.state.keys() - self.in_memory)
            self.state = {name: context for name, context in self.state.items() if name in kept}
        self.in_memory.clear()
        self.check_contents()

    @rule()
    def kill(self):
        self.db.compact()  # files are copied one after the other, and a process is killed at one moment
        self.forget()
        shutil.copytree(self.folder, self.root / str(self.folders + 1))
        self.db.close()
        shutil.rmtree(self.folder)
        self.folders += 1
        self.state = {name: kept for name, kept in self.state.items() if name not in self.in_memory}
        self.in_memory.clear()
        self.open()
        self.check_contents()

    @invariant()
    def every_life_is_there(self):
        if self.state:
            self.forget()
            assert lives(self.db) == {name: kept.life for name, kept in self.state.items()}

    def check_contents(self):
        for name, kept in list(self.state.items()):
            assert is_whole(self.db, name, kept)
        self.db._transport.check_integrity()

    def teardown(self):
        if self.folder.exists():
            self.check_contents()
            self.db.close()
        shutil.rmtree(self.root)


TestStore = StoreMachine.TestCase
