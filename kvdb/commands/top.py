"""`kvdb top`: what a server does now, again and again."""

import argparse
import sys
from collections import deque
from time import monotonic, sleep
from typing import TYPE_CHECKING

import kvdb.commands.metrics_text as metrics_text
import kvdb.commands.output as output
import kvdb.config as configuration
from kvdb.commands.arguments import sentence
from kvdb.commands.metrics_text import Samples
from kvdb.commands.top_frame import ASCII, BLOCKS, frame, mean_step
from kvdb.errors import InvalidArgument

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

URL = "http://127.0.0.1:9464"
POINTS = 40
CLEAR = "\x1b[H\x1b[2J"


def add(commands: "Subparsers") -> None:
    """Add `top` to the `kvdb` command."""
    what = "show sessions, tiers, plans and latency of a server, until Ctrl-C"
    parser = commands.add_parser("top", help=what, description=sentence(what))
    parser.add_argument("--url", default=URL, help=f"the server's metrics port (default {URL})")
    parser.add_argument("--token", help="the token that the server expects (default KVDB_TOKEN)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="how often to look (default 1)")
    parser.add_argument("--once", action="store_true", help="show what was done since the server started, once")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    if not 0.05 <= given.interval <= 3600:
        raise InvalidArgument(f"--interval is {given.interval:g}; expected 0.05 to 3600 seconds")
    token = configuration.load().server.token if given.token is None else given.token
    marks, latencies = output.drawn(BLOCKS, ASCII), deque[float](maxlen=POINTS)
    before, looked = Samples({}), 0.0
    while True:
        now, at = metrics_text.read(given.url, token), monotonic()
        latencies.append(mean_step(before, now))
        shown = frame(before, now, at - looked if looked else 0.0, latencies, marks)
        live = sys.stdout.isatty() and not given.once
        print(f"{CLEAR}{shown}" if live else shown, flush=True)
        if given.once:
            return 0
        before, looked = now, at
        sleep(given.interval)
