"""Who may see what in the console."""

import hmac
from collections.abc import Callable

from kvdb.database import Database
from kvdb.errors import Unauthenticated

ViewOf = Callable[[str], Database]
"""The database as the bearer of a credential, "" for none, may see it. Raises Unauthenticated for one who may not."""


def view_by_token(database: Database, token: str) -> ViewOf:
    """Everything for whoever has the server's token, and for everybody where it is "", which only a server has that nobody else
    reaches."""

    def view(credential: str) -> Database:
        if token and not hmac.compare_digest(credential.encode(errors="replace"), token.encode()):
            raise Unauthenticated("this server asks for its token" if not credential else "this is not the server's token")
        return database

    return view


def credential_of(authorization: str) -> str:
    """What an Authorization header bears; "" for none or another scheme."""
    scheme, _, credential = authorization.partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else ""
