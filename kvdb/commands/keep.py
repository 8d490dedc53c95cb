"""`kvdb pin`, `kvdb unpin`, `kvdb rename` and `kvdb update`: how long contexts are kept, what is noted, who reads them."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from kvdb.commands.arguments import Subparsers, add_command, add_context, add_contexts, open_server, seconds


def add(commands: Subparsers) -> None:
    """Add the four to the `kvdb` command."""
    parser = add_command(commands, "pin", "keep contexts whatever room is needed", _set_pinned, pinned=True)
    add_contexts(parser)
    parser = add_command(commands, "unpin", "let contexts go again where room is needed", _set_pinned, pinned=False)
    add_contexts(parser)
    parser = add_command(commands, "rename", "give a context another name", _rename)
    add_context(parser)
    parser.add_argument("new", metavar="NEW", help="its new name")
    what = "change how long a context is kept, what is noted of it, and who may read it"
    parser = add_command(commands, "update", what, _update)
    add_context(parser)
    parser.add_argument("--ttl", type=seconds, metavar="SECONDS", help="in how many seconds it is dropped; inf for never")
    add_metadata(parser, "a JSON object that is noted of it, instead of what was noted before")
    parser.add_argument(
        "--shared-with",
        metavar="TENANTS",
        help="the server's tenants that may read it, with commas between; '' for none any more",
    )


def add_metadata(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the flag that takes what is noted of contexts."""
    parser.add_argument("--metadata", type=json_object, metavar="JSON", help=what)


def json_object(text: str) -> Mapping[str, Any]:
    """The argument of a flag, parsed. Raises ArgumentTypeError for what is no JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object, such as \'{{"source": "wiki"}}\'')
    return found


def _set_pinned(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        for name in given.names:
            (db.pin if given.pinned else db.unpin)(name)
            print(f"{name!r} is pinned" + ("" if given.pinned else " no more"), flush=True)
    return 0


def _rename(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        print(f"{given.name!r} is {db.rename(given.name, given.new).name!r} from now on")
    return 0


def _update(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        shared = None if given.shared_with is None else [name.strip() for name in given.shared_with.split(",") if name.strip()]
        info = db.update(given.name, ttl=given.ttl, metadata=given.metadata, shared_with=shared).info
    until = "for ever" if info.expires is None else "for a time"
    print(f"{info.name!r} is kept {until}, with {json.dumps(dict(info.metadata), ensure_ascii=False)}")
    if info.shared_with:
        print(f"{', '.join(info.shared_with)} may read it")
    return 0
