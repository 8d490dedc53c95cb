"""The `kvdb` command.

`kvdb serve` is here, what talks to a server in `kvdb.commands`. Other packages add commands of their own through the entry point
group `kvdb.commands`: each names a function that takes the subparsers and adds itself, which is how `kvdb demo` comes from the
engine adapter without kvdb knowing of it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import kvdb.commands.calibrate as calibrate
import kvdb.commands.doctor as doctor
import kvdb.commands.explain as explain
import kvdb.commands.indexes as indexes
import kvdb.commands.stats as stats
import kvdb.config as configuration
from kvdb.errors import KvdbError, Unsupported
from kvdb.version import __version__

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

COMMANDS = "kvdb.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Errors that kvdb raises on purpose are one line on stderr and status 1."""
    parser = argparse.ArgumentParser(prog="kvdb", description="The database for the KV cache of long-context language models.")
    parser.add_argument("--version", action="version", version=f"kvdb {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    indexes.add(commands)
    calibrate.add(commands)
    doctor.add(commands)
    stats.add(commands)
    explain.add(commands)
    for entry in sorted(entry_points(group=COMMANDS), key=lambda e: e.name):
        add: Callable[[Subparsers], None] = entry.load()
        add(commands)
    given = parser.parse_args(arguments)
    try:
        return int(given.run(given))
    except KvdbError as error:
        print(f"kvdb: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _add_serve(commands: "Subparsers") -> None:
    parser = commands.add_parser(
        "serve", help="offer a database over gRPC", description="Offer a database over gRPC until SIGTERM."
    )
    parser.add_argument("--host", help="address to listen on, or unix:/path (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (default 7700)")
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    parser.set_defaults(run=_serve)


def _serve(given: argparse.Namespace) -> int:
    try:
        from kvdb.server.serve import run  # so that other commands need no gRPC
    except ModuleNotFoundError as error:
        raise Unsupported(f"kvdb serve needs {error.name}, which is not installed; pip install 'kvdb[server]'") from None

    config = configuration.load(given.config)
    flags = {name: value for name in ("host", "port") if (value := getattr(given, name)) is not None}
    return run(replace(config, server=replace(config.server, **flags)))


if __name__ == "__main__":
    sys.exit(main())
