"""`kvdb serve`: offer a database over gRPC."""

import argparse
from typing import TYPE_CHECKING

from kvdb.commands.arguments import sentence
from kvdb.commands.settings import add_settings, add_short, loaded
from kvdb.errors import Unsupported

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add(commands: "Subparsers") -> None:
    """Add `serve` to the `kvdb` command."""
    what = "offer a database over gRPC"
    parser = commands.add_parser("serve", help=what, description=sentence(f"{what}, until SIGTERM"))
    add_short(parser)
    add_settings(parser)
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    try:
        from kvdb.server.serve import run  # so that other commands need no gRPC
    except ModuleNotFoundError as error:
        raise Unsupported(f"kvdb serve needs {error.name}, which is not installed; pip install 'kvdb[server]'") from None

    return run(loaded(given).config)
