"""The flags that set what a file of settings and the environment can set, of all commands that take a configuration."""

import argparse
from collections.abc import Sequence
from typing import Any

import kvdb.config as configuration

SHORT = (
    ("--host", "server.host", "address to listen on, or unix:/path (default 127.0.0.1)", None),
    ("--port", "server.port", "port to listen on, 0 for a free one (default 7700)", None),
    ("--metrics-port", "metrics.port", "port for health and metrics over HTTP (default: none)", "PORT"),
    ("--store", "storage.path", "keep every context in this folder (default: nothing is kept)", "FOLDER"),
    (
        "--error-max",
        "optimizer.error_max",
        "relative error that answers may have where a query names none, 0 to 1 (default 0.02)",
        None,
    ),
    ("--threads", "cpu.threads", "how many threads a call may use (default KVDB_THREADS, or the usable CPUs)", None),
)
"""Flags with names of their own: flag, setting, help, and how its value is called."""


def add_short(parser: argparse.ArgumentParser) -> None:
    """Add the flags that have names of their own."""
    for name, setting, what, metavar in SHORT:
        add_setting(parser, name, setting, what, metavar or name[2:].replace("-", "_").upper())


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add --config, and a flag for each setting, such as --storage.path."""
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings (default KVDB_CONFIG)")
    group = parser.add_argument_group(
        "settings",
        "--TABLE.SETTING VALUE sets any setting, such as --storage.cpu-bytes-max 8GiB; so does a variable, such as "
        "KVDB_STORAGE__CPU_BYTES_MAX. Flags count before variables, and these before the file. kvdb config shows them all.",
    )
    for setting in configuration.settings():
        add_setting(group, flag(setting), setting, argparse.SUPPRESS)


def add_setting(parser: "argparse._ActionsContainer", name: str, setting: str, what: str, metavar: str | None = None) -> None:
    """Add a flag for one setting. what: its help text."""
    parser.add_argument(name, dest=setting, action=_Set, default=argparse.SUPPRESS, help=what, metavar=metavar)


def flag(setting: str) -> str:
    """The flag of a setting: --storage.cpu-bytes-max for storage.cpu_bytes_max."""
    return "--" + setting.replace("_", "-")


def loaded(given: argparse.Namespace) -> configuration.Loaded:
    """The configuration of what `add_settings` and `add_setting` took, with where each value comes from. Raises ConfigError."""
    return configuration.trace(given.config, {name: value for name, value in vars(given).items() if "." in name})


class _Set(argparse.Action):
    """An action that keeps the flag as it was written beside its value, so that messages can name it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002  # argparse's own signature, as below
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, (option_string or self.dest, values))
