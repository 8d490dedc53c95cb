"""Starts and drains the endpoint."""

import signal
import socket
import sys
from ipaddress import ip_address
from threading import Event, Thread

import uvicorn

from engine_adapter.rag import RagEngine
from engine_adapter.rag_server.app import Endpoint
from engine_adapter.rag_server.settings import EndpointSettings
from kvdb.errors import ConfigError
from kvdb.version import __version__

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CONNECTIONS_MAX = 1024
LOOK_SECONDS = 0.2
"""How often the main thread looks for a signal: Python hears it there alone, and only when it wakes."""
END_SECONDS = 5.0
"""How long answers that were cut may take to say so."""


def listen(host: str, port: int, token: str) -> socket.socket:
    """A socket at that address. Raises ConfigError where it cannot be had, and where others may reach it without a token."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if not token and not ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"{host} can be reached from elsewhere, and no token is set; name one by --token-file or KVDB_RAG_TOKEN, or "
                "listen on 127.0.0.1"
            )
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the server cannot listen on {host}:{port} ({error}); choose another, or port 0 for a free one"
        ) from None


def run(engine: RagEngine, settings: EndpointSettings, listening: socket.socket, grace_seconds: float) -> int:
    """Answer until SIGTERM or SIGINT; the exit status. Answers under way have `grace_seconds` then, and end at their next token
    after that. Prints one line when clients may come. A second signal ends the process at once. For the main thread."""
    told = Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: told.set())
    endpoint = Endpoint(engine, settings)
    config = uvicorn.Config(
        endpoint.app(), log_level="warning", limit_concurrency=CONNECTIONS_MAX, lifespan="off", access_log=False
    )
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, args=([listening],), name="kvdb-rag-http")
    thread.start()
    host, port = listening.getsockname()[:2]
    print(f"kvdb {__version__} answers on http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)  # noqa: T201
    while thread.is_alive() and not told.wait(LOOK_SECONDS):
        pass
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    failed = not told.is_set()
    server.should_exit = True
    thread.join(grace_seconds)
    endpoint.cut()
    thread.join(END_SECONDS)
    if thread.is_alive():
        print("kvdb rag serve ends with connections open", file=sys.stderr, flush=True)  # noqa: T201
        server.force_exit = True
        thread.join()
    endpoint.close()
    return int(failed)
