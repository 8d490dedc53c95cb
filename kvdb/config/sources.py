"""Where settings come from: the defaults, a file, the environment, flags; what comes later counts."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from kvdb.config.texts import parsed
from kvdb.config.tree import Config
from kvdb.errors import ConfigError

if TYPE_CHECKING:
    from typed_settings.types import LoadedSettings, OptionInfo

PREFIX = "KVDB_"
DELIMITER = "__"
FILE_VARIABLE = "KVDB_CONFIG"
"""The variable that names the file of settings where nobody names one."""
TOKEN_VARIABLE = "KVDB_TOKEN"  # noqa: S105 (a name)
"""A short name of KVDB_SERVER__TOKEN, which counts where both are set."""
DEFAULT = "default"
Flags = Mapping[str, tuple[str, str]]
"""The flag as it was given, and its text, by setting, such as storage.path."""


@dataclass(frozen=True)
class Loaded:
    """A configuration, and for each setting (`storage.path`) where it comes from: `default`, `FILE:LINE`, a variable, a flag."""

    config: Config
    origins: Mapping[str, str]


def load(path: str | Path | None = None, flags: Flags | None = None) -> Config:
    """The defaults, then the TOML file at `path`, or at KVDB_CONFIG, then the environment (`KVDB_STORAGE__PATH` is storage.path,
    KVDB_TOKEN server.token), then flags.

    Raises ConfigError for a file that cannot be read, an unknown name or a wrong value.
    """
    return trace(path, flags).config


def trace(path: str | Path | None = None, flags: Flags | None = None) -> Loaded:
    """What `load` returns, with where each setting comes from. Raises ConfigError."""
    from typed_settings.dict_utils import merge_settings  # so that who makes a Config in Python need not wait for it
    from typed_settings.types import LoadedSettings, LoaderMeta

    path = path if path is not None else os.environ.get(FILE_VARIABLE) or None
    text = None if path is None else _text(path)
    file = {} if text is None else _tables(text, path)
    given = flags or {}
    layers = [
        LoadedSettings(file, LoaderMeta("file")),
        LoadedSettings({"server": {"token": token}} if (token := os.environ.get(TOKEN_VARIABLE)) else {}, LoaderMeta("token")),
        _environment(),
        LoadedSettings(_nested({name: value for name, (_, value) in given.items()}), LoaderMeta("flags")),
    ]
    annotations, values, origins = settings(), {}, {}
    for name, found in merge_settings(_options(), layers).items():
        match found.loader_meta.name:
            case "file":
                origins[name] = f"{path}:{_line(text or '', name)}"
            case "token":
                origins[name] = TOKEN_VARIABLE
            case "flags":
                origins[name] = given[name][0]
            case _:
                origins[name] = variable(name)
        try:
            values[name] = parsed(name, annotations[name], found.value, typed=found.loader_meta.name == "file")
        except ConfigError as error:
            raise _blamed(error, origins) from None
    return Loaded(_made(values, origins), {name: origins.get(name, DEFAULT) for name in annotations})


def settings() -> dict[str, Any]:
    """The annotation of each setting, by its name, such as storage.path."""
    return {
        f"{table}.{name}": annotation
        for table, kind in get_type_hints(Config).items()
        for name, annotation in get_type_hints(kind).items()
    }


def secrets() -> frozenset[str]:
    """The settings that are not printed."""
    tables = get_type_hints(Config).items()
    return frozenset(f"{table}.{field.name}" for table, kind in tables for field in fields(kind) if not field.repr)


def variable(setting: str) -> str:
    """The environment variable of a setting: KVDB_STORAGE__PATH for storage.path."""
    return PREFIX + setting.replace(".", DELIMITER).upper()


def _options() -> "tuple[OptionInfo, ...]":
    from typed_settings.types import OptionInfo

    return tuple(
        OptionInfo(Config, name, annotation, None, has_no_default=True, default_is_factory=False)
        for name, annotation in settings().items()
    )


def _environment() -> "LoadedSettings":
    """What the environment sets. Raises ConfigError for a variable that looks like a setting and is none."""
    from typed_settings.loaders import EnvLoader

    for name in os.environ:
        setting = name.removeprefix(PREFIX).replace(DELIMITER, ".").lower()
        if name.startswith(PREFIX) and DELIMITER in name and variable(setting) == name and setting not in settings():
            raise ConfigError(_unknown(setting, setting.rpartition(".")[0]) + f" ({name})")
    return EnvLoader(PREFIX, nested_delimiter=DELIMITER)(Config, _options())


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        wrong = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise ConfigError(f"configuration file {path} is not UTF-8: {wrong}; TOML is always UTF-8") from None


def _tables(text: str, path: str | Path | None) -> dict[str, Any]:
    """The tables of a file, of which every name is known."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from None
    known = settings()
    tables = {name.partition(".")[0] for name in known}
    for table, values in found.items():
        if table not in tables:
            raise ConfigError(f"{_unknown(table, '')} ({path}:{_line(text, table)})")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{table} is {values!r}; expected a table [{table}] ({path}:{_line(text, table)})")
        for name in values:
            if (setting := f"{table}.{name}") not in known:
                raise ConfigError(f"{_unknown(setting, table)} ({path}:{_line(text, setting)})")
    return found


def _unknown(setting: str, table: str) -> str:
    """What is wrong with a name, what is known beside it, and what was probably meant."""
    known = settings()
    beside = [name.partition(".")[2] for name in known if name.startswith(f"{table}.")]
    if not beside:
        beside = list(dict.fromkeys(name.partition(".")[0] for name in known))
    near = difflib.get_close_matches(setting, known if "." in setting else beside, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{setting} is no setting; expected one of {', '.join(sorted(beside))}{meant}"


def _line(text: str, setting: str) -> int:
    """The line, from 1, on which a file says what a setting or a table is: the first of the statement with which it appears."""
    lines, first = text.splitlines(keepends=True), 1
    for number in range(1, len(lines) + 1):
        try:
            found: Any = tomllib.loads("".join(lines[:number]))
        except tomllib.TOMLDecodeError:  # in the middle of a statement of several lines
            continue
        for name in setting.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None:
            return first
        first = number + 1
    return first


def _nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for setting, value in flat.items():
        table, _, name = setting.partition(".")
        found.setdefault(table, {})[name] = value
    return found


def _made(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    kinds = get_type_hints(Config)
    try:
        return Config(**{table: kinds[table](**inside) for table, inside in _nested(values).items()})
    except ConfigError as error:
        raise _blamed(error, origins) from None


def _blamed(error: ConfigError, origins: Mapping[str, str]) -> ConfigError:
    """The error, with where the settings that it names come from."""
    named = [f"{name} by {origins[name]}" for name in sorted(origins) if name in str(error)]
    return ConfigError(f"{error} ({', '.join(named)})" if named else str(error))
