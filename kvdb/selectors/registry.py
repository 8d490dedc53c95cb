"""The selectors by name."""

from kvdb.selectors.base import Selector
from kvdb.selectors.norm import Norm

SELECTORS: dict[str, Selector] = {"norm": Norm()}


def register(selector: Selector) -> None:
    """Add a selector from outside, for the whole process. Raises ValueError where another has its name."""
    if SELECTORS.setdefault(selector.name, selector) is not selector:
        raise ValueError(f"a selector is named {selector.name!r} already; expected a name that is none of {names()}")


def names() -> str:
    """All names, as a message tells them."""
    return ", ".join(map(repr, tuple(SELECTORS)))
