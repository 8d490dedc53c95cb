"""The one frozen tree of settings, and the one place that reads files and the environment for them."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import indexes.registry as registry
from kvdb.errors import ConfigError

MIB = 1 << 20
BLOCK_SIZE_MAX = 1024
OWN_CACHE = "own"
"""As optimizer.machine_file: the user's cache folder."""
GPU_DEVICE = re.compile("cuda(:[0-9]{1,3})?|interpreter")
GPU_FORMATS = ("", "float8", "int8")
T = TypeVar("T")


@dataclass(frozen=True)
class StorageConfig:
    """block_size: tokens of one block. cpu_bytes_max: budget of the CPU tier, None for no limit.
    arena_bytes: how much memory the tier asks the system for at a time. disk_path: a folder for segments that are offloaded, ""
    for none; several databases may share it. disk_bytes_max: what a database may keep there, None for no limit.
    gpu_bytes_max: of the GPU's memory for copies of blocks, 0 for no GPU; block tables and results come beside it.
    gpu_device: "cuda", "cuda:1", or "interpreter" for tests without one. gpu_format: "" for the model's dtype, "float8" or
    "int8". gpu_slab_bytes: what blocks of one shape may take of the budget, 0 for all that is left of it when they are first
    wanted."""

    block_size: int = 64
    cpu_bytes_max: int | None = None
    arena_bytes: int = 64 * MIB
    disk_path: str = ""
    disk_bytes_max: int | None = None
    gpu_bytes_max: int = 0
    gpu_device: str = "cuda"
    gpu_format: str = ""
    gpu_slab_bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= BLOCK_SIZE_MAX:
            raise ConfigError(f"storage.block_size is {self.block_size}; expected 1 to {BLOCK_SIZE_MAX} tokens")
        if self.cpu_bytes_max is not None and self.cpu_bytes_max < 1:
            raise ConfigError(f"storage.cpu_bytes_max is {self.cpu_bytes_max}; expected a positive number of bytes, or none")
        if self.disk_bytes_max is not None and self.disk_bytes_max < 1:
            raise ConfigError(f"storage.disk_bytes_max is {self.disk_bytes_max}; expected a positive number of bytes, or none")
        if self.arena_bytes < MIB:
            raise ConfigError(f"storage.arena_bytes is {self.arena_bytes}; expected at least {MIB} bytes")
        for name in ("gpu_bytes_max", "gpu_slab_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"storage.{name} is {getattr(self, name)}; expected 0 or more bytes")
        if not GPU_DEVICE.fullmatch(self.gpu_device):
            raise ConfigError(f"storage.gpu_device is {self.gpu_device!r}; expected cuda, cuda:0 and so on, or interpreter")
        if self.gpu_format not in GPU_FORMATS:
            raise ConfigError(f'storage.gpu_format is {self.gpu_format!r}; expected float8, int8, or "" for the model\'s dtype')


@dataclass(frozen=True)
class OptimizerConfig:
    """short_context_tokens: contexts up to this length are always read whole. rules_off: names of rules not to apply.
    machine_file: where the numbers that `kvdb calibrate` measures are kept, "own" for the user's cache folder, "" for no file
    and so the numbers of a usual machine. calibrate_at_start: whether `kvdb serve` measures them where they are missing."""

    short_context_tokens: int = 4096
    rules_off: tuple[str, ...] = ()
    machine_file: str = OWN_CACHE
    calibrate_at_start: bool = True


@dataclass(frozen=True)
class WindowConfig:
    """The tokens that every query attends exactly. sink_tokens: the first. recent_tokens: the last of what is stored; a session's
    own tokens are read whole until they are many."""

    sink_tokens: int = 64
    recent_tokens: int = 256

    def __post_init__(self) -> None:
        if self.sink_tokens < 0 or self.recent_tokens < 0:
            raise ConfigError(
                f"window.sink_tokens is {self.sink_tokens} and window.recent_tokens {self.recent_tokens}; expected 0 or more"
            )


@dataclass(frozen=True)
class IndexConfig:
    """at_store: kinds of index that are built over everything that is stored. on_demand: the kind that is built when a query
    first asks for a retrieval that nothing can answer, "" for none. segment_tokens_min: shorter segments are read whole.
    tail_tokens: a session's own tokens are indexed by so many at a time, 0 for never. threads: how many build at once.
    sample_queries: how many queries of each layer and head a session keeps for the indexes of what it stores.
    automatic: whether indexes are built when queries show that they will pay. opened_often: of a segment that so many sessions
    were opened over, as many queries again are expected. bytes_max: what all indexes may keep in memory, None for no limit."""

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
    """host: an address, or unix:/path. port: 0 picks a free one. token: what clients must send, "" for no check.
    workers: how many Decode streams and imports may be open at once. message_bytes_max: of one gRPC message.
    session_idle_seconds: after which a session nobody uses is closed. drain_seconds: how long SIGTERM waits for calls."""

    host: str = "127.0.0.1"
    port: int = 7700
    token: str = field(default="", repr=False)
    workers: int = 256
    message_bytes_max: int = 64 * MIB
    session_idle_seconds: float = 3600.0
    drain_seconds: float = 10.0
    reflection: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"server.port is {self.port}; expected 0 to 65535")
        if self.workers < 1:
            raise ConfigError(f"server.workers is {self.workers}; expected at least 1")
        if self.message_bytes_max < MIB:
            raise ConfigError(f"server.message_bytes_max is {self.message_bytes_max}; expected at least {MIB} bytes")
        if self.session_idle_seconds <= 0 or self.drain_seconds < 0:
            raise ConfigError("server.session_idle_seconds must be positive and server.drain_seconds not negative")


@dataclass(frozen=True)
class Config:
    """Everything that can be set. In a TOML file each part is a table: [storage], [optimizer], [window], [indexes],
    [server]."""

    storage: StorageConfig = StorageConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    window: WindowConfig = WindowConfig()
    indexes: IndexConfig = IndexConfig()
    server: ServerConfig = ServerConfig()


def load(path: str | Path | None = None) -> Config:
    """The defaults, then the TOML file at `path`, then KVDB_TOKEN for server.token.

    Raises ConfigError for a file that cannot be read, an unknown name or a wrong type.
    """
    config = Config()
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"configuration file {path} is not TOML: {error}") from None
        config = _merge(config, values, "")
    if token := os.environ.get("KVDB_TOKEN"):
        config = replace(config, server=replace(config.server, token=token))
    return config


def _merge(node: T, values: Mapping[str, Any], where: str) -> T:
    assert is_dataclass(node) and not isinstance(node, type)
    known = {f.name: getattr(node, f.name) for f in fields(node)}
    changes = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where}{name} is no setting; expected one of {', '.join(sorted(known))}")
        if is_dataclass(known[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}{name} is {value!r}; expected a table [{where}{name}]")
            changes[name] = _merge(known[name], value, f"{where}{name}.")
        else:
            changes[name] = _checked(value, known[name], f"{where}{name}")
    return replace(node, **changes)


def _checked(value: Any, default: Any, where: str) -> Any:
    """`value` in the type of `default`; a setting whose default is None holds a number."""
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    kind: type | tuple[type, ...] = (int, float) if isinstance(default, float) else int if default is None else type(default)
    if not isinstance(value, kind) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise ConfigError(f"{where} is {value!r}; expected a value like {default!r}")
    return value
