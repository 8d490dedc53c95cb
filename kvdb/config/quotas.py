"""The settings of what each tenant of a server may have."""

from dataclasses import dataclass, fields, replace

from kvdb.config.checks import check_least, check_types
from kvdb.config.texts import parsed
from kvdb.errors import ConfigError


@dataclass(frozen=True)
class QuotasConfig:
    """What each tenant may have; 0 for no limit. Whoever runs the server has none.

    contexts_max: stored contexts, with imports under way. bytes_max: bytes of KV of these, wherever they lie, as they were handed
    in. cpu_bytes_max: those of them that lie in main memory, with what its open sessions hold. disk_bytes_max: those that lie on
    disk, as in a store, or because they were offloaded; what the server itself moves there for room is counted and not refused.
    sessions_max: open sessions. requests_max: calls that use the engine, or wait for it. import_bytes_per_second: how fast
    imports go on; a faster one waits. tenants: what single tenants may have instead, such as `search.contexts_max=100` or
    `search.bytes_max=8GiB`.
    """

    contexts_max: int = 0
    bytes_max: int = 0
    cpu_bytes_max: int = 0
    disk_bytes_max: int = 0
    sessions_max: int = 0
    requests_max: int = 0
    import_bytes_per_second: int = 0
    tenants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "quotas")
        check_least(self, "quotas", **dict.fromkeys(_LIMITS, 0))
        for tenant in self.exceptions:
            self.of(tenant)

    @property
    def exceptions(self) -> dict[str, dict[str, int]]:
        """What `tenants` says: the limits of each tenant that has others than all. Raises ConfigError."""
        found: dict[str, dict[str, int]] = {}
        for said in self.tenants:
            setting, _, number = said.partition("=")
            tenant, _, name = setting.strip().rpartition(".")
            limit = parsed(f"quotas.{name}", int, number, typed=False) if tenant and name in _LIMITS else None
            if not isinstance(limit, int):
                known = ", ".join(_LIMITS)
                raise ConfigError(f"quotas.tenants has {said!r}; expected TENANT.QUOTA=NUMBER, where QUOTA is one of {known}")
            found.setdefault(tenant, {})[name] = limit
        return found

    def of(self, tenant: str) -> "QuotasConfig":
        """What this tenant may have."""
        return replace(self, tenants=(), **self.exceptions.get(tenant, {}))


_LIMITS = tuple(field.name for field in fields(QuotasConfig) if field.name != "tenants")
