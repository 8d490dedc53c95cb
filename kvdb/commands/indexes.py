"""`kvdb indexes`, `kvdb index` and `kvdb verify`: the indexes over a context on a server."""

import argparse
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING

from kvdb.client.client import Client
from kvdb.commands.arguments import add_context, add_index, open_server
from kvdb.types import IndexInfo, ModelSpec

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

LOOK_SECONDS = 0.5
"""How often a build is asked for its progress."""


def add(commands: "Subparsers") -> None:
    """Add the three to the `kvdb` command."""
    what = "list the indexes over a context"
    parser = commands.add_parser("indexes", help=what, description=what)
    parser.set_defaults(run=_list)
    add_context(parser)
    what = "build an index over a context"
    parser = commands.add_parser("index", help=what, description=what)
    add_index(parser, "--kind", "kind of index (default flat)", "flat")
    parser.set_defaults(run=_build)
    add_context(parser)
    what = "check the indexes over a context against its keys"
    parser = commands.add_parser("verify", help=what, description=what)
    parser.set_defaults(run=_verify)
    add_context(parser)


def _list(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        spec = db.get(given.name).spec
        print(_table(db.indexes(given.name), spec, given.name))
    return 0


def _build(given: argparse.Namespace) -> int:
    with ThreadPoolExecutor(1) as pool, open_server(given) as db:  # left in this order, so that an interrupt ends the call first
        spec = db.get(given.name).spec
        building = pool.submit(db.build_index, given.name, given.kind)
        _show_progress(db, building, given.name, given.kind)
        print(_table(building.result(), spec, given.name))
    return 0


def _verify(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        count = db.verify(given.name)
        print(f"{count} indexes of {given.name!r} fit their keys, counted by layer and segment")
    return 0


def _show_progress(db: Client, building: "Future[list[IndexInfo]]", name: str, kind: str) -> None:
    """A line that changes while the build goes on, where somebody sees it."""
    shown = False
    while not wait_for([building], LOOK_SECONDS).done:
        if sys.stderr.isatty():
            under_way = [info for info in db.indexes(name) if info.kind == kind]
            done, total = sum(info.layers for info in under_way), sum(info.layers_total for info in under_way)
            print(f"\r{kind}: {done} layers of {total or 'some'} ", end="", file=sys.stderr, flush=True)
            shown = True
    if shown:
        print(file=sys.stderr)


def _table(infos: list[IndexInfo], spec: ModelSpec, name: str) -> str:
    """The indexes in columns; the last is what an index adds to the keys and values."""
    if not infos:
        return f"no index over {name!r}; segments that are long enough get one by kvdb index"
    rows = [("kind", "segment", "tokens", "layers", "MiB", "of the KV")]
    for info in infos:
        raw = info.tokens * info.layers * spec.token_nbytes
        layers = f"{info.layers} of {info.layers_total}"
        size = (f"{info.nbytes / (1 << 20):,.1f}", f"{info.nbytes / max(raw, 1):.1%}")
        rows.append((info.kind, str(info.segment), f"{info.tokens:,}", layers, *size))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([f"{kind:{widths[0]}}", *map(str.rjust, rest, widths[1:])]) for kind, *rest in rows)
