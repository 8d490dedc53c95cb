"""`kvdb verify`, `backup`, `adopt`, `gc`, `compact`: is all that is stored as it was written, a copy, more and less of it."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from kvdb.catalog.durable.adoption import adopt
from kvdb.client.client import Client
from kvdb.commands.arguments import Subparsers, add_command, add_json, add_server, open_server, text
from kvdb.commands.exit_status import DAMAGED, OK
from kvdb.commands.output import bar
from kvdb.errors import IntegrityError, KvdbError, Unavailable


def add(commands: Subparsers) -> None:
    """Add the five to the `kvdb` command."""
    what = "compare everything that is stored with its checksums; the status is 7 where anything is damaged"
    parser = add_command(commands, "verify", what, _verify)
    parser.add_argument("names", metavar="NAME", type=text, nargs="*", help="the name of a context (default: all, and the store)")
    add_json(parser, "one JSON object a line")
    add_server(parser)
    parser = add_command(commands, "backup", "copy a store to a new folder, while it is used", _backup)
    parser.add_argument("folder", metavar="FOLDER", type=text, help="a folder that is empty or not there, where the server is")
    links = "give the store's own files a second name: it takes no room, and what damages one damages both"
    parser.add_argument("--hard-links", action="store_true", help=links)
    add_json(parser)
    add_server(parser)
    what = "take in the contexts of another copy of a store's catalogue, whose files are there; no process has the store open"
    parser = add_command(commands, "adopt", what, _adopt)
    parser.add_argument(
        "catalogue", metavar="CATALOG.DB", type=Path, help="the other copy, such as a newer one; it stays as it is"
    )
    parser.add_argument("--store", metavar="FOLDER", type=Path, required=True, help="the folder of the store")
    what = "remove the files of a store that its catalogue does not know; nothing brings them back"
    parser = add_command(commands, "gc", what, _gc)
    parser.add_argument("--dry-run", action="store_true", help="only say which")
    add_json(parser, "one JSON object a line")
    add_server(parser)
    parser = add_command(commands, "compact", "give back the space of what no context names any more", _compact)
    add_json(parser)
    add_server(parser)


def _verify(given: argparse.Namespace) -> int:
    damaged = 0
    with open_server(given) as db:
        for found in chain(_contexts(db, given.names), () if given.names else _store(db)):
            damaged += not found["ok"]
            print(json.dumps(found) if given.json else _line(found), flush=True)
    if damaged:
        remedy = f"drop them with kvdb drop NAME --server {given.server}, import them anew, and check the disk"
        print(f"kvdb: {damaged} damaged; {remedy}", file=sys.stderr)
    return DAMAGED if damaged else OK


def _backup(given: argparse.Namespace) -> int:
    folder = str(Path(given.folder).absolute()) if "://" not in given.server else given.folder
    with open_server(given) as db:
        done = db.backup(folder, link=given.hard_links)
    if given.json:
        print(json.dumps({"folder": folder, **asdict(done)}))
        return OK
    counts = {"copied": done.copied, "reflinked": done.reflinked, "hard links": done.linked}
    made = ", ".join(f"{count:,} {how}" for how, count in counts.items() if count)
    print(f"{folder} is a store of {done.contexts:,} contexts: {done.nbytes:,} bytes, files: {made}; all were read and are whole")
    if done.linked:
        print("hard links are the store's own files under a second name: what damages one damages both")
    if done.same_file_system:
        print("it is on the file system of the store, and lost with it: keep one on another disk")
    return OK


def _adopt(given: argparse.Namespace) -> int:
    found = adopt(given.store, given.catalogue)
    for name in found.taken:
        print(f"{name!r} was taken in")
    for name, reason in found.left.items():
        print(f"{name!r} was left: {reason}")
    if not found.taken and not found.left:
        print("the store has every context of that catalogue")
    return OK


def _gc(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        files = db.unknown_files(remove=not given.dry_run)
    done = "would be removed" if given.dry_run else "was removed"
    for file in files:
        print(json.dumps(asdict(file)) if given.json else f"{file.name}, {file.nbytes:,} bytes, {done}")
    if not files and not given.json:
        print("the catalogue knows every file")
    return OK


def _compact(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        nbytes = db.compact()
    print(json.dumps({"nbytes": nbytes}) if given.json else f"{nbytes:,} bytes of blocks were given back")
    return 0


def _contexts(db: Client, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What was found of each context."""
    infos = [db.get(name).info for name in names] or [context.info for context in db.contexts()]
    total, done = max(sum(info.nbytes for info in infos), 1), 0
    for info in infos:
        _progress(done / total, info.name)
        try:
            yield {"name": info.name, "ok": True, **asdict(db.verify(info.name))}
        except (IntegrityError, Unavailable) as error:
            yield _fault(info.name, error)
        done += info.nbytes
    _progress(None, "")


def _store(db: Client) -> Iterator[dict[str, Any]]:
    """What was found of the catalogue, the files and the pools of blocks."""
    try:
        damaged = db.verify_store()
    except IntegrityError as error:
        yield _fault("", error)
        return
    for name in damaged:
        yield {"name": name, "ok": False, "error": "it was found damaged when the store was opened"}
    if not damaged:
        yield {"name": "", "ok": True}
    for file in db.unknown_files():
        yield {"name": "", "ok": True, "unknown": file.name, "nbytes": file.nbytes}


def _fault(name: str, error: KvdbError) -> dict[str, Any]:
    return {"name": name, "ok": False, "error": str(error)}


def _line(found: dict[str, Any]) -> str:
    what = repr(found["name"]) if found["name"] else "the store"
    if not found["ok"]:
        return f"{what}: {found['error']}"
    if "unknown" in found:
        return f"{found['unknown']}: {found['nbytes']:,} bytes that the catalogue does not know; kvdb adopt or kvdb gc decides"
    if not found["name"]:
        return f"{what}: its catalogue, files and pools of blocks agree"
    return f"{what}: as written; {found['blocks']:,} blocks on disk, {found['indexes']:,} indexes, {found['nbytes']:,} bytes"


def _progress(share: float | None, name: str) -> None:
    """Draw how much is done, where stderr is a terminal; None for the end."""
    if sys.stderr.isatty():
        drawn = "" if share is None else f"{bar(share)} {name}"
        print(f"\r\x1b[K{drawn}", end="", file=sys.stderr, flush=True)
