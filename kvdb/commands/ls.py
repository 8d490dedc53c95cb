"""`kvdb ls`, `kvdb show`, `kvdb drop` and `kvdb offload`: the contexts of a server or a store."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvdb.commands.arguments import Subparsers, add_command, add_contexts, add_json, add_server, open_server, text
from kvdb.commands.keep import add_metadata
from kvdb.commands.output import table
from kvdb.errors import InvalidArgument
from kvdb.types import ContextInfo, Dropped, IndexInfo

TITLES = ("name", "model", "tokens", "segments", "MiB", "uses", "used", "kind", "kept")
TEXTS = {"name", "model", "kind", "kept"}
"""The columns that are aligned to the left."""
SPANS = ((86_400, "d"), (3600, "h"), (60, "m"))
"""Lengths in seconds, and their names."""


def add(commands: Subparsers) -> None:
    """Add the four to the `kvdb` command."""
    parser = add_command(commands, "ls", "list the contexts", _list)
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that begin like this")
    add_metadata(parser, "only contexts of which all of this JSON object is noted")
    add_json(parser, "one JSON object a line")
    add_server(parser)
    parser = add_command(commands, "show", "show what is stored of a context, and its indexes", _show)
    add_contexts(parser)
    add_json(parser, "one JSON object a line")
    parser = add_command(commands, "drop", "forget contexts", _drop)
    add_contexts(parser, required=False)
    parser.add_argument("--prefix", type=text, default="", help="all whose names begin like this and that no session stands on")
    add_metadata(parser, "all of which all of this JSON object is noted and that no session stands on")
    parser = add_command(commands, "offload", "move contexts from main memory to disk until a session needs them", _offload)
    add_contexts(parser)


def _list(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        infos = [context.info for context in db.contexts(given.prefix, metadata=given.metadata)]
    if given.json:
        for info in infos:
            print(json.dumps(_fields(info)))
    elif infos:
        print(_table(infos))
    else:
        asked = f"begins with {given.prefix!r}" if given.prefix else "is stored"
        print(f"no context {asked}" + (" and has that metadata" if given.metadata else ""))
    return 0


def _show(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        found = [(db.get(name).info, db.indexes(name)) for name in given.names]
    for info, indexes in found:
        if given.json:
            print(json.dumps({**_fields(info), "indexes": [asdict(index) for index in indexes]}))
        else:
            print(_described(info, indexes))
    return 0


def _drop(given: argparse.Namespace) -> int:
    """Returns 1 where contexts are still there because sessions stand on them."""
    by_name, matching = bool(given.names), bool(given.prefix or given.metadata)
    if by_name == matching:
        raise InvalidArgument("kvdb drop takes names, or --prefix and --metadata; expected one of the two")
    with open_server(given) as db:
        if by_name:
            db.drop(*given.names)
            done = Dropped(tuple(given.names), ())
        else:
            done = db.drop_all(given.prefix, metadata=given.metadata)
    for name in done.names:
        print(f"{name!r} is forgotten")
    for name in done.in_use:
        print(f"{name!r} is still there: a session stands on it; close it, or say kvdb drop {name!r}", file=sys.stderr)
    if not done.names and not done.in_use:
        print("no context matches")
    return bool(done.in_use)


def _offload(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        for name in given.names:
            print(f"{name!r}: {_mib(db.offload(name))} MiB of main memory are free again", flush=True)
    return 0


def _table(infos: Sequence[ContextInfo]) -> str:
    """The contexts in columns, and what they hold together."""
    rows = [TITLES]
    for info in infos:
        figures = f"{info.tokens:,}", str(info.segments), _mib(info.nbytes), f"{info.uses:,}", _span(time.time() - info.used)
        rows.append((info.name, info.spec.name, *figures, _kind(info), _kept(info)))
    tokens = sum(info.tokens for info in infos)
    return f"{table(rows, TEXTS)}\nin all {tokens:,} tokens; what contexts share counts for each of them"


def _described(info: ContextInfo, indexes: Sequence[IndexInfo]) -> str:
    """A context in lines: what it is, its model, its indexes."""
    lines = [
        f"{info.name!r}: {info.tokens:,} tokens, {_kind(info)}, segments: {info.segments}, {_mib(info.nbytes)} MiB",
        f"  of {info.spec}",
        f"  used {info.uses:,} times, last {_span(time.time() - info.used)} ago",
    ]
    if info.format:
        lines.append(f"  stored as {info.format}: keys are off by {info.key_error:.2%}, values by {info.value_error:.2%}")
    if _kept(info):
        lines.append(f"  kept: {_kept(info)}")
    if info.metadata:
        lines.append(f"  noted: {json.dumps(dict(info.metadata), ensure_ascii=False)}")
    if info.shared_with:
        lines.append(f"  shared with: {', '.join(info.shared_with)}")
    for index in indexes:
        lines.append(f"  {index.kind} over segment {index.segment}: {index.state}, {_mib(index.nbytes)} MiB")
    return "\n".join(lines)


def _fields(info: ContextInfo) -> dict[str, Any]:
    return {**asdict(info), "spec": info.spec.to_dict(), "kind": _kind(info)}


def _kind(info: ContextInfo) -> str:
    return "chunk" if info.chunk else "blended" if info.blended else "prefix"


def _kept(info: ContextInfo) -> str:
    """How long a context is kept: "" for as long as there is room."""
    left = "" if info.expires is None else f"for {_span(info.expires - time.time())}"
    return ", ".join(filter(None, ["pinned" if info.pinned else "", left]))


def _span(seconds: float) -> str:
    """A time in its largest unit."""
    for length, unit in SPANS:
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f}"
