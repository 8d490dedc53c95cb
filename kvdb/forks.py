"""What becomes of what is open when the process forks.

The child has a copy of every handle, but none of the threads behind it, and what is outside of the process it shares: memory with
a server, connections, files, locks. So what is open stays the parent's. In the child, each such object becomes an `Inherited`,
whoever holds it, and lets go of its descriptors; nothing of this costs a call anything.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from kvdb.errors import ForkedProcess

T = TypeVar("T")

SESSION = "the session", "open one here, with create_session of a database that is connected here"
IMPORT = "the import", "import here, into a database that is connected here"
DATABASE = "the embedded database", "connect anew here, or to a server, which processes may share"
"""What is open, and what its user is to do instead, for the error."""

_in_child: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


class Inherited:
    """Stands in the child of a fork for what its parent has open. Closing it does nothing; all else raises ForkedProcess."""

    def __init__(self, what: str, instead: str, parent: int) -> None:
        self._told = what, parent, instead

    def close(self) -> None:
        """Nothing: it is the parent's to close."""

    def refuse(self) -> NoReturn:
        """Raises ForkedProcess."""
        what, parent, instead = self._told
        raise ForkedProcess(f"{what} is open in process {parent}, of which this one, {os.getpid()}, is a fork; {instead}")

    def __getattr__(self, _name: str) -> NoReturn:
        self.refuse()


def stays_behind(thing: object, what: str, instead: str) -> None:
    """From now on, children of this process have an `Inherited` in the place of this thing. what: its name in the error. instead:
    what its user is to do."""
    in_child(thing, partial(_leave, what=what, instead=instead, parent=os.getpid()))


def check(things: Sequence[object]) -> None:
    """Raises ForkedProcess if one of them is a parent's."""
    if Inherited in map(type, things):
        next(thing for thing in things if isinstance(thing, Inherited)).refuse()


def in_child(thing: T, action: Callable[[T], None]) -> None:
    """Call the action with this thing in every child, while the thing is there. It must take no lock that another thread may
    hold, and nothing is to be done twice where a child forks too."""
    _in_child[thing] = action


def keep(thing: object) -> None:
    """In a child: never let what is the parent's end, also not with the interpreter. It would tell the parent's server, or write
    to the parent's store."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _leave(thing: Any, what: str, instead: str, parent: int) -> None:
    if type(thing) is not Inherited:
        keep(thing.__dict__)
        thing.__class__ = Inherited
        thing.__dict__ = vars(Inherited(what, instead, parent))


def _after_fork() -> None:
    for thing, action in list(_in_child.items()):
        action(thing)


os.register_at_fork(after_in_child=_after_fork)
