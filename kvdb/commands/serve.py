"""`kvdb serve`: offer a database over gRPC."""

import argparse

from kvdb.commands.arguments import Subparsers, add_command
from kvdb.commands.settings import add_settings, add_short, loaded
from kvdb.errors import Unsupported


def add(commands: Subparsers) -> None:
    """Add `serve` to the `kvdb` command."""
    parser = add_command(commands, "serve", "offer a database over gRPC", _run, more=", until SIGTERM.")
    add_short(parser)
    add_settings(parser)


def _run(given: argparse.Namespace) -> int:
    try:
        from kvdb.server.serve import run  # so that other commands need no gRPC
    except ModuleNotFoundError as error:
        raise Unsupported(f"kvdb serve needs {error.name}, which is not installed; pip install 'kvdb[server]'") from None

    return run(loaded(given).config)
