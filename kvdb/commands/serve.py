"""`kvdb serve`: offer a database over gRPC."""

import argparse
from typing import TYPE_CHECKING

from kvdb.commands.arguments import sentence
from kvdb.commands.settings import add_setting, add_settings, loaded
from kvdb.errors import Unsupported

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

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


def add(commands: "Subparsers") -> None:
    """Add `serve` to the `kvdb` command."""
    what = "offer a database over gRPC"
    parser = commands.add_parser("serve", help=what, description=sentence(f"{what}, until SIGTERM"))
    for flag, setting, help_text, metavar in SHORT:
        add_setting(parser, flag, setting, help_text, metavar or flag[2:].replace("-", "_").upper())
    add_settings(parser)
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    try:
        from kvdb.server.serve import run  # so that other commands need no gRPC
    except ModuleNotFoundError as error:
        raise Unsupported(f"kvdb serve needs {error.name}, which is not installed; pip install 'kvdb[server]'") from None

    return run(loaded(given).config)
