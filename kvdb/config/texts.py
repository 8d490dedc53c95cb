"""Settings that are written as text, in a file, the environment or a flag: sizes as `8GiB`, times as `30s`."""

import re
from typing import Any

from kvdb.errors import ConfigError

NONE = "none"
"""The text that means None, where a setting may be None."""
_SIZES = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)")
_TRUTHS = {"true": True, "false": False}


def parsed(path: str, annotation: Any, value: Any, *, typed: bool) -> Any:
    """The value that a text stands for; what is no text, or cannot be read as `annotation`, is returned as it is, for the checks
    to refuse.

    path: the setting, such as storage.cpu_bytes_max. typed: whether the text comes from where numbers can be written as numbers,
    which is a file of TOML: then only sizes, times and `none` are read. Raises ConfigError for a size or a time that is none.
    """
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str) or annotation is str:
        return value
    if annotation == int | None and value.strip().lower() == NONE:
        return None
    if is_size(path) and annotation in (int, int | None):
        return _quantity(path, value, _SIZES, "bytes, such as 1073741824, 512MiB or 8GiB", whole=True)
    if is_time(path):
        return _quantity(path, value, _TIMES, "seconds, such as 30, 500ms, 30s, 10m, 1h or 7d", whole=False)
    return value if typed else _plain(annotation, value)


def is_size(path: str) -> bool:
    """Whether a setting holds bytes."""
    return "bytes" in path.rpartition(".")[2].split("_")


def is_time(path: str) -> bool:
    """Whether a setting holds seconds."""
    return path.endswith("_seconds")


def _quantity(path: str, text: str, units: dict[str, Any], expected: str, *, whole: bool) -> int | float:
    match = _QUANTITY.fullmatch(text.strip())
    unit = units.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{path} is {text!r}; expected {expected}")
    number = match.group(1).replace("_", "")
    if not whole:
        return float(number) * float(unit)
    found = int(number) * unit if number.isdigit() else float(number) * unit
    if found != int(found):
        raise ConfigError(f"{path} is {text!r}, which is no whole number of bytes; expected {expected}")
    return int(found)


def _plain(annotation: Any, text: str) -> Any:
    """A text as another type, or the text itself."""
    if annotation is bool:
        return _TRUTHS.get(text.strip().lower(), text)
    if annotation == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return float(text) if annotation is float else int(text)
    except ValueError:
        return text
