"""Settings: one frozen tree, with a table for each part of kvdb."""

from kvdb.config.query import ERROR_MAX, OWN_CACHE, CpuConfig, IndexConfig, OptimizerConfig, WindowConfig
from kvdb.config.server import LogConfig, MetricsConfig, ServerConfig, quiet_grpc
from kvdb.config.sources import Loaded, load, secrets, settings, trace, variable
from kvdb.config.storage import GPU_DEVICE, MIB, StorageConfig
from kvdb.config.timeouts import Timeouts
from kvdb.config.tls import Tls
from kvdb.config.tree import Config, checked

__all__ = [
    "ERROR_MAX",
    "GPU_DEVICE",
    "MIB",
    "OWN_CACHE",
    "Config",
    "CpuConfig",
    "IndexConfig",
    "Loaded",
    "LogConfig",
    "MetricsConfig",
    "OptimizerConfig",
    "ServerConfig",
    "StorageConfig",
    "Timeouts",
    "Tls",
    "WindowConfig",
    "checked",
    "load",
    "quiet_grpc",
    "secrets",
    "settings",
    "trace",
    "variable",
]
