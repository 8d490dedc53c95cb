"""`kvdb config`: every setting, its value, and where that comes from."""

import argparse
import json
from typing import Any

import kvdb.config as configuration
from kvdb.commands.arguments import Subparsers, add_command, add_json
from kvdb.commands.settings import add_settings, add_short, loaded

HIDDEN = "hidden"


def add(commands: Subparsers) -> None:
    """Add `config` to the `kvdb` command."""
    what = "show every setting, its value, and where that comes from"
    more = ". The output is itself a file of settings, but for secrets, which it leaves out. Takes what kvdb serve takes."
    parser = add_command(commands, "config", what, _config, more=more)
    add_json(parser)
    add_short(parser)
    add_settings(parser)


def _config(given: argparse.Namespace) -> int:
    found = loaded(given)
    values = {name: _shown(found.config, name) for name in found.origins}
    if given.json:
        print(json.dumps({name: {"value": value, "from": found.origins[name]} for name, value in values.items()}, indent=2))
        return 0
    lines = {name: _line(name.partition(".")[2], value, name in configuration.secrets()) for name, value in values.items()}
    width = max(map(len, lines.values()))
    table = ""
    for name, line in lines.items():
        if not name.startswith(f"{table}."):
            print("\n" * bool(table), end="")
            table = name.partition(".")[0]
            print(f"[{table}]")
        print(f"{line:<{width}}  # {found.origins[name]}")
    return 0


def _shown(config: configuration.Config, setting: str) -> Any:
    """The value of a setting, as far as it may be seen."""
    table, _, name = setting.partition(".")
    value = getattr(getattr(config, table), name)
    return HIDDEN if value and setting in configuration.secrets() else value


def _line(name: str, value: Any, secret: bool) -> str:
    return f"# {name} is {HIDDEN}" if secret and value else f"{name} = {_toml(value)}"


def _toml(value: Any) -> str:
    """A value as TOML has it; a string of JSON is one of TOML. None, which TOML lacks, is the text that settings take for it."""
    if value is None:
        return '"none"'
    return json.dumps(list(value) if isinstance(value, tuple) else value)
