"""A session on a server, for asyncio."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from kvdb.aio.awaited import awaited
from kvdb.client.session import Session
from kvdb.types import ModelSpec, Placed, Tokens


class AsyncSession:
    """What `kvdb.Session` is, with methods to be awaited; arguments, results and errors are the same.

    Calls on one session take turns, in the order in which they were begun. A cancelled task breaks its call off on the server
    too; what it did of it, `stats` says.
    """

    def __init__(self, inner: Session) -> None:
        """inner: of the connection of an event loop, so that it is of no use elsewhere."""
        self.inner = inner

    @property
    def spec(self) -> ModelSpec:
        return self.inner.spec

    @property
    def reused(self) -> int:
        """See `kvdb.Session.reused`."""
        return self.inner.reused

    @property
    def start(self) -> int:
        """See `kvdb.Session.start`."""
        return self.inner.start

    @property
    def error_max(self) -> float:
        """See `kvdb.Session.error_max`."""
        return self.inner.error_max

    @property
    def tokens(self) -> Tokens:
        """See `kvdb.Session.tokens`; int32 `[n]`."""
        return self.inner.tokens

    @property
    def layout(self) -> tuple[Placed, ...]:
        """See `kvdb.Session.layout`."""
        return self.inner.layout

    update = awaited(Session.update)
    update_indexer = awaited(Session.update_indexer)
    read_indexer = awaited(Session.read_indexer)
    state = awaited(Session.state)
    put_state = awaited(Session.put_state)
    attend_selected = awaited(Session.attend_selected)
    put_sinks = awaited(Session.put_sinks)
    plan_recompute = awaited(Session.plan_recompute)
    overlay = awaited(Session.overlay)
    deviation = awaited(Session.deviation)
    attention = awaited(Session.attention)
    attend = awaited(Session.attend)
    truncate = awaited(Session.truncate)
    read = awaited(Session.read)
    fork = awaited(Session.fork, lambda twin: AsyncSession(twin))  # noqa: PLW0108  # the class is not there yet
    store = awaited(Session.store)
    explain = awaited(Session.explain)
    stats = awaited(Session.stats)
    close = awaited(Session.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


def inner_session(session: Any) -> Any:
    """The session of an argument as the inner client takes it."""
    return session.inner if isinstance(session, AsyncSession) else session


def inner_sessions(sessions: Any) -> Any:
    """The sessions of an argument as the inner client takes them; it says what is wrong with anything else."""
    return [inner_session(session) for session in sessions] if isinstance(sessions, Iterable) else sessions
