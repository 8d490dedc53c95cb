"""Checks that settings hold what they are annotated with, and no less than they may."""

import math
from collections.abc import Callable
from typing import Any, get_type_hints

from kvdb.errors import ConfigError


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, bool)),
    int: ("an integer", _is_integer),
    int | None: ("an integer, or None", lambda value: value is None or _is_integer(value)),
    float: ("a number", lambda value: _is_integer(value) or (isinstance(value, float) and not math.isnan(value))),
    str: ("text", lambda value: isinstance(value, str)),
    tuple[str, ...]: ("a tuple of text", lambda value: isinstance(value, tuple) and all(isinstance(one, str) for one in value)),
}
"""For each annotation below: its name in messages, and the check of a value."""


def check_types(settings: object, table: str) -> None:
    """Raises ConfigError where a field of `settings` does not hold what it is annotated with. table: its name in TOML."""
    for name, annotation in get_type_hints(type(settings)).items():
        expected, fits = _TYPES[annotation]
        value = getattr(settings, name)
        if not fits(value):
            raise ConfigError(f"{table}.{name} is {value!r}; expected {expected}")


def check_least(settings: object, table: str, **least: float) -> None:
    """Raises ConfigError where a field of `settings` is below the least that it may be. None, for no limit, is not."""
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= lowest:
            raise ConfigError(f"{table}.{name} is {value}; expected at least {lowest}")
