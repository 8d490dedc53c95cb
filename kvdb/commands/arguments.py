"""What several commands take: a server to talk to, and what a query asks for."""

import argparse

import kvdb.config as configuration
from indexes.registry import KINDS
from indexes.retrieval import KINDS as RETRIEVALS
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP
from kvdb.client.client import Client
from kvdb.client.connect import connect
from kvdb.errors import InvalidArgument

SERVER = "kvdb://127.0.0.1:7700"


def add_context(parser: argparse.ArgumentParser, *, without: str = "") -> None:
    """A context's name, and where it is stored. without: what happens where none is named, "" where one must be."""
    named = f"the context's name (default: {without})" if without else "the context's name"
    parser.add_argument("name", metavar="NAME", nargs="?" if without else None, help=named)
    parser.add_argument("--server", default=SERVER, help=f"where it is stored (default {SERVER})")
    parser.add_argument("--token", help="what the server wants of its clients (default KVDB_TOKEN)")


def open_server(given: argparse.Namespace) -> Client:
    """The server that `add_context` took. Raises what `kvdb.connect` raises."""
    token = configuration.load().server.token if given.token is None else given.token
    return connect(given.server, token=token)


def add_index(parser: argparse.ArgumentParser, flag: str, what: str, default: str | None) -> None:
    """A kind of index."""
    parser.add_argument(flag, choices=KINDS, default=default, help=what)


def add_retrieval(parser: argparse.ArgumentParser, default: str) -> None:
    """Which tokens are read. default: what happens where nothing is said."""
    parser.add_argument(
        "--retrieval", choices=RETRIEVALS, type=_with_underscores, help=f"which tokens are read (default: {default})"
    )
    parser.add_argument(
        "--alpha", type=float, default=Dipr().alpha, help="for dipr: the share of the largest weight (%(default)s)"
    )
    parser.add_argument("--k", type=int, default=100, help="for top_k: how many tokens (default %(default)s)")
    parser.add_argument("--p", type=float, default=0.95, help="for top_p: the share of the softmax mass (default %(default)s)")


def retrieval_of(given: argparse.Namespace) -> Retrieval | None:
    """What `add_retrieval` took, None for nothing. Raises InvalidArgument."""
    try:
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
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def _with_underscores(name: str) -> str:
    return name.replace("-", "_")
