"""The `kvdb` command, also as `python -m kvdb`.

Its own commands are the modules of `kvdb.commands`. Other packages add theirs through the entry point group `kvdb.commands`: each
entry names a function like `add` there, which is how `kvdb demo` comes from the engine adapter without kvdb knowing of it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

import kvdb.commands.output as output
from kvdb.commands import COMMANDS
from kvdb.commands.arguments import Subparsers
from kvdb.commands.exit_status import FAILED, INTERRUPTED, status_of, table
from kvdb.config import quiet_grpc
from kvdb.errors import KvdbError
from kvdb.version import __version__

ENTRY_POINTS = "kvdb.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status, as `kvdb.commands.exit_status` lists them. An error that kvdb raises on purpose, and
    output that cannot be written, give one line on stderr."""
    output.escape_characters()
    quiet_grpc()
    try:
        try:
            parser = _parser()
            given = parser.parse_args(arguments, argparse.Namespace(parser=parser))
            return int(given.run(given))
        finally:
            output.flush()
    except KvdbError as error:
        problem, status = str(error), status_of(error)
    except OSError as error:
        problem = "the reader of the output went away before its end" if isinstance(error, BrokenPipeError) else str(error)
        status = FAILED
        output.drop_unwritable()
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"kvdb: {problem}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvdb",
        description="The database for the KV cache of long-context language models.",
        epilog=table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvdb {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        add: Callable[[Subparsers], None] = entry.load()
        add(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
