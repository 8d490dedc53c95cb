"""Builds, starts and drains a server."""

import gc
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from threading import Event, Timer
from typing import NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import kvdb.hardware.cpu as cpu
import kvdb.hardware.profile as profile
from kvdb.config import Config, ServerConfig
from kvdb.database import Database
from kvdb.errors import ConfigError, KvdbError, Unauthenticated
from kvdb.events import Kind
from kvdb.hardware.calibrate import calibrate
from kvdb.rpc.call import SERVICE
from kvdb.rpc.options import server_options
from kvdb.server import decode_calls
from kvdb.server.access.exposure import check_exposure
from kvdb.server.access.tls import server_credentials, ssl_context
from kvdb.server.admission.admission import Admission
from kvdb.server.console.access import View
from kvdb.server.console.console import Console
from kvdb.server.http.opening import open_http
from kvdb.server.http.routes import Route
from kvdb.server.inflight import InflightBytes
from kvdb.server.interceptors import TokenCheck, UnaryCalls
from kvdb.server.log import open_log
from kvdb.server.malloc import keep_freed_memory
from kvdb.server.metrics.calls import CallMetrics
from kvdb.server.metrics.opening import metrics_route, open_registry
from kvdb.server.observing import CallsSeen
from kvdb.server.service import KvdbService, handlers
from kvdb.server.session_registry import Sessions
from kvdb.server.shared_memory.engine import Door, SharedEngine
from kvdb.server.shared_memory.listener import SharedMemoryListener
from kvdb.server.streams import Streams
from kvdb.server.tenancy.credentials import Credentials
from kvdb.server.tenancy.memory import for_tenants
from kvdb.server.tenancy.tenants import AnyDatabase, Tenants
from kvdb.server.tracing import open_tracing
from kvdb.server.turns import Turns
from kvdb.server.watch import PeriodicCalls
from kvdb.version import __version__

SHORT_CALL_THREADS = 16
"""Threads beside those of the streams, so that streams that wait leave some to everything else."""
CLIENT_CALLS_MAX = SHORT_CALL_THREADS // 2
"""The number of unary calls of one client that are answered at a time; more wait, and take no thread."""
CLIENT_WAITING_MAX = 256
CLIENT_BURST_MAX = 1024
"""Calls of one connection beside its streams. What waits above CLIENT_WAITING_MAX is refused; what is above this is not sent."""
CONNECTIONS_MAX = 1024
LOOKS_PER_IDLE_TIME = 4
REVOKED_SECONDS = 0.5
"""How often it is looked whether clients with open streams or regions may still be there."""
END_SECONDS = 5.0
"""How long a server that has drained may take to end; then its process ends, whatever still runs."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOOK_SECONDS = 0.2
"""How often the main thread looks for a signal. The system may give it to any thread, but Python hears it in this one alone, and
only when this one wakes."""


class TenantCalls(NamedTuple):
    """What answers the calls of one tenant: over gRPC, and through shared memory."""

    service: KvdbService
    shared: SharedEngine


class Server:
    """The service over a database, which the caller keeps.

    target: where clients find it, `kvdb://host:port` or `kvdb+unix:///path`.
    """

    def __init__(self, database: Database, config: ServerConfig) -> None:
        """Takes the port. Raises ConfigError if it is taken already or invalid, and for files that are no certificate and its
        key."""
        tls = server_credentials(config)
        self._threads = ThreadPoolExecutor(config.workers + SHORT_CALL_THREADS, thread_name_prefix="kvdb-server")
        self.registry = open_registry(database)
        """What is measured of it."""
        self._measured = CallMetrics(self.registry)
        self._streams = Streams(config.workers, config.stream_idle_seconds)
        self._turns = Turns(CLIENT_CALLS_MAX, CLIENT_WAITING_MAX, self._measured.waited)
        self._tracing = open_tracing(config.traces)
        self._queries = self._tracing.together(database)
        of_tenant = cache(lambda tenant: database.config.quotas.of(tenant).requests_max)
        self._admission = Admission(config.requests_max, config.queue_max, self._waited, of_tenant, database.events)
        self._events = database.events
        self.credentials = Credentials(config)
        """Whom it lets in."""
        self._config = config
        self._inflight = InflightBytes(config.inflight_bytes_max)
        self._tenants = Tenants(database, self._open_sessions, self._open_service)
        idle_seconds = min(config.session_idle_seconds, config.stream_idle_seconds)
        self._watch = PeriodicCalls(idle_seconds / LOOKS_PER_IDLE_TIME, [self._tenants.close_idle, self._streams.end_idle])
        self._health = health.HealthServicer()
        door = Door(self.credentials.asks, lambda token: self._tenants.service(self.credentials.of_token(token)).shared)
        # Certificates cannot be asked for there.
        self._local = SharedMemoryListener("" if config.tls_client_ca else config.local_socket, door)
        self._seen = CallsSeen(self._measured, database.events, self._tracing, self._tenant_of)
        self._doorkeeper = PeriodicCalls(REVOKED_SECONDS, [self._end_refused] if self.credentials.asks else [])
        self._server = grpc.server(
            self._threads,
            interceptors=[
                self._seen,
                *([TokenCheck(self.credentials.lets_in)] if self.credentials.asks else []),
            ],
            options=server_options(config.message_bytes_max, config.workers + CLIENT_BURST_MAX, CONNECTIONS_MAX),
        )
        self._server.add_generic_rpc_handlers((self._calls(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if config.reflection:
            names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self.target = self._listen(config, tls)
        self.ready = False
        """Whether it takes new calls."""

    def start(self) -> None:
        """Answer calls from now on."""
        self._watch.start()
        self._doorkeeper.start()
        self._server.start()
        self._local.start()
        for name in ("", SERVICE.full_name):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.ready = True

    def stop(self, grace: float) -> None:
        """Refuse new calls, give those under way `grace` seconds to end, close every session and leave no thread behind."""
        self.ready = False
        self._health.enter_graceful_shutdown()
        self._local.drain()  # before clients hear over gRPC that this server stops
        stopped = self._server.stop(grace)
        self._streams.drain()
        self._local.stop(grace)
        stopped.wait()
        self._watch.stop()
        self._doorkeeper.stop()
        self._turns.close()  # or a turn that comes later would look for a thread that is not there any more
        self._admission.close()
        self._tenants.close_all()
        self._threads.shutdown()

    def pages(self) -> list[Route]:
        """What the HTTP port offers beside health: metrics to admins, and to everybody a console of what they may see."""
        return [metrics_route(self.registry), *Console(self._view_of).routes()]

    def _view_of(self, token: str) -> View:
        whose = self.credentials.of_token(token.encode(errors="replace"))
        return View(self._tenants.view(whose), self._measured if whose.admin else None)

    def _end_refused(self) -> None:
        """End what goes on for clients whose credential was taken back."""
        self._streams.end_refused(self.credentials.still_let_in)
        self._local.end_refused()

    def _open_sessions(self) -> Sessions:
        return Sessions(self._config.session_idle_seconds, self._streams.session_ended, self._events, self._tracing.opened)

    def _open_service(self, database: AnyDatabase, sessions: Sessions, tenant: str) -> "TenantCalls":
        step = self._measured.stepped
        service = KvdbService(database, sessions, self._streams, self._turns, self._inflight, self._config, step)
        service.admission, service.queries = self._admission, self._queries
        service.offer_memory(self._local.path, self._local.identity)
        shared = SharedEngine(database, sessions, self._turns, self._admission, step, self._seen.failed, self._queries, tenant)
        return TenantCalls(service, shared)

    def _waited(self, seconds: float) -> None:
        """The call of this thread has waited for the engine."""
        self._measured.waited(seconds)
        self._tracing.waited(seconds)

    def _tenant_of(self, context: grpc.ServicerContext) -> str:
        with suppress(Unauthenticated):
            return self.credentials.of_call(context).tenant
        return ""

    def _calls(self) -> grpc.GenericRpcHandler:
        tenants, of_call = self._tenants, self.credentials.of_call
        unary = UnaryCalls(self._threads.submit, self._turns, self._admission, self._inflight)
        work_of = partial(decode_calls.work_of, session=tenants.peek)
        return handlers(lambda context: tenants.service(of_call(context)).service, unary, work_of)

    def _listen(self, config: ServerConfig, tls: grpc.ServerCredentials | None) -> str:
        unix = config.host.startswith("unix:")
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = config.host if unix else f"{host}:{config.port}"
        try:
            if not unix:
                _try_port(config.host, config.port)
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, tls)
        except (OSError, RuntimeError) as error:
            self._threads.shutdown()
            self._local.stop(0.0)
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"the server cannot listen on {address} ({why}); choose another, or port 0 for a free one"
            ) from None
        scheme = "kvdb" if tls is None else "kvdbs"
        return f"kvdb+unix://{config.host.removeprefix('unix:')}" if unix else f"{scheme}://{host}:{port}"


def _try_port(host: str, port: int) -> None:
    """Raises OSError where nobody can listen there. gRPC would say so too, with a line of its own on stderr and no reason."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(address)


def run(config: Config) -> int:
    """Serve a database of this process until SIGTERM or SIGINT, then drain; the exit status. Raises ConfigError.

    Raises ConfigError too for ports that others may reach and that ask nobody who they are. Prints one line when clients may
    come. A second signal ends the process at once. For the main thread.
    """
    if warning := check_exposure(config):
        print(f"kvdb serve: {warning}", file=sys.stderr, flush=True)  # noqa: T201
    keep_freed_memory()
    cpu.use(config.cpu)
    if config.optimizer.calibrate_at_start:
        _calibrate(config.optimizer.machine_file)
    told = Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: told.set())
    with Database(for_tenants(config)) as database:
        database.events.add(open_log(config.log))
        server = Server(database, config.server)
        http = open_http(config, lambda: server.ready, server.pages(), server.credentials, ssl_context(config.server))
        server.start()
        print(f"kvdb {__version__} ready on {server.target}", flush=True)  # noqa: T201
        if http is not None:
            http.start()
            print(f"kvdb metrics on {http.url}/metrics\nkvdb console on {http.url}/ui/", flush=True)  # noqa: T201
        gc.freeze()  # what the process begins with stays, and need not be looked through again
        database.events.tell(Kind.STARTED, target=server.target, version=__version__)
        while not told.wait(LOOK_SECONDS):
            pass
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        database.events.tell(Kind.DRAINING, seconds=config.server.drain_seconds)
        end_within(config.server.drain_seconds + END_SECONDS)
        server.stop(config.server.drain_seconds)
        if http is not None:
            http.stop()
        database.events.tell(Kind.STOPPED)
    return 0


def end_within(seconds: float) -> None:
    """End the process after that time, whatever it still computes: a call that nobody waits for can only be ended so."""

    def end() -> None:
        print(f"kvdb serve ends with calls under way, {seconds:g} s after it was told to stop", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _calibrate(setting: str) -> None:
    """Measure the machine if its numbers are wanted and missing; numbers that cannot be stored are measured again at the next
    start."""
    path = profile.path_of(setting)
    if path is None or profile.load(setting).measured:
        return
    try:
        found = calibrate()
        profile.write(path, found.machine, kernels=found.kernels)
        said = f"kept in {path}"
    except KvdbError as error:
        said = str(error)
    print(f"kvdb measured this machine, {said}", file=sys.stderr, flush=True)  # noqa: T201
