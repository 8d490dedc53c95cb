"""The one frozen tree of settings, and the one place that reads files and the environment for them."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from kvdb.config.log import LogConfig
from kvdb.config.metrics import MetricsConfig
from kvdb.config.query import CpuConfig, IndexConfig, OptimizerConfig, WindowConfig
from kvdb.config.server import ServerConfig
from kvdb.config.storage import StorageConfig
from kvdb.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """Everything that can be set. In a TOML file each field is a table: [storage], [cpu], [optimizer] and so on."""

    storage: StorageConfig = field(default_factory=StorageConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    indexes: IndexConfig = field(default_factory=IndexConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ConfigError(f"{name} is {value!r}; expected a {kind.__name__}")


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
