"""`kvdb indexes` and `kvdb index`: the indexes over a context on a server."""

import argparse
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from kvdb.client.client import Client
from kvdb.commands.arguments import Subparsers, add_command, add_context, add_index, open_server
from kvdb.commands.output import bar, table
from kvdb.types import IndexInfo, ModelSpec

LOOK_SECONDS = 0.5
"""Seconds between two looks at a build's progress."""
UNDER_WAY = {"waiting", "building"}


def add(commands: Subparsers) -> None:
    """Add the two to the `kvdb` command."""
    parser = add_command(commands, "indexes", "list the indexes over a context", _list)
    parser.add_argument("--watch", action="store_true", help="go on showing how far builds are, until none is under way")
    add_context(parser)
    parser = add_command(commands, "index", "build an index over a context", _build)
    add_index(parser, "--kind", "kind of index (default flat)", "flat")
    add_context(parser)


def _list(given: argparse.Namespace) -> int:
    with open_server(given) as db:
        spec = db.get(given.name).spec
        if given.watch:
            _watch(db, given.name, spec)
        else:
            print(_table(db.indexes(given.name), spec, given.name))
    return 0


def _watch(db: Client, name: str, spec: ModelSpec) -> None:
    """Redraw the table in a terminal; elsewhere print a line for each build that made progress, and the table at the end."""
    terminal, printed, height = sys.stdout.isatty(), set[str](), 0
    while True:
        infos = db.indexes(name)
        under_way = [info for info in infos if info.state in UNDER_WAY]
        if terminal:
            shown = _table(infos, spec, name)
            print(f"\x1b[{height}F\x1b[J" * bool(height) + shown, flush=True)
            height = shown.count("\n") + 1
        else:
            for line in (f"{info.kind} of segment {info.segment}: {_state(info)}" for info in under_way):
                if line not in printed:
                    print(line, flush=True)
                    printed.add(line)
        if not under_way:
            break
        time.sleep(LOOK_SECONDS)
    if not terminal:
        print(_table(infos, spec, name))


def _build(given: argparse.Namespace) -> int:
    with ThreadPoolExecutor(1) as pool, open_server(given) as db:  # left in this order: an interrupt ends the call first
        spec = db.get(given.name).spec
        building = pool.submit(db.build_index, given.name, given.kind)
        _show_progress(db, building, given.name, given.kind)
        print(_table(building.result(), spec, given.name))
    return 0


def _show_progress(db: Client, building: "Future[list[IndexInfo]]", name: str, kind: str) -> None:
    """Draw a bar that grows while the build goes on, where stderr is a terminal."""
    shown = False
    while not wait_for([building], LOOK_SECONDS).done:
        if sys.stderr.isatty():
            builds = [info for info in db.indexes(name) if info.kind == kind]
            share = sum(info.progress for info in builds) / max(len(builds), 1)
            left = sum(info.seconds_expected - info.seconds for info in builds)
            print(f"\r\x1b[K{kind} {bar(share)}, {_duration(left)} left", end="", file=sys.stderr, flush=True)
            shown = True
    if shown:
        print(file=sys.stderr)


def _table(infos: list[IndexInfo], spec: ModelSpec, name: str) -> str:
    """The indexes in columns. "of the KV" is what an index adds to the keys and values."""
    if not infos:
        return f"no index over {name!r}; segments that are long enough get one by kvdb index"
    rows = [("kind", "segment", "tokens", "layers", "MiB", "of the KV", "state")]
    for info in infos:
        raw = info.tokens * info.layers * spec.token_nbytes
        layers = f"{info.layers} of {info.layers_total}"
        size = (f"{info.nbytes / (1 << 20):,.1f}", f"{info.nbytes / max(raw, 1):.1%}")
        rows.append((info.kind, str(info.segment), f"{info.tokens:,}", layers, *size, _state(info)))
    return table(rows, left={"kind", "state"})


def _state(info: IndexInfo) -> str:
    """The state of an index in words, with a bar while it is built."""
    if info.state == "failed":
        return f"failed: {info.error}"
    if info.state == "building":
        return f"{bar(info.progress)}, {_duration(info.seconds_expected - info.seconds)} left"
    return info.state


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(round(seconds), 0), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
