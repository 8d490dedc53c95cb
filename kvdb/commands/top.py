"""`kvdb top`: what a server does now, again and again."""

import argparse
import sys
from collections import deque
from shutil import get_terminal_size
from time import monotonic, sleep

import kvdb.commands.metrics_text as metrics_text
import kvdb.commands.output as output
import kvdb.config as configuration
from kvdb.commands.arguments import Subparsers, add_command
from kvdb.commands.metrics_text import Samples
from kvdb.commands.top_frame import ASCII, BLOCKS, frame, mean_step
from kvdb.errors import InvalidArgument, Unavailable

URL = "http://127.0.0.1:9464"
POINTS = 40
STARTED = "kvdb_start_time_seconds"
HOME, TO_LINE_END, TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
"""What a terminal does: to its upper left corner; forget the rest of a line, and of the screen."""


def add(commands: Subparsers) -> None:
    """Add `top` to the `kvdb` command."""
    parser = add_command(commands, "top", "show sessions, tiers, plans and latency of a server, until Ctrl-C", _run)
    parser.add_argument("--url", default=URL, help=f"the server's metrics port (default {URL})")
    parser.add_argument("--token", help="the token that the server expects (default KVDB_TOKEN)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="how often to look (default 1)")
    parser.add_argument("--once", action="store_true", help="show what was done since the server started, once")


def _run(given: argparse.Namespace) -> int:
    if not 0.05 <= given.interval <= 3600:
        raise InvalidArgument(f"--interval is {given.interval:g}; expected 0.05 to 3600 seconds")
    token = configuration.load().server.token if given.token is None else given.token
    live = sys.stdout.isatty() and not given.once
    marks, latencies = output.drawn(BLOCKS, ASCII), deque[float](maxlen=POINTS)
    before, looked, shown = Samples({}), 0.0, ""
    while True:
        try:
            now, at = metrics_text.read(given.url, token), monotonic()
        except Unavailable:
            if not shown:
                raise
            print(_seen(f"{given.url} does not answer; this was before:\n\n{shown}", live), flush=True)
        else:
            if now.sum(STARTED) != before.sum(STARTED):  # it counts from nothing again
                before, looked = Samples({}), 0.0
            latencies.append(mean_step(before, now))
            shown = frame(before, now, at - looked if looked else 0.0, latencies, marks)
            print(_seen(shown, live), flush=True)
            before, looked = now, at
        if given.once:
            return 0
        sleep(given.interval)


def _seen(frame: str, live: bool) -> str:
    return over(frame, *get_terminal_size()) if live else frame


def over(frame: str, columns: int, lines: int) -> str:
    """A frame that is written over the one before it, without a moment in which the screen is empty. It is cut to the size of the
    terminal, whose last line is left to the cursor."""
    shown = [line[:columns] + TO_LINE_END for line in frame.splitlines()[: max(1, lines - 1)]]
    return HOME + "\n".join(shown) + TO_SCREEN_END
