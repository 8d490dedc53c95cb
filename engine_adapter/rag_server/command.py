"""`kvdb rag serve`: a RAG engine behind an endpoint as OpenAI's clients know it."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvdb.commands.arguments import Subparsers, add_command, text
from kvdb.errors import ConfigError, Unsupported

TOKEN = "KVDB_RAG_TOKEN"  # noqa: S105  # the name of a variable
PORT = 7780
GRACE_SECONDS = 10.0
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add(commands: Subparsers) -> None:
    """Add `rag` to the `kvdb` command, and `serve` to that."""
    parser = add_command(commands, "rag", "answers from documents whose KV lies in kvdb")
    _add_serve(parser.add_subparsers(metavar="serve", title="commands", required=True))


def _add_serve(commands: Subparsers) -> None:
    what = "answer chats from documents, over HTTP, as OpenAI's clients ask"
    parser = add_command(commands, "serve", what, _run, more=", until SIGTERM.")
    parser.add_argument("--model", metavar="FOLDER", required=True, help="a model and its tokenizer, as transformers saves them")
    parser.add_argument(
        "--target", required=True, help="where documents lie: the folder of a store, or a server kvdb://HOST:PORT"
    )
    parser.add_argument("--target-token", type=text, help="the token that the server of --target expects (default KVDB_TOKEN)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="port to listen on, 0 for a free one (default %(default)s)")
    parser.add_argument("--token-file", metavar="FILE", help=f"holds the token that clients send (default: {TOKEN}, or none)")
    parser.add_argument("--name", type=text, help="of the model, as clients ask for it beside that of its folder")
    parser.add_argument("--instruction", default="", type=text, help="the beginning of every system message")
    parser.add_argument("--namespace", default="rag", type=text, help="of the documents in the database (default %(default)s)")
    parser.add_argument("--memory-bytes", type=int, help="the most bytes of all documents (default: the database's limits)")
    parser.add_argument(
        "--max-tokens", type=_positive, default=256, help="of an answer that names no limit (default %(default)s)"
    )
    parser.add_argument(
        "--waiting-max", type=_positive, default=64, help="requests that wait; more get 429 (default %(default)s)"
    )
    parser.add_argument(
        "--grace-seconds", type=_seconds, default=GRACE_SECONDS, help="that answers have after SIGTERM (default %(default)g)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: as they are saved)")


def _run(given: argparse.Namespace) -> int:
    with _what_it_needs():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from engine_adapter.rag import RagEngine
        from engine_adapter.rag_server.serve import listen, run
        from engine_adapter.rag_server.settings import EndpointSettings
    import kvdb
    import kvdb.config as configuration

    folder = Path(given.model)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no model is in {given.model}; expected a folder with config.json, weights and tokenizer")
    alias = folder.absolute().name
    settings = EndpointSettings(given.name or alias, alias, _token(given.token_file), given.max_tokens, given.waiting_max)
    remote = "://" in given.target
    target_token = (configuration.load().server.token if given.target_token is None else given.target_token) if remote else ""
    with listen(given.host, given.port, settings.token) as listening, kvdb.connect(given.target, token=target_token) as db:
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=given.dtype).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the model in {given.model} cannot be loaded: {error}") from None
        fixed = {"instruction": given.instruction, "namespace": given.namespace, "memory_bytes": given.memory_bytes}
        with RagEngine(model, tokenizer, db, chat=True, **fixed) as engine:
            return run(engine, settings, listening, given.grace_seconds)


def _token(path: str | None) -> str:
    """The token that clients have to send, "" for none. Raises ConfigError for a file without one."""
    if path is None:
        return os.environ.get(TOKEN, "")
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token cannot be read from {path}: {error}") from None
    if not token:
        raise ConfigError(f"{path} is empty; expected the token that clients send")
    return token


def _positive(given: str) -> int:
    number = int(given)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{given} is below 1")
    return number


def _seconds(given: str) -> float:
    seconds = float(given)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{given} is not a time")
    return seconds


@contextmanager
def _what_it_needs() -> Iterator[None]:
    """Turns an import error of a library that is not installed into Unsupported."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise Unsupported(f"kvdb rag serve needs {error.name}, which is not installed; pip install 'kvdb[rag]'") from None
