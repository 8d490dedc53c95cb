"""What clients that share memory with the server reach, and what their messages say."""

from collections.abc import Callable
from typing import NamedTuple

from kvdb.errors import KvdbError
from kvdb.events import Origin
from kvdb.server.admission.admission import Admission
from kvdb.server.session_registry import Sessions
from kvdb.server.tenancy.tenants import AnyDatabase
from kvdb.server.tracing import Together
from kvdb.server.turns import Turn, Turns
from query_optimizer.query_options import QueryOptions


class SharedEngine(NamedTuple):
    """What the calls of one tenant's clients go to. stepped: told of each call on sessions which one it was, and the seconds that
    it took. failed: told of each that failed which one it was, and whose. queries: what answers those of several sessions."""

    database: AnyDatabase
    sessions: Sessions
    turns: Turns
    admission: Admission
    stepped: Callable[[str, float], None]
    failed: Callable[[str, Origin, KvdbError], None]
    queries: Together
    tenant: str = ""


class Door(NamedTuple):
    """Who may come in. asks: whether anybody is asked for a token; otherwise clients are of the server's user. engine_of: what a
    token, b"" for none, opens; it raises Unauthenticated."""

    asks: bool
    engine_of: Callable[[bytes], SharedEngine]


class Head(NamedTuple):
    """What the message of a call says. message: its bytes. turn: the sessions it uses."""

    message: bytes
    sessions: tuple[str, ...]
    turn: Turn
    layer: int
    options: QueryOptions
    starts: list[int] | None
