"""The settings of what each tenant of a server may have."""

from dataclasses import dataclass, fields

from kvdb.config.checks import check_types
from kvdb.errors import ConfigError


@dataclass(frozen=True)
class QuotasConfig:
    """What each tenant may have, alike for all; 0 for no limit. Whoever runs the server has none.

    contexts_max: stored contexts, with imports under way. bytes_max: bytes of KV of these, wherever they lie, as they were handed
    in. cpu_bytes_max: those of them that lie in main memory, with what its open sessions hold. disk_bytes_max: those that lie on
    disk, as in a store, or because they were offloaded; what the server itself moves there for room is counted and not refused.
    sessions_max: open sessions. requests_max: calls that use the engine, or wait for it. import_bytes_per_second: how fast
    imports go on; a faster one waits.
    """

    contexts_max: int = 0
    bytes_max: int = 0
    cpu_bytes_max: int = 0
    disk_bytes_max: int = 0
    sessions_max: int = 0
    requests_max: int = 0
    import_bytes_per_second: int = 0

    def __post_init__(self) -> None:
        check_types(self, "quotas")
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ConfigError(f"quotas.{field.name} is {getattr(self, field.name)}; expected 0, for no limit, or more")
