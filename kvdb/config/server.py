"""The settings of `kvdb serve`: how it answers, what it writes, and the port for those who watch it."""

import os
from dataclasses import dataclass, field

from kvdb.config.checks import check_least, check_types
from kvdb.config.storage import MIB
from kvdb.errors import ConfigError

LOCAL_SOCKET_BYTES_MAX = 100
FORMATS = ("human", "json")
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class ServerConfig:
    """How `kvdb serve` answers.

    host: an address, or unix:/path. port: 0 picks a free one. token: what clients must send, "" for no check.
    tokens_file: a file with the hashes of the tokens of tenants, which `kvdb token new` writes, "" for none. workers: how many
    Decode streams and imports may be open at once; one client may have three quarters of them. message_bytes_max: the largest
    gRPC message in bytes. request_bytes_max: the largest request of a stream, which comes in several messages.
    inflight_bytes_max: the total bytes of requests that may wait to be answered; one client may have three quarters of them.
    session_idle_seconds: how long a session may go unused before it is closed. stream_idle_seconds: how long a Decode stream or
    an import may say nothing before it is ended; sessions stay. requests_max: how many attends, updates and pieces of imports
    are carried out at a time; queue_max: how many more may wait, of which those of the tenant that was served the fewest tokens
    go first. drain_seconds: how long SIGTERM waits for calls under way.
    reflection: whether the server describes its own methods over gRPC. traces: whether each call is a span of OpenTelemetry.
    tls_cert, tls_key: files in PEM with the certificate of the server, behind which stand those that signed it, and its key; with
    them all its ports speak TLS. tls_client_ca: a file with the certificates that sign those of clients; without one of them
    nobody is let in. tls_tenants: whether the common name of such a certificate is the tenant of a call that brings no token.
    local_socket: the path of the Unix socket through which clients of the same host share memory with the server,
    "auto" for one in no folder, which only this user may use, "" for none.
    """

    host: str = "127.0.0.1"
    port: int = 7700
    token: str = field(default="", repr=False)
    tokens_file: str = ""
    workers: int = 256
    message_bytes_max: int = 4 * MIB
    request_bytes_max: int = 64 * MIB
    inflight_bytes_max: int = 512 * MIB
    session_idle_seconds: float = 3600.0
    stream_idle_seconds: float = 300.0
    requests_max: int = 64
    queue_max: int = 1024
    drain_seconds: float = 10.0
    reflection: bool = False
    traces: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tls_tenants: bool = False
    local_socket: str = "auto"

    def __post_init__(self) -> None:
        check_types(self, "server")
        self._check_tls()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"server.port is {self.port}; expected 0 to 65535")
        check_least(self, "server", workers=1, requests_max=1, queue_max=0, message_bytes_max=MIB, drain_seconds=0)
        if self.request_bytes_max < self.message_bytes_max:
            raise ConfigError(
                f"server.request_bytes_max is {self.request_bytes_max}; expected at least server.message_bytes_max, which is "
                f"{self.message_bytes_max}"
            )
        least = -(-self.request_bytes_max * 4 // 3)
        if self.inflight_bytes_max < least:
            raise ConfigError(
                f"server.inflight_bytes_max is {self.inflight_bytes_max}; expected at least {least}, so that three quarters of "
                "it, which one client may have, hold a request of server.request_bytes_max"
            )
        for name in ("session_idle_seconds", "stream_idle_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"server.{name} is {getattr(self, name)}; expected a positive number of seconds")
        if len(self.local_socket.encode()) > LOCAL_SOCKET_BYTES_MAX:
            raise ConfigError(
                f"server.local_socket has {len(self.local_socket.encode())} bytes; expected at most {LOCAL_SOCKET_BYTES_MAX}, "
                "which is what the system takes as the path of a socket"
            )

    def _check_tls(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_client_ca and not self.tls_cert):
            raise ConfigError("server.tls_cert and server.tls_key go together, and server.tls_client_ca needs both")
        if self.tls_tenants and not self.tls_client_ca:
            raise ConfigError("server.tls_tenants needs server.tls_client_ca, whose certificates name the tenants")


@dataclass(frozen=True)
class LogConfig:
    """What `kvdb serve` writes to stderr, a line for each thing that happens.

    format: human or json. level: the least that is written: debug, info, warning or error.
    """

    format: str = "human"
    level: str = "info"

    def __post_init__(self) -> None:
        check_types(self, "log")
        for name, known in (("format", FORMATS), ("level", LEVELS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"log.{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")


@dataclass(frozen=True)
class MetricsConfig:
    """The HTTP port of `kvdb serve`, with its health, its metrics and its console. Nothing can be changed through it.

    host: an address. port: None for no HTTP, 0 picks a free one. Other machines may reach it only where the server asks for a
    token, which this port asks for too, but for the two answers about health. host_names: under which
    names it may be asked where there is no token, beside addresses, localhost and `host`.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    host_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "metrics")
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ConfigError(f"metrics.port is {self.port}; expected 0 to 65535")


def quiet_grpc() -> None:
    """Keep gRPC's own lines from the terminal, as errors say what they say. gRPC reads this once, when it is imported; what the
    user has set stays."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
