"""The command line of the demos."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from engine_adapter.demo.server import ServerProcess
from kvdb.commands.arguments import Subparsers, add_command, add_index, add_retrieval, retrieval_of
from kvdb.errors import InvalidArgument, Unsupported

SLOW_LIBRARIES = ("torch", "transformers")


def add(commands: Subparsers) -> None:
    """Add `demo` to the `kvdb` command, and `rag` to that."""
    what = "watch a model answer questions about a document that lives in kvdb"
    parser = add_command(commands, "demo", what, _run, more=", or (`kvdb demo rag`) about many.")
    parser.add_argument("--tokens", type=int, default=16_384, help="length of the document (default 16384)")
    parser.add_argument("--facts", type=int, default=100, help="facts hidden in it (default 100)")
    parser.add_argument("--questions", type=int, default=10, help="how many of them are asked (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the document and the questions (default 0)")
    add_retrieval(parser, "all")
    add_index(parser, "--index", "kind of index that is searched (default flat)", "flat")
    parser.add_argument("--explain", action="store_true", help="show how the last query was answered, and what audits say")
    _add_rag(parser.add_subparsers(metavar="rag", title="more"))


def _add_rag(commands: Subparsers) -> None:
    parser = add_command(commands, "rag", "questions about many documents in novel orders, each computed once", _run_rag)
    parser.add_argument("--documents", type=int, default=24, help="in the library (default 24)")
    parser.add_argument("--together", type=int, default=8, metavar="N", help="documents in one prompt (default 8)")
    parser.add_argument("--questions", type=int, default=12, help="how many are asked (default 12)")
    parser.add_argument("--checked", type=int, default=16, metavar="N", help="prompts that the check compares (default 16)")
    told = "share computed again, 0 to 1 (default: chosen on each prompt)"
    parser.add_argument("--recompute", type=float, metavar="RATIO", help=told)
    parser.add_argument("--seed", type=int, default=0, help="of the documents and the questions (default 0)")


def _run(given: argparse.Namespace) -> int:
    if given.questions < 1:
        raise InvalidArgument(f"--questions is {given.questions}; expected at least 1")
    retrieval = retrieval_of(given)
    _check_libraries()
    with ServerProcess() as server:
        print("starting a server, and loading torch, transformers and the model ...", flush=True)
        with _what_it_needs():
            from engine_adapter.demo.show import show
        return show(server, given, retrieval)


def _run_rag(given: argparse.Namespace) -> int:
    with _what_it_needs():
        from engine_adapter.demo.rag import show
    return show(given.documents, given.together, given.questions, given.checked, given.recompute, given.seed)


def _check_libraries() -> None:
    """Raises Unsupported where a library is missing that takes long to load, before anything says that it is loaded."""
    for name in SLOW_LIBRARIES:
        if find_spec(name) is None:
            raise _missing(name)


@contextmanager
def _what_it_needs() -> Iterator[None]:
    """Turns an import error of a library that is not installed into Unsupported."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _missing(error.name) from None


def _missing(library: str | None) -> Unsupported:
    return Unsupported(f"the demo needs {library}, which is not installed; pip install 'kvdb[demo]'")
