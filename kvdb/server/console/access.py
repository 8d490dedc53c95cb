"""Who may see what in the console."""

from collections.abc import Callable

from kvdb.server.tenancy.tenants import AnyDatabase

ViewOf = Callable[[str], AnyDatabase]
"""The database as the bearer of a credential, "" for none, may see it. Raises Unauthenticated for one who may not."""


def credential_of(authorization: str) -> str:
    """What an Authorization header bears; "" for none or another scheme."""
    scheme, _, credential = authorization.partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else ""
