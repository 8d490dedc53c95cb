"""`kvdb.connect`: embedded or remote, one interface."""

from collections.abc import Sequence
from pathlib import Path

from kvdb.client.client import Client
from kvdb.config import Config
from kvdb.database import Database
from kvdb.errors import InvalidArgument, Unsupported
from query_optimizer.extend import PlacedRule

REMOTE = ("kvdb://", "kvdb+unix://")


def connect(
    target: str | Path | None = None,
    *,
    token: str = "",
    config: Config | None = None,
    rules: Sequence[PlacedRule] = (),
) -> Client:
    """Open a database: in this process and in memory without a target, on a server with `kvdb://host:port`.

    token: what the server wants of its clients. config: settings of an embedded database. rules: of its optimizer, beside its
    own, each with a name, `before` (the rule that is asked next) and `when(facts, part, heads)`. Raises InvalidArgument for a
    target that is neither or a rule that cannot be added, Unavailable for a server that does not answer, Unauthenticated for a
    wrong token, ConfigError.
    """
    if target is None:
        return Client(Database(config, rules))
    if str(target).startswith(REMOTE):
        if config is not None or rules:
            raise InvalidArgument(
                "a remote database has its own configuration and rules; start the server with them: kvdb serve --config FILE"
            )
        from kvdb.client.remote import RemoteDatabase  # so that an embedded database needs no gRPC

        return Client(RemoteDatabase(str(target), token))
    if "://" in str(target):
        raise InvalidArgument(
            f"{target!s} names no database; expected kvdb://host:port or kvdb+unix:///path, or nothing for one in memory"
        )
    raise Unsupported(f"{target!s} would be a durable store on disk, which kvdb cannot keep yet; connect() opens one in memory")
