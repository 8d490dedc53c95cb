"""The one frozen tree of settings."""

from dataclasses import dataclass, field
from typing import get_type_hints

from kvdb.config.query import CpuConfig, IndexConfig, OptimizerConfig, WindowConfig
from kvdb.config.quotas import QuotasConfig
from kvdb.config.server import LogConfig, MetricsConfig, ServerConfig
from kvdb.config.storage import StorageConfig
from kvdb.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """Everything that can be set. In a TOML file each field is a table: [storage], [cpu], [optimizer] and so on."""

    storage: StorageConfig = field(default_factory=StorageConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    indexes: IndexConfig = field(default_factory=IndexConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    quotas: QuotasConfig = field(default_factory=QuotasConfig)
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
