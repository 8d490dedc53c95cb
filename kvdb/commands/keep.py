"""`kvdb pin`, `kvdb unpin`, `kvdb rename` and `kvdb update`: how long contexts are kept, what is noted, who reads them."""

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvdb.commands.arguments import add_context, add_contexts, open_server, seconds, sentence

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add(commands: "Subparsers") -> None:
    """Add the four to the `kvdb` command."""
    what = "keep contexts whatever room is needed"
    parser = commands.add_parser("pin", help=what, description=sentence(what))
    add_contexts(parser)
    parser.set_defaults(run=_set_pinned, pinned=True)
    what = "let contexts go again where room is needed"
    parser = commands.add_parser("unpin", help=what, description=sentence(what))
    add_contexts(parser)
    parser.set_defaults(run=_set_pinned, pinned=False)
    what = "give a context another name"
    parser = commands.add_parser("rename", help=what, description=sentence(what))
    add_context(parser)
    parser.add_argument("new", metavar="NEW", help="its new name")
    parser.set_defaults(run=_rename)
    what = "change how long a context is kept, what is noted of it, and who may read it"
    parser = commands.add_parser("update", help=what, description=sentence(what))
    add_context(parser)
    parser.add_argument("--ttl", type=seconds, metavar="SECONDS", help="in how many seconds it is dropped; inf for never")
    add_metadata(parser, "a JSON object that is noted of it, instead of what was noted before")
    parser.add_argument(
        "--shared-with",
        metavar="TENANTS",
        help="the server's tenants that may read it, with commas between; '' for none any more",
    )
    parser.set_defaults(run=_update)


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
