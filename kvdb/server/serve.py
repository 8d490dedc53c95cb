"""A server: built, started, drained."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import kvdb.machine as machine_file
from kvdb.calibrate import calibrate
from kvdb.config import Config, ServerConfig
from kvdb.database import Database
from kvdb.errors import ConfigError, KvdbError
from kvdb.rpc.options import server_options
from kvdb.server.allocator import keep_freed_memory
from kvdb.server.edge import TokenCheck
from kvdb.server.service import SERVICE, KvdbService, handlers
from kvdb.server.sessions import Sessions
from kvdb.server.streams import Streams
from kvdb.version import __version__

SHORT_CALL_THREADS = 8
"""Beside those of the streams, so that streams that wait leave threads to everything else."""


class Server:
    """The service over a database, which stays the caller's.

    target: where clients find it, `kvdb://host:port` or `kvdb+unix:///path`.
    """

    def __init__(self, database: Database, config: ServerConfig) -> None:
        """Takes the port. Raises ConfigError when it is taken already or cannot be."""
        self._threads = ThreadPoolExecutor(config.workers + SHORT_CALL_THREADS, thread_name_prefix="kvdb-server")
        self._streams = Streams(config.workers)
        self._sessions = Sessions(config.session_idle_seconds, self._streams.session_ended)
        self._health = health.HealthServicer()
        self._server = grpc.server(
            self._threads,
            interceptors=[TokenCheck(config.token)] if config.token else [],
            options=server_options(config.message_bytes_max),
        )
        service = KvdbService(database, self._sessions, self._streams, config.message_bytes_max)
        self._server.add_generic_rpc_handlers((handlers(service),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if config.reflection:
            names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self.target = self._listen(config)

    def start(self) -> None:
        """Answer calls from now on."""
        self._sessions.start()
        self._server.start()
        for name in ("", SERVICE.full_name):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stop(self, grace: float) -> None:
        """Refuse new calls, give those under way `grace` seconds to end, close every session and leave no thread behind."""
        self._health.enter_graceful_shutdown()
        stopped = self._server.stop(grace)
        self._streams.drain()
        stopped.wait()
        self._sessions.stop()
        self._threads.shutdown()

    def _listen(self, config: ServerConfig) -> str:
        unix = config.host.startswith("unix:")
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = config.host if unix else f"{host}:{config.port}"
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            self._threads.shutdown()
            raise ConfigError(
                f"the server cannot listen on {address} ({error}); choose another, or port 0 for a free one"
            ) from None
        return f"kvdb+unix://{config.host.removeprefix('unix:')}" if unix else f"kvdb://{host}:{port}"


def run(config: Config) -> int:
    """Serve a database of this process until SIGTERM or SIGINT, then drain; the exit status. Raises ConfigError.

    Prints one line when clients may come. A second signal ends the process at once.
    """
    keep_freed_memory()
    if config.optimizer.calibrate_at_start:
        _calibrate(config.optimizer.machine_file)
    stop = Event()
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    with Database(config) as database:
        server = Server(database, config.server)
        server.start()
        print(f"kvdb {__version__} ready on {server.target}", flush=True)  # noqa: T201
        stop.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
        server.stop(config.server.drain_seconds)
    return 0


def _calibrate(setting: str) -> None:
    """Measure the machine where its numbers are wanted and missing; what cannot be kept is measured at the next start again."""
    path = machine_file.path_of(setting)
    if path is None or machine_file.known(setting).measured:
        return
    try:
        machine_file.write(path, calibrate())
        said = f"kept in {path}"
    except KvdbError as error:
        said = str(error)
    print(f"kvdb measured this machine, {said}", file=sys.stderr, flush=True)  # noqa: T201
