"""A database on a server, for asyncio."""

from types import TracebackType
from typing import Self, cast

from kvdb.aio.awaited import awaited, awaits
from kvdb.aio.context import AsyncContext, inner_parts
from kvdb.aio.session import AsyncSession, inner_session, inner_sessions
from kvdb.client.client import Client
from kvdb.client.remote.aio.carried import carried
from kvdb.config import Timeouts, Tls, quiet_grpc
from kvdb.database import Database
from kvdb.types import CallTimings

SESSIONS = {"sessions": inner_sessions}


async def connect(
    target: str, *, token: str = "", timeout: float | Timeouts | None = None, tls: Tls | None = None
) -> "AsyncClient":
    """Open a database on a server; arguments and errors are those of `kvdb.connect`. It belongs to the running event loop."""
    quiet_grpc()
    from kvdb.client.remote.aio.connection import AsyncConnection  # which imports gRPC
    from kvdb.client.remote.database import RemoteDatabase

    database = await carried(RemoteDatabase, str(target), token, Timeouts.of(timeout), tls, AsyncConnection)
    return AsyncClient(Client(cast("Database", database)))


@awaits(Client)
class AsyncClient:
    """What `kvdb.Client` is on a server, with methods to be awaited; arguments, results and errors are the same. A cancelled task
    breaks its call off on the server too. Close it, or use it in an `async with`."""

    def __init__(self, inner: Client) -> None:
        """inner: of the connection of an event loop, so that it is of no use elsewhere."""
        self.inner = inner

    @property
    def last_timings(self) -> CallTimings | None:
        """What the server measured of this task's last call; see `kvdb.Client.last_timings`."""
        return self.inner.last_timings

    import_context = awaited(Client.import_context, AsyncContext)
    import_chunk = awaited(Client.import_chunk, AsyncContext)
    name_chunk = awaited(Client.name_chunk, lambda found: None if found is None else AsyncContext(found))
    contexts = awaited(Client.contexts, lambda found: [AsyncContext(one) for one in found])
    get = awaited(Client.get, AsyncContext)
    match = awaited(Client.match)
    pin = awaited(Client.pin)
    unpin = awaited(Client.unpin)
    update = awaited(Client.update, AsyncContext)
    rename = awaited(Client.rename, AsyncContext)
    drop = awaited(Client.drop)
    drop_all = awaited(Client.drop_all)
    offload = awaited(Client.offload)

    create_session = awaited(Client.create_session, AsyncSession, given={"parts": inner_parts})
    create_sessions = awaited(Client.create_sessions, lambda opened: [AsyncSession(one) for one in opened])
    update_sessions = awaited(Client.update_sessions, given=SESSIONS)
    truncate_sessions = awaited(Client.truncate_sessions, given=SESSIONS)
    close_sessions = awaited(Client.close_sessions, given=SESSIONS)
    attend = awaited(Client.attend, given=SESSIONS)
    attention = awaited(Client.attention, given=SESSIONS)
    store = awaited(Client.store, AsyncContext, given={"session": inner_session})
    sessions = awaited(Client.sessions)
    explain = awaited(Client.explain)
    explain_session = awaited(Client.explain_session)

    build_index = awaited(Client.build_index)
    indexes = awaited(Client.indexes)
    verify = awaited(Client.verify)
    verify_store = awaited(Client.verify_store)
    unknown_files = awaited(Client.unknown_files)
    backup = awaited(Client.backup)
    compact = awaited(Client.compact)
    space = awaited(Client.space)
    status = awaited(Client.status)
    tiers = awaited(Client.tiers)
    statistics = awaited(Client.statistics)

    close = awaited(Client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
