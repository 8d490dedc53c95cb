"""Functions that wait as if they had a thread of their own, carried out in the event loop's.

Such a function runs in a greenlet: where it waits, it hands an awaitable to its task, which awaits it and comes back with the
outcome. So the client for asyncio is the other client, all of it, over a connection that waits like this.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

import kvdb.deadlines as deadlines

try:
    from greenlet import getcurrent, greenlet
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("kvdb.aio needs greenlet: pip install 'kvdb[aio]'", name="greenlet") from missing

P = ParamSpec("P")
T = TypeVar("T")


class _Carried(greenlet):
    """The greenlet of one call."""


async def carried(function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """What the function returns. Whatever it waits for with `wait`, this task awaits; where the task is cancelled, that is raised
    in the function. Raises what the function raises."""
    call = _Carried(function)
    call.gr_context = copy_context()  # the time of the caller, see kvdb.deadlines, and nobody else's
    outcome: Any = call.switch(*arguments, **keywords)
    while not call.dead:
        try:
            value = await outcome
        except BaseException as error:  # noqa: BLE001  # a cancellation too is the function's to hear of
            outcome = call.throw(error)
        else:
            outcome = call.switch(value)
    result: T = outcome
    return result


def wait(step: Awaitable[T]) -> T:
    """The outcome of an awaitable, for a function that `carried` runs. Raises what it raises."""
    call = getcurrent()
    assert isinstance(call, _Carried) and call.parent is not None
    outcome: T = call.parent.switch(step)
    return outcome


def is_carried() -> bool:
    """Whether this code may `wait`."""
    return isinstance(getcurrent(), _Carried)


class Turns:
    """A lock for `with` in functions that are carried out: one call has it at a time, as often as it likes, in the order in which
    they came."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._owner: object = None
        self._depth = 0

    def __enter__(self) -> None:
        """Raises DeadlineExceeded where the caller's time is over first."""
        if self._owner is not getcurrent():
            wait(self._taken(deadlines.remaining()))
            self._owner = getcurrent()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def _taken(self, seconds: float | None) -> Coroutine[Any, Any, None]:
        async def taken() -> None:
            try:
                async with asyncio.timeout(seconds):
                    await self._lock.acquire()
            except TimeoutError:
                raise deadlines.exceeded() from None

        return taken()
