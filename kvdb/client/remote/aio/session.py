"""A session on a server, for asyncio."""

from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack
from weakref import WeakSet

import kvdb.client.remote.messages as messages
import kvdb.deadlines as deadlines
import kvdb.validate as validate
from kvdb.client.arrays import like, to_numpy, token_ids
from kvdb.client.query_keywords import QueryKeywords, query_options
from kvdb.client.remote.aio.connection import AsyncConnection
from kvdb.client.retention_keywords import RetentionKeywords
from kvdb.errors import SessionClosed, Unavailable
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.types import ContextInfo, ModelSpec, Placed, Retention, SessionStats, Tokens
from query_optimizer.query_options import QueryOptions


class AsyncSession:
    """What `kvdb.Session` is, with methods to be awaited; arguments, results and errors are the same. Calls on one session take
    turns on the server, in the order in which they come there."""

    def __init__(
        self,
        connection: AsyncConnection,
        spec: ModelSpec,
        reply: pb.SessionReply,
        tokens: Tokens,
        timeout: float | None,
        sessions: "WeakSet[AsyncSession]",
    ) -> None:
        """tokens: the ids it was opened with. timeout: how many seconds each call may take that says nothing else. sessions:
        those of the database; this one adds itself."""
        self.spec = spec
        self.connection = connection
        self.id = reply.session_id
        self.reused: int = reply.reused
        self.start: int = reply.start
        self.error_max: float = reply.error_max
        self.layout: tuple[Placed, ...] = tuple(map(codec.from_placed, reply.layout))
        self._tokens = tokens
        self._timeout = timeout
        self._open = True
        self._sessions = sessions
        sessions.add(self)

    @property
    def tokens(self) -> Tokens:
        """A copy of the ids it was opened with, int32 `[n]`; only those that `truncate` kept."""
        return self._tokens.copy()

    async def update(self, layer: int, k: Any, v: Any, *, start: int | None = None, timeout: float | None = None) -> None:
        """See `kvdb.Session.update`; the request is one message, so it raises MessageTooLarge for more tokens than fit."""
        self.check_layer(layer)
        arrays = to_numpy(k), to_numpy(v)
        self.connection.check_size("the update", sum(array.nbytes for array in arrays))
        request = pb.UpdateRequest()
        messages.put_update(request, self.id, layer, arrays, messages.checked_start(start))
        await self._call(self.connection.stub.Update, request, timeout)

    async def attention(
        self,
        layer: int,
        q: Any,
        *,
        timeout: float | None = None,
        options: QueryOptions | None = None,
        **keywords: Unpack[QueryKeywords],
    ) -> Any:
        """See `kvdb.Session.attention`, and MessageTooLarge as for `update`."""
        query, array = query_options(options, **keywords), to_numpy(q)
        self.check_layer(layer)
        self.connection.check_size("q", array.nbytes)
        request = pb.AttentionRequest()
        messages.put_attention(request, self.id, layer, array, query)
        reply = await self._call(self.connection.stub.Attention, request, timeout)
        return like(codec.from_array(reply.out).copy(), q)

    async def attend(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        start: int | None = None,
        timeout: float | None = None,
        options: QueryOptions | None = None,
        **keywords: Unpack[QueryKeywords],
    ) -> Any:
        """See `kvdb.Session.attend`, and MessageTooLarge as for `update`."""
        query, arrays = query_options(options, **keywords), [to_numpy(array) for array in (q, k, v)]
        self.check_layer(layer)
        self.connection.check_size("the step", sum(array.nbytes for array in arrays))
        request = pb.AttendRequest()
        messages.put_attend(request, self.id, layer, arrays, query, messages.checked_start(start))
        reply = await self._call(self.connection.stub.Attend, request, timeout)
        return like(codec.from_array(reply.out).copy(), q)

    async def truncate(self, tokens: int, *, timeout: float | None = None) -> None:
        """See `kvdb.Session.truncate`."""
        kept = validate.position("tokens", tokens)
        request = pb.TruncateRequest(session_id=self.id, tokens=kept)
        reply = await self._call(self.connection.stub.Truncate, request, timeout)
        self.start, self.reused, self._tokens = reply.start, reply.reused, self._tokens[:kept]
        self.layout = tuple(map(codec.from_placed, reply.layout))

    async def fork(self, *, timeout: float | None = None) -> "AsyncSession":
        """See `kvdb.Session.fork`."""
        reply = await self._call(self.connection.stub.Fork, pb.ForkRequest(session_id=self.id), timeout)
        return AsyncSession(self.connection, self.spec, reply, self._tokens, self._timeout, self._sessions)

    async def store(
        self,
        name: str,
        tokens: Any = None,
        *,
        chunk: bool = False,
        timeout: float | None = None,
        **retention: Unpack[RetentionKeywords],
    ) -> ContextInfo:
        """See `kvdb.Client.store`."""
        ids = None if tokens is None else token_ids(tokens)
        request = messages.store(self.id, name, ids, validate.flag("chunk", chunk), Retention(**retention))
        self.connection.check_size("the list of tokens", len(request.tokens))
        return codec.from_info(await self._call(self.connection.stub.Store, request, timeout))

    async def stats(self, *, timeout: float | None = None) -> SessionStats:
        """See `kvdb.Session.stats`."""
        return codec.from_stats(await self._call(self.connection.stub.Stats, pb.StatsRequest(session_id=self.id), timeout))

    async def close(self) -> None:
        """Give everything back. Closing twice does nothing, and neither does closing a session whose server is gone."""
        if not self._open:
            return
        self._open = False
        with suppress(Unavailable):
            await self.connection.call(self.connection.stub.CloseSession, pb.CloseSessionRequest(session_id=self.id))

    def check_layer(self, layer: int) -> None:
        """Raises SessionClosed or LayerError."""
        self._check_open()
        validate.layer(self.spec, layer)

    async def _call(self, method: Any, request: object, timeout: float | None = None) -> Any:
        self._check_open()
        with deadlines.within(self._timeout if timeout is None else timeout):
            return await self.connection.call(method, request)

    def _check_open(self) -> None:
        if not self._open:
            raise SessionClosed("the session is closed; open another with create_session")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
