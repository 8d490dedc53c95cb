"""`kvdb export` and `kvdb import`: a context to a file that other programs read, and back."""

import argparse
import json
from pathlib import Path

import kvdb.client.context_file as context_file
from kvdb.commands.arguments import Subparsers, add_command, add_json, add_server, open_server, text


def add(commands: Subparsers) -> None:
    """Add the two to the `kvdb` command."""
    parser = add_command(commands, "export", "write a context to a safetensors file, and a manifest in JSON beside it", _export)
    parser.add_argument("name", metavar="NAME", type=text, help="the context's name")
    parser.add_argument("file", metavar="FILE", type=Path, help="a file that is not there, named *.safetensors")
    add_json(parser)
    add_server(parser)
    parser = add_command(commands, "import", "store a context from a file that kvdb export wrote", _import)
    parser.add_argument("file", metavar="FILE", type=Path, help="a file that kvdb export wrote")
    parser.add_argument("--name", type=text, help="the context's name (default: the one that it had)")
    add_json(parser)
    add_server(parser)


def _export(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        context = db.get(given.name)
        nbytes = context_file.write(context, given.file)
    if given.json:
        print(json.dumps({"name": context.name, "file": str(given.file), "tokens": context.tokens, "nbytes": nbytes}))
    else:
        print(f"{context.name!r}: {context.tokens:,} tokens in {given.file}, {nbytes:,} bytes with the manifest")
    return 0


def _import(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        context = context_file.store(db, given.file, given.name)
    if given.json:
        print(json.dumps({"name": context.name, "file": str(given.file), "tokens": context.tokens}))
    else:
        print(f"{context.name!r}: {context.tokens:,} tokens are stored")
    return 0
