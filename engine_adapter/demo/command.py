"""The command line of the demo."""

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from indexes.registry import KINDS
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP
from kvdb.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


RETRIEVALS: Mapping[str, Callable[[argparse.Namespace], Retrieval]] = {
    "exact": lambda _: Exact(),
    "dipr": lambda given: Dipr(given.alpha),
    "top-k": lambda given: TopK(given.k),
    "top-p": lambda given: TopP(given.p),
}


def add(commands: "Subparsers") -> None:
    """Add `demo` to the `kvdb` command."""
    parser = commands.add_parser(
        "demo", help="watch a model answer questions about a document that lives in kvdb", description=__doc__
    )
    parser.add_argument("--tokens", type=int, default=16_384, help="length of the document (default 16384)")
    parser.add_argument("--facts", type=int, default=100, help="facts hidden in it (default 100)")
    parser.add_argument("--questions", type=int, default=10, help="how many of them are asked (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the document and the questions (default 0)")
    parser.add_argument("--retrieval", choices=RETRIEVALS, help="which tokens are read (default: all)")
    parser.add_argument("--alpha", type=float, default=0.012, help="for dipr: the share of the largest weight (default 0.012)")
    parser.add_argument("--k", type=int, default=100, help="for top-k: how many tokens (default 100)")
    parser.add_argument("--p", type=float, default=0.95, help="for top-p: the share of the softmax mass (default 0.95)")
    parser.add_argument("--index", choices=KINDS, default="flat", help="kind of index that is searched (default flat)")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    try:
        from engine_adapter.demo.show import show
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"the demo needs {error.name}, which is not installed; pip install 'kvdb[server,transformers]'"
        ) from None
    if given.questions < 1:
        raise InvalidArgument(f"--questions is {given.questions}; expected at least 1")
    return show(given.tokens, given.facts, given.questions, given.seed, retrieval=_retrieval(given), index=given.index)


def _retrieval(given: argparse.Namespace) -> Retrieval | None:
    """What was asked for, None for nothing. Raises InvalidArgument."""
    try:
        return RETRIEVALS[given.retrieval](given) if given.retrieval else None
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
