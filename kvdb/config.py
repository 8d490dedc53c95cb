"""The one frozen tree of settings, and the one place that reads files and the environment for them."""

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import indexes.registry as registry
from kvdb.errors import ConfigError

MIB = 1 << 20
BLOCK_SIZE_MAX = 1024
THREADS_MAX = 1024
OWN_CACHE = "own"
"""The value of optimizer.machine_file that means the user's cache folder."""
ERROR_MAX = 0.02
"""How far the output of a layer may be from exact attention where nobody says otherwise."""
GPU_DEVICE = re.compile("cuda(:[0-9]{1,3})?|interpreter")
_STORAGE_BYTES_MIN = {"cpu_bytes_max": 1, "disk_bytes_max": 1, "arena_bytes": MIB, "gpu_bytes_max": 0, "gpu_slab_bytes": 0}
GPU_FORMATS = ("", "float8", "int8")
T = TypeVar("T")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, bool)),
    int: ("an integer", _is_integer),
    int | None: ("an integer, or None", lambda value: value is None or _is_integer(value)),
    float: ("a number", lambda value: _is_integer(value) or (isinstance(value, float) and not math.isnan(value))),
    str: ("text", lambda value: isinstance(value, str)),
    tuple[str, ...]: ("a tuple of text", lambda value: isinstance(value, tuple) and all(isinstance(one, str) for one in value)),
}
"""For each annotation below: its name in messages, and the check of a value."""


def _check_types(settings: object, table: str) -> None:
    """Raises ConfigError where a field of `settings` does not hold what it is annotated with. table: its name in TOML."""
    for name, annotation in get_type_hints(type(settings)).items():
        expected, fits = _TYPES[annotation]
        value = getattr(settings, name)
        if not fits(value):
            raise ConfigError(f"{table}.{name} is {value!r}; expected {expected}")


@dataclass(frozen=True)
class StorageConfig:
    """Where blocks are kept, and how much of it there may be.

    block_size: tokens of one block. cpu_bytes_max: bytes of main memory for blocks and what is kept beside them, None for no
    limit. arena_bytes: the most that is asked of the system at a time. path: the folder of a durable store, which keeps every
    context, "" for a database that keeps nothing. disk_path: a folder for segments that are offloaded, where there is no store,
    "" for none; several databases may share it. disk_bytes_max: bytes that this database may keep there, None for no limit.
    gpu_bytes_max: bytes of the GPU's memory for copies of blocks, 0 for no GPU; block tables and results need some more.
    gpu_device: "cuda", "cuda:1", or "interpreter" for tests without a GPU. gpu_format: "" for the model's dtype, "float8" or
    "int8". gpu_slab_bytes: how much of gpu_bytes_max the blocks of one shape may take, 0 for all that is left when the first of
    them is copied.
    """

    block_size: int = 64
    cpu_bytes_max: int | None = None
    arena_bytes: int = 64 * MIB
    path: str = ""
    disk_path: str = ""
    disk_bytes_max: int | None = None
    gpu_bytes_max: int = 0
    gpu_device: str = "cuda"
    gpu_format: str = ""
    gpu_slab_bytes: int = 0

    def __post_init__(self) -> None:
        _check_types(self, "storage")
        if not 1 <= self.block_size <= BLOCK_SIZE_MAX:
            raise ConfigError(f"storage.block_size is {self.block_size}; expected 1 to {BLOCK_SIZE_MAX} tokens")
        if self.path and self.disk_path:
            raise ConfigError("storage.path and storage.disk_path are both set; expected one: a store holds what is offloaded")
        for name, least in _STORAGE_BYTES_MIN.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"storage.{name} is {value}; expected at least {least} bytes")
        if not GPU_DEVICE.fullmatch(self.gpu_device):
            raise ConfigError(f"storage.gpu_device is {self.gpu_device!r}; expected cuda, cuda:0 and so on, or interpreter")
        if self.gpu_format not in GPU_FORMATS:
            raise ConfigError(f'storage.gpu_format is {self.gpu_format!r}; expected float8, int8, or "" for the model\'s dtype')


@dataclass(frozen=True)
class CpuConfig:
    """How much of the processors may be used.

    threads: how many threads one call may use, the caller's own included, in the whole process: of several databases in it, the
    one that was opened last says so. None for KVDB_THREADS or, without it, the processors of the process's affinity, no more
    than the CPU quota of its container is worth.
    """

    threads: int | None = None

    def __post_init__(self) -> None:
        _check_types(self, "cpu")
        if self.threads is not None and not 1 <= self.threads <= THREADS_MAX:
            raise ConfigError(f"cpu.threads is {self.threads}; expected 1 to {THREADS_MAX}")


@dataclass(frozen=True)
class OptimizerConfig:
    """What decides how a query is answered.

    short_context_tokens: contexts up to this length are always read whole. rules_off: names of rules that are not applied.
    machine_file: the file that keeps what `kvdb calibrate` measures; "own" is one in the user's cache folder, "" is no file, so
    that costs are estimated for a usual machine. calibrate_at_start: whether `kvdb serve` measures the machine where that file
    has no numbers of it. error_max: of queries that name nothing, in sessions that name none; see `kvdb.QueryOptions`.
    """

    short_context_tokens: int = 4096
    rules_off: tuple[str, ...] = ()
    machine_file: str = OWN_CACHE
    calibrate_at_start: bool = True
    error_max: float = ERROR_MAX

    def __post_init__(self) -> None:
        _check_types(self, "optimizer")
        if not 0 <= self.error_max <= 1:
            raise ConfigError(f"optimizer.error_max is {self.error_max}; expected a relative error from 0, which is exact, to 1")


@dataclass(frozen=True)
class WindowConfig:
    """The tokens that every query attends exactly.

    sink_tokens: the number of first tokens. recent_tokens: the number of last tokens of what is stored; the session's own tokens
    are all read until there are many.
    """

    sink_tokens: int = 64
    recent_tokens: int = 256

    def __post_init__(self) -> None:
        _check_types(self, "window")
        if self.sink_tokens < 0 or self.recent_tokens < 0:
            raise ConfigError(
                f"window.sink_tokens is {self.sink_tokens} and window.recent_tokens {self.recent_tokens}; expected 0 or more"
            )


@dataclass(frozen=True)
class IndexConfig:
    """Which indexes are built, and when.

    at_store: kinds of index that are built over everything that is stored. on_demand: the kind that is built when a query asks
    for a retrieval that no index can answer yet, "" for none. segment_tokens_min: segments shorter than this get no index.
    tail_tokens: how many new tokens of a session are indexed at a time, 0 for none. threads: how many indexes are built at once.
    sample_queries: how many queries of each layer and head a session keeps, from which the indexes of what it stores learn.
    automatic: whether indexes are built when queries show that they will pay. opened_often: a segment that this many sessions
    have opened is expected to be queried as much again. bytes_max: bytes of memory for all indexes, None for no limit.
    """

    at_store: tuple[str, ...] = ()
    on_demand: str = "flat"
    segment_tokens_min: int = 2048
    tail_tokens: int = 1024
    threads: int = 1
    sample_queries: int = 64
    automatic: bool = True
    opened_often: int = 3
    bytes_max: int | None = None

    def __post_init__(self) -> None:
        _check_types(self, "indexes")
        for kind in (*self.at_store, *filter(None, [self.on_demand])):
            if kind not in registry.KINDS:
                raise ConfigError(f"indexes names the kind {kind!r}; expected one of {', '.join(registry.KINDS)}")
        if self.segment_tokens_min < 1 or self.threads < 1:
            raise ConfigError("indexes.segment_tokens_min and indexes.threads must be at least 1")
        if self.opened_often < 1 or (self.bytes_max is not None and self.bytes_max < 0):
            raise ConfigError("indexes.opened_often must be at least 1, and indexes.bytes_max not negative, or none")
        if self.tail_tokens < 0 or self.sample_queries < 0:
            raise ConfigError("indexes.tail_tokens and indexes.sample_queries must not be negative")


@dataclass(frozen=True)
class ServerConfig:
    """How `kvdb serve` answers.

    host: an address, or unix:/path. port: 0 picks a free one. token: what clients must send, "" for no check. workers: how many
    Decode streams and imports may be open at once; one client may have three quarters of them. message_bytes_max: the largest
    gRPC message in bytes. request_bytes_max: the largest request of a stream, which comes in several messages.
    inflight_bytes_max: the total bytes of requests that may wait to be answered; one client may have three quarters of them.
    session_idle_seconds: how long a session may go unused before it is closed. stream_idle_seconds: how long a Decode stream or
    an import may say nothing before it is ended; sessions stay. drain_seconds: how long SIGTERM waits for calls under way.
    reflection: whether the server describes its own methods over gRPC.
    """

    host: str = "127.0.0.1"
    port: int = 7700
    token: str = field(default="", repr=False)
    workers: int = 256
    message_bytes_max: int = 4 * MIB
    request_bytes_max: int = 64 * MIB
    inflight_bytes_max: int = 512 * MIB
    session_idle_seconds: float = 3600.0
    stream_idle_seconds: float = 300.0
    drain_seconds: float = 10.0
    reflection: bool = False

    def __post_init__(self) -> None:
        _check_types(self, "server")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"server.port is {self.port}; expected 0 to 65535")
        if self.workers < 1:
            raise ConfigError(f"server.workers is {self.workers}; expected at least 1")
        if self.message_bytes_max < MIB:
            raise ConfigError(f"server.message_bytes_max is {self.message_bytes_max}; expected at least {MIB} bytes")
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
        if self.drain_seconds < 0:
            raise ConfigError(f"server.drain_seconds is {self.drain_seconds}; expected 0 or more seconds")


@dataclass(frozen=True)
class Config:
    """Everything that can be set. In a TOML file each field is a table: [storage], [cpu], [optimizer] and so on."""

    storage: StorageConfig = StorageConfig()
    cpu: CpuConfig = CpuConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    window: WindowConfig = WindowConfig()
    indexes: IndexConfig = IndexConfig()
    server: ServerConfig = ServerConfig()

    def __post_init__(self) -> None:
        for part in fields(self):
            kind, value = type(part.default), getattr(self, part.name)
            if not isinstance(value, kind):
                raise ConfigError(f"{part.name} is {value!r}; expected a {kind.__name__}")


def checked(config: Config | None) -> Config:
    """`config`, or the defaults for None. Raises ConfigError for anything else."""
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise ConfigError(f"config is {config!r}; expected a kvdb.Config, or None for the defaults")
    return config


def load(path: str | Path | None = None) -> Config:
    """The defaults, then the TOML file at `path`, then KVDB_TOKEN for server.token.

    Raises ConfigError for a file that cannot be read, an unknown name or a wrong type.
    """
    config = Config()
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_bytes().decode())
        except OSError as error:
            raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            wrong = f"byte {error.object[error.start]:#04x} at offset {error.start}"
            raise ConfigError(f"configuration file {path} is not UTF-8: {wrong}; TOML is always UTF-8") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"configuration file {path} is not TOML: {error}") from None
        config = _merge(config, values, "")
    if token := os.environ.get("KVDB_TOKEN"):
        config = replace(config, server=replace(config.server, token=token))
    return config


def _merge(node: T, values: Mapping[str, Any], where: str) -> T:
    """`node` with the values of a TOML table. where: the name of the table and a dot, "" for the whole file."""
    assert is_dataclass(node) and not isinstance(node, type)
    settings = {f.name: getattr(node, f.name) for f in fields(node)}
    changes = {}
    for name, value in values.items():
        if name not in settings:
            raise ConfigError(f"{where}{name} is no setting; expected one of {', '.join(sorted(settings))}")
        if is_dataclass(settings[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}{name} is {value!r}; expected a table [{where}{name}]")
            changes[name] = _merge(settings[name], value, f"{where}{name}.")
        else:
            changes[name] = tuple(value) if isinstance(value, list) else value
    return replace(node, **changes)
