"""The command line of the demo."""

import argparse
from typing import TYPE_CHECKING

from kvdb.commands.arguments import add_index, add_retrieval, retrieval_of
from kvdb.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add(commands: "Subparsers") -> None:
    """Add `demo` to the `kvdb` command."""
    parser = commands.add_parser(
        "demo", help="watch a model answer questions about a document that lives in kvdb", description=__doc__
    )
    parser.add_argument("--tokens", type=int, default=16_384, help="length of the document (default 16384)")
    parser.add_argument("--facts", type=int, default=100, help="facts hidden in it (default 100)")
    parser.add_argument("--questions", type=int, default=10, help="how many of them are asked (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the document and the questions (default 0)")
    add_retrieval(parser, "all")
    add_index(parser, "--index", "kind of index that is searched (default flat)", "flat")
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
    return show(given.tokens, given.facts, given.questions, given.seed, retrieval=retrieval_of(given), index=given.index)
