"""`kvdb token`: the tokens of the tenants of a server."""

import argparse
from pathlib import Path

from kvdb.commands.arguments import Subparsers, add_command, text
from kvdb.server.tenancy.tokens_file import new_token


def add(commands: Subparsers) -> None:
    """Add `token` to the `kvdb` command."""
    outer = add_command(commands, "token", "make tokens for the tenants of a server")
    what = "print a new token, once, and add its hash to a file that server.tokens_file names"
    parser = add_command(outer.add_subparsers(metavar="COMMAND", required=True), "new", what, _new)
    parser.add_argument("--tenant", type=text, required=True, help="whose token it is")
    parser.add_argument("--file", type=Path, required=True, help="the file, which is made if it is not there")
    parser.add_argument("--admin", action="store_true", help="let it see what all tenants have")


def _new(given: argparse.Namespace) -> int:
    print(new_token(given.file, given.tenant, admin=given.admin))
    return 0
