"""Room that is made in a full tier by what is least worth keeping."""

from collections.abc import Callable
from threading import RLock
from typing import TypeVar

from kvdb.errors import CapacityError

T = TypeVar("T")
Ask = Callable[[int], None]
"""Takes room for so many bytes of a file before any is written. Raises CapacityError."""
Evict = Callable[[int], str]
"""Has contexts go that take so many bytes, if there are any that may. Returns "" where one went, else what is in the way."""


class InTurn:
    """An `Evict` by which one caller at a time makes room. Who waited for another tries first whether that was enough: what it
    would have chosen has gone."""

    def __init__(self, evict: Evict) -> None:
        self._evict = evict
        self._lock = RLock()
        self._made = 0  # how often room was made

    def __call__(self, nbytes: int) -> str:
        made = self._made
        with self._lock:
            if self._made != made:
                return ""
            in_the_way = self._evict(nbytes)
            self._made += not in_the_way
            return in_the_way


def with_room(attempt: Callable[[], T], evict: Evict | None, nbytes: int) -> T:
    """What `attempt` returns, which needs about `nbytes`: where it raises CapacityError, contexts go until it does not, or none
    can go any more. The caller has locked no tier, no segment and no catalogue. evict: None where none may go."""
    in_the_way = ""
    while True:
        try:
            return attempt()
        except CapacityError as error:
            if evict is None:
                raise
            if in_the_way:
                raise CapacityError(f"{error}; {in_the_way}") from None
        in_the_way = evict(nbytes)  # after the last of them `attempt` is tried again: others may have made that room
