"""Who may see what in the console."""

from collections.abc import Callable
from typing import NamedTuple

from kvdb.server.metrics.calls import CallMetrics
from kvdb.server.tenancy.tenants import AnyDatabase


class View(NamedTuple):
    """What somebody may see. calls: what is measured of the calls of all, None for whoever may not know."""

    database: AnyDatabase
    calls: CallMetrics | None = None


ViewOf = Callable[[str], View]
"""What the bearer of a credential, "" for none, may see. Raises Unauthenticated for one who may see nothing."""


def credential_of(authorization: str) -> str:
    """What an Authorization header bears; "" for none or another scheme."""
    scheme, _, credential = authorization.partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else ""
