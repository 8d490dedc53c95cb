"""`kvdb ping`: by which way a server answers, and how fast."""

import argparse
import json
from statistics import median, quantiles

from kvdb.commands.arguments import Subparsers, add_command, add_json, add_server, answered, certificates_of, token_of
from kvdb.config import Timeouts, Tls
from kvdb.errors import InvalidArgument, Unavailable


def add(commands: Subparsers) -> None:
    """Add `ping` to the `kvdb` command."""
    parser = add_command(commands, "ping", "say by which way a server answers, and how fast", _ping)
    parser.add_argument("--count", type=_count, default=200, help="how many pings by each way (default 200)")
    what = "the way to measure: shared memory, gRPC, or both that there are (default auto)"
    parser.add_argument("--transport", choices=("auto", "shared", "grpc"), default="auto", help=what)
    add_json(parser)
    add_server(parser)


def _count(given: str) -> int:
    if not given.isdecimal() or not 2 <= int(given) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{given!r} is no number from 2 to 1000000")
    return int(given)


def _ping(given: argparse.Namespace) -> int:
    if "://" not in given.server:
        raise InvalidArgument(f"{given.server} is no server; expected one such as kvdb://127.0.0.1:7700")
    from kvdb.client.remote.connection import Connection  # so that the other commands need no gRPC
    from kvdb.client.remote.pings import GRPC, SHARED_MEMORY, WAYS, pings

    ways = {"auto": WAYS, "shared": (SHARED_MEMORY,), "grpc": (GRPC,)}[given.transport]
    connection = Connection(given.server, token_of(given), Timeouts(), certificates_of(given) or Tls())
    try:
        found = answered(given, lambda: pings(connection, given.count, ways))
        refusal = "" if SHARED_MEMORY in found or SHARED_MEMORY not in ways else connection.lanes.refusal
        if not found:
            raise Unavailable(f"{given.server} does not answer through {SHARED_MEMORY}: {refusal}")
    finally:
        connection.close()
    numbers = {way: (median(seconds), quantiles(seconds, n=100)[-1]) for way, seconds in found.items()}
    taken = next(iter(found))
    if given.json:
        times = {way: {"p50_seconds": p50, "p99_seconds": p99} for way, (p50, p99) in numbers.items()}
        print(json.dumps({"server": given.server, "transport": taken, "refusal": refusal, "count": given.count, "ways": times}))
        return 0
    print(f"{given.server} answers through {taken}" + (f"; not through {SHARED_MEMORY}: {refusal}" if refusal else ""))
    for way, (p50, p99) in numbers.items():
        print(f"  {way:13}  p50 {p50 * 1e6:8,.1f} us  p99 {p99 * 1e6:8,.1f} us")
    return 0
