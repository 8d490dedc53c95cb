"""Methods of the client that waits, as methods to be awaited."""

from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from inspect import isfunction, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from kvdb.client.remote.aio.carried import carried

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
Handle = TypeVar("Handle", bound=type)

Convert = Callable[[Any], Any]


@overload
def awaited(
    method: Callable[Concatenate[Any, P], T], *, given: Mapping[str, Convert] = ...
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]: ...


@overload
def awaited(
    method: Callable[Concatenate[Any, P], T], result: Callable[[T], R], *, given: Mapping[str, Convert] = ...
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]: ...


def awaited(
    method: Callable[Concatenate[Any, P], Any], result: Convert | None = None, *, given: Mapping[str, Convert] | None = None
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, Any]]:
    """A method of a handle for asyncio that carries out `method` of its `inner`, with the same arguments and errors.

    result: makes what it returns of what `method` returns. given: makes arguments of `method`, by their names, of the caller's.
    """
    convert = dict(given or {})
    places = {i - 1: name for i, name in enumerate(signature(method).parameters) if name in convert}

    @wraps(method)
    async def call(self: Any, /, *arguments: P.args, **keywords: P.kwargs) -> Any:
        if convert:
            plain: list[Any] = list(arguments)
            named: dict[str, Any] = dict(keywords)
            for i in places.keys() & range(len(plain)):
                plain[i] = convert[places[i]](plain[i])
            for name in convert.keys() & named.keys():
                named[name] = convert[name](named[name])
            out = await carried(method, self.inner, *plain, **named)
        else:
            out = await carried(method, self.inner, *arguments, **keywords)
        return out if result is None else result(out)

    return call


def awaits(plain: type) -> Callable[[Handle], Handle]:
    """For a handle for asyncio: every public method of `plain` that it does not have itself is there too, to be awaited, with
    the same arguments, results and errors. A line in the class is for what takes or returns handles, and for type checkers."""

    def complete(handle: Handle) -> Handle:
        for name, method in vars(plain).items():
            if isfunction(method) and not name.startswith("_") and not hasattr(handle, name):
                setattr(handle, name, awaited(method))
        return handle

    return complete
