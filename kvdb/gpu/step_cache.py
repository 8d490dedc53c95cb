"""Steps of several sessions, kept for use again."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from weakref import ref

M = TypeVar("M")
S = TypeVar("S")


class StepCache(Generic[M, S]):
    """Steps by their members, which are the layers of sessions; the least recently used make room. A step goes with the first of
    its members, so that a card's memory does not wait for others. Not for several threads at once.

    steps_max: how many are kept.
    """

    def __init__(self, steps_max: int) -> None:
        self._steps_max = steps_max
        self._steps: OrderedDict[tuple[int, ...], tuple[list[ref[M]], S]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, members: Sequence[M], make: Callable[[], S]) -> S:
        """The step of these members, in this order, made where there is none. Raises what `make` raises."""
        key = tuple(map(id, members))  # no two that live have the same
        found = self._steps.pop(key, None)
        if found is None:
            found = [ref(member, lambda _: self._steps.pop(key, None)) for member in members], make()
        self._steps[key] = found
        if len(self._steps) > self._steps_max:
            self._steps.popitem(last=False)
        return found[1]

    def drop(self, members: Sequence[M]) -> None:
        """Forget their step."""
        self._steps.pop(tuple(map(id, members)), None)

    def clear(self) -> None:
        self._steps.clear()
