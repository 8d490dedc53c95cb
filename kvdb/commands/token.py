"""`kvdb token`: the tokens of the tenants of a server."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvdb.commands.arguments import sentence, text
from kvdb.server.tenancy.tokens_file import new_token

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add(commands: "Subparsers") -> None:
    """Add `token` to the `kvdb` command."""
    what = "make tokens for the tenants of a server"
    inner = commands.add_parser("token", help=what, description=sentence(what)).add_subparsers(metavar="COMMAND", required=True)
    what = "print a new token, once, and add its hash to a file that server.tokens_file names"
    parser = inner.add_parser("new", help=what, description=sentence(what))
    parser.add_argument("--tenant", type=text, required=True, help="whose token it is")
    parser.add_argument("--file", type=Path, required=True, help="the file, which is made if it is not there")
    parser.add_argument("--admin", action="store_true", help="let it see what all tenants have")
    parser.set_defaults(run=_new)


def _new(given: argparse.Namespace) -> int:
    print(new_token(given.file, given.tenant, admin=given.admin))
    return 0
