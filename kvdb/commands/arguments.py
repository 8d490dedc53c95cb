"""Arguments that several commands take: a server, a context, a kind of index, a retrieval."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeAlias, TypeVar

import kvdb.config as configuration
from indexes.registry import KINDS
from indexes.retrieval import KINDS as RETRIEVALS
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP
from kvdb.client.client import Client
from kvdb.client.connect import ADDRESS, connect
from kvdb.config import Tls
from kvdb.errors import NotFound, Unavailable

SERVER = "kvdb://127.0.0.1:7700"
LOOK_SECONDS = 0.1
"""How often a server that does not answer yet is asked again."""
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where commands are added."""
Run = Callable[[argparse.Namespace], int]
"""Takes a command's arguments, prints to stdout and returns the exit status."""
T = TypeVar("T")


def add_command(
    commands: Subparsers, name: str, what: str, run: Run | None = None, *, more: str = ".", **defaults: Any
) -> argparse.ArgumentParser:
    """Add a command; the parser of its arguments. what: what it does, the beginning of its help. run: None where it has commands
    of its own. more: the rest of its help. defaults: what `run` gets beside the arguments."""
    parser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}{more}")
    parser.set_defaults(run=run, **defaults)
    return parser


def add_json(parser: argparse.ArgumentParser, what: str = "one JSON object") -> None:
    """Add the flag for output that machines read. what: what is printed then."""
    parser.add_argument("--json", action="store_true", help=f"print {what}, for machines")


def add_context(parser: argparse.ArgumentParser, *, without: str = "") -> None:
    """Add the arguments for a context's name and its server. without: the help text for what happens without a name, "" where a
    name is required."""
    named = f"the context's name (default: {without})" if without else "the context's name"
    parser.add_argument("name", metavar="NAME", type=text, nargs="?" if without else None, help=named)
    add_server(parser)


def add_contexts(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the arguments for the names of contexts and their server. required: whether there is at least one."""
    parser.add_argument("names", metavar="NAME", type=text, nargs="+" if required else "*", help="the name of a context")
    add_server(parser)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a server, or the folder of a store."""
    certificates = "for kvdbs://, KVDB_TLS_CA, KVDB_TLS_CERT and KVDB_TLS_KEY name files in PEM"
    said = f"the server, or the folder of a store (default {SERVER}); {certificates}"
    parser.add_argument("--server", default=SERVER, help=said)
    parser.add_argument("--token", type=text, help="the token that the server expects (default KVDB_TOKEN)")
    waits = "how long to ask again while no server answers there, such as one that was just started (default: not at all)"
    parser.add_argument("--wait", type=seconds, default=0.0, metavar="SECONDS", help=waits)


def answered(given: argparse.Namespace, ask: Callable[[], T]) -> T:
    """What `ask` returns, which is called again while no server answers and the time of `--wait` is not over. Raises what it
    raises."""
    deadline = monotonic() + given.wait
    while True:
        try:
            return ask()
        except Unavailable:
            if monotonic() >= deadline:
                raise
            sleep(LOOK_SECONDS)


def open_server(given: argparse.Namespace) -> Client:
    """Connect to the server that `add_server` took, or open the store. Raises what `kvdb.connect` raises, and NotFound for a
    folder that is not there."""
    if "://" not in given.server and not Path(given.server).is_dir() and not ADDRESS.fullmatch(given.server):
        raise NotFound(f"no store is at {given.server}; expected its folder, or a server such as {SERVER}")
    return answered(given, lambda: connect(given.server, token=token_of(given), tls=certificates_of(given)))


def token_of(given: argparse.Namespace) -> str:
    """The token for the server that `add_server` took."""
    return configuration.load().server.token if given.token is None else str(given.token)


def certificates_of(given: argparse.Namespace) -> Tls | None:
    """What the environment names for TLS, None for a server without."""
    return Tls.of_environment() if given.server.startswith("kvdbs:") else None


def add_index(parser: argparse.ArgumentParser, flag: str, what: str, default: str | None) -> None:
    """Add a flag that takes a kind of index."""
    parser.add_argument(flag, choices=KINDS, default=default, help=what)


def add_retrieval(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flags that say which tokens are read. default: the help text for what happens without them."""
    kind = parser.add_argument("--retrieval", choices=RETRIEVALS, help=f"which tokens are read (default: {default})")
    kind.type = lambda name: name.replace("-", "_")
    parser.add_argument(
        "--alpha", type=float, default=Dipr().alpha, help="for dipr: the share of the largest weight (%(default)s)"
    )
    parser.add_argument("--k", type=int, default=100, help="for top_k: how many tokens (default %(default)s)")
    parser.add_argument("--p", type=float, default=0.95, help="for top_p: the share of the softmax mass (default %(default)s)")


def retrieval_of(given: argparse.Namespace) -> Retrieval | None:
    """The retrieval that `add_retrieval` took, None for none. Raises InvalidArgument."""
    match given.retrieval:
        case "exact":
            return Exact()
        case "dipr":
            return Dipr(given.alpha)
        case "top_k":
            return TopK(given.k)
        case "top_p":
            return TopP(given.p)
    return None


def text(argument: str) -> str:
    """An argument that the wire can carry, which is UTF-8. The interpreter turns other bytes into surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{argument!a} is not UTF-8") from None
    return argument


def seconds(argument: str) -> float:
    """The argument of a flag, parsed. Raises ArgumentTypeError for what is no positive number."""
    try:
        found = float(argument)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise argparse.ArgumentTypeError(f"{argument!r} is no positive number of seconds, or inf")
    return found
