"""How long a call may take, and whether anybody still waits for it: said where it begins, and looked at between two steps."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from math import inf, isfinite
from time import monotonic
from typing import NamedTuple, TypeVar

from kvdb.errors import Cancelled, DeadlineExceeded, InvalidArgument

T = TypeVar("T")

FOREVER_SECONDS = 1e8
"""Three years."""


class TimeBounds(NamedTuple):
    """When a call ends at the latest, in seconds of the monotonic clock, and what says whether it is still waited for."""

    ends: float = inf
    waited_for: Callable[[], bool] | None = None


_NONE = TimeBounds()
_bounds: ContextVar[TimeBounds] = ContextVar("kvdb_deadline", default=_NONE)  # a tuple never changes
_UNBOUNDED = nullcontext()


class Bounded:
    """For `with`: the body has these bounds. A context manager by hand, because each step of decoding needs one."""

    __slots__ = ("_before", "_bounds")

    def __init__(self, bounds: TimeBounds) -> None:
        self._bounds = bounds
        self._before = _NONE

    def __enter__(self) -> None:
        self._before = _bounds.get()
        _bounds.set(self._bounds)

    def __exit__(self, *_: object) -> None:
        _bounds.set(self._before)  # a stream may end in another thread than it began in, where a token could not be given back


def within(seconds: float | None) -> AbstractContextManager[None]:
    """For `with`: the body takes at most so many seconds, and no longer than what is around it; None for what is around it.

    Raises InvalidArgument for anything but a number above 0.
    """
    if seconds is None:
        return _UNBOUNDED
    around = _bounds.get()
    return Bounded(TimeBounds(min(_end(checked_timeout(seconds)), around.ends), around.waited_for))


def unbounded() -> Bounded:
    """For `with`: the body has no bounds, such as when it tidies up after a call whose time is over."""
    return Bounded(_NONE)


def answering(waited_for: Callable[[], bool], seconds: float | None = None) -> Bounded:
    """For `with`: the body answers a call of somebody who may go away. seconds: how long the caller waits, None for ever."""
    return Bounded(TimeBounds(inf if seconds is None else _end(seconds), waited_for))


def remaining() -> float | None:
    """How many seconds are left, None where there is no limit. Raises DeadlineExceeded where none are."""
    ends = _bounds.get().ends
    if ends == inf:
        return None
    left = ends - monotonic()
    if left <= 0:
        raise exceeded()
    return left


def check() -> None:
    """Go on only if there is time left and somebody waits. Raises DeadlineExceeded or Cancelled."""
    ends, waited_for = _bounds.get()
    if ends != inf and monotonic() >= ends:
        raise exceeded()
    if waited_for is not None and not waited_for():
        raise Cancelled("the call was broken off: its client cancelled it, waited no longer, or is gone")


def each(steps: Iterable[T]) -> Iterator[T]:
    """The steps of a call, with a `check` before each."""
    for step in steps:
        check()
        yield step


def checked_timeout(given: object) -> float:
    """A timeout in seconds. Raises InvalidArgument."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not (isfinite(given) and given > 0):
        raise InvalidArgument(f"timeout is {given!r}; expected a number of seconds above 0, or None for the default")
    return float(given)


def _end(seconds: float) -> float:
    """When a time that begins now ends; what is longer than clocks count, as where gRPC has no deadline, never does."""
    return monotonic() + seconds if seconds < FOREVER_SECONDS else inf


def exceeded() -> DeadlineExceeded:
    """The error for a call that took too long."""
    return DeadlineExceeded("the time of this call is over before it was done; pass a longer timeout= to it, or to its session")
