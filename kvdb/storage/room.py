"""Room that is made in a full tier by what is least worth keeping."""

from collections.abc import Callable
from typing import TypeVar

from kvdb.errors import CapacityError

T = TypeVar("T")
Ask = Callable[[int], None]
"""Takes room for so many bytes of a file before any is written. Raises CapacityError."""
Evict = Callable[[int], str]
"""Has contexts go that take so many bytes, if there are any that may. Returns "" where one went, else what is in the way."""


def with_room(attempt: Callable[[], T], evict: Evict | None, nbytes: int) -> T:
    """What `attempt` returns, which needs about `nbytes`: where it raises CapacityError, contexts go until it does not, or none
    can go any more. The caller has locked no tier, no segment and no catalogue. evict: None where none may go."""
    while True:
        try:
            return attempt()
        except CapacityError as error:
            if evict is None:
                raise
            refusal = error
        if in_the_way := evict(nbytes):
            raise CapacityError(f"{refusal}; {in_the_way}")
