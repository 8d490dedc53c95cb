"""A database on a server, for asyncio."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack
from weakref import WeakSet

import kvdb.client.remote.messages as messages
import kvdb.deadlines as deadlines
import kvdb.validate as validate
from kvdb.client.arrays import like, to_numpy, token_ids
from kvdb.client.imports import checked_pair
from kvdb.client.query_keywords import QueryKeywords, query_options
from kvdb.client.remote.aio.connection import AsyncConnection
from kvdb.client.remote.aio.imports import importing
from kvdb.client.remote.aio.session import AsyncSession
from kvdb.client.retention_keywords import RetentionKeywords
from kvdb.config import Timeouts, Tls
from kvdb.errors import LayerError
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.types import ContextInfo, ModelSpec, PrefixMatch, Retention
from query_optimizer.query_options import QueryOptions, checked_error_max


async def connect(
    target: str, *, token: str = "", timeout: float | Timeouts | None = None, tls: Tls | None = None
) -> "AsyncClient":
    """Open a database on a server; arguments and errors are those of `kvdb.connect`. It belongs to the running event loop."""
    certificates = Tls.of_environment() if tls is None else tls
    return AsyncClient(await AsyncConnection.open(str(target), token, Timeouts.of(timeout), certificates))


class AsyncClient:
    """What `kvdb.Client` is on a server, with methods to be awaited; arguments, results and errors are the same. It has the calls
    of an engine at work. A cancelled task breaks its call off on the server too. Close it, or use it in an `async with`."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._sessions: WeakSet[AsyncSession] = WeakSet()

    async def contexts(
        self,
        prefix: str = "",
        *,
        metadata: Mapping[str, Any] | None = None,
        limit: int | None = None,
        after: str = "",
        timeout: float | None = None,
    ) -> list[ContextInfo]:
        """What is known of the stored contexts; see `kvdb.Client.contexts`."""
        page = validate.text("prefix", prefix), validate.limit(limit), validate.text("after", after)
        request = messages.list_contexts(*page, validate.metadata({} if metadata is None else metadata))
        with deadlines.within(timeout):
            reply = await self._connection.call(self._connection.stub.ListContexts, request)
        return [codec.from_info(info) for info in reply.contexts]

    async def get(self, name: str, *, timeout: float | None = None) -> ContextInfo:
        """What is known of a context; see `kvdb.Client.get`."""
        with deadlines.within(timeout):
            request = pb.GetContextRequest(name=validate.name(name))
            return codec.from_info(await self._connection.call(self._connection.stub.GetContext, request))

    async def match(self, spec: ModelSpec, tokens: Any, *, salt: str = "", timeout: float | None = None) -> PrefixMatch:
        """See `kvdb.Client.match`."""
        with deadlines.within(timeout):
            request = messages.match(validate.spec(spec), token_ids(tokens), salt)
            reply = await self._connection.call(self._connection.stub.MatchPrefix, request)
        return PrefixMatch(int(reply.tokens), int(reply.resident))

    async def drop(self, *names: str, timeout: float | None = None) -> None:
        """See `kvdb.Client.drop`."""
        request = pb.DropContextsRequest(names=pb.Names(names=[validate.name(name) for name in names]))
        if names:
            with deadlines.within(timeout):
                await self._connection.call(self._connection.stub.DropContexts, request)

    async def import_context(
        self,
        spec: ModelSpec,
        tokens: Any,
        kv: Iterable[tuple[Any, Any]],
        *,
        name: str,
        salt: str = "",
        timeout: float | None = None,
        **retention: Unpack[RetentionKeywords],
    ) -> ContextInfo:
        """See `kvdb.Client.import_context`; it takes no sample of queries."""
        connection, ids = self._connection, validate.token_ids(token_ids(tokens))
        begin = messages.import_begin(validate.spec(spec), ids, name, None, Retention(**retention), salt)
        connection.check_size("the list of tokens", len(begin.tokens))
        with deadlines.within(timeout):
            async with importing(connection, spec) as writer:
                start = (await writer.exchange(pb.ImportRequest(begin=begin), "attend")).begun.start
                layers = 0
                for given in validate.iterable("kv", kv, "one pair (k, v) for each layer"):
                    pair = checked_pair(given, layers, len(ids))
                    if start < len(ids):
                        await writer.write(layers, *(array[:, start:] for array in pair))
                    layers += 1
                if layers != spec.layers:
                    raise LayerError(f"kv holds {layers} layers; expected {spec.layers}, those of {spec.name}")
                committed = await writer.exchange(pb.ImportRequest(commit=pb.ImportCommit()), "store")
                return codec.from_info(committed.committed)

    async def create_session(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        error_max: float | None = None,
        salt: str = "",
        share: bool = False,
        label: str = "",
        timeout: float | None = None,
    ) -> AsyncSession:
        """See `kvdb.Client.create_session`, of tokens."""
        connection, ids = self._connection, validate.token_ids(token_ids(tokens))
        connection.check_size("the list of tokens", ids.nbytes)
        named = validate.flag("share", share), validate.text("label", label)
        request = messages.create_session(
            validate.spec(spec), ids, checked_error_max(error_max), salt, share=named[0], label=named[1]
        )
        with deadlines.within(timeout):
            reply = await connection.call(connection.stub.CreateSession, request)
        return AsyncSession(connection, spec, reply, ids, timeout, self._sessions)

    async def attend(  # noqa: PLR0913  # each is a keyword that a caller may leave out
        self,
        sessions: Iterable[AsyncSession],
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        starts: Sequence[int] | None = None,
        timeout: float | None = None,
        options: QueryOptions | None = None,
        **keywords: Unpack[QueryKeywords],
    ) -> Any:
        """See `kvdb.Client.attend`."""
        query, ids = query_options(options, **keywords), self._ids(sessions, layer)
        validate.starts(starts, len(ids))
        arrays = to_numpy(q), to_numpy(k), to_numpy(v)
        self._connection.check_size(f"the step of {len(ids)} sessions", sum(array.nbytes for array in arrays))
        request = messages.attend_together(ids, layer, arrays, query, starts)
        with deadlines.within(timeout):
            reply = await self._connection.call(self._connection.stub.AttendTogether, request)
        return like(codec.from_array(reply.out).copy(), q)

    async def attention(
        self,
        sessions: Iterable[AsyncSession],
        layer: int,
        q: Any,
        *,
        timeout: float | None = None,
        options: QueryOptions | None = None,
        **keywords: Unpack[QueryKeywords],
    ) -> Any:
        """See `kvdb.Client.attention`."""
        query, ids, array = query_options(options, **keywords), self._ids(sessions, layer), to_numpy(q)
        self._connection.check_size(f"q of {len(ids)} sessions", array.nbytes)
        with deadlines.within(timeout):
            request = messages.attention_together(ids, layer, array, query)
            reply = await self._connection.call(self._connection.stub.AttentionTogether, request)
        return like(codec.from_array(reply.out).copy(), q)

    async def close(self) -> None:
        """Close every session opened here, and the channel. Closing twice does nothing."""
        if self._connection.closed:
            return
        with deadlines.unbounded(), deadlines.within(self._connection.limits.group("attend")):
            await asyncio.gather(*[session.close() for session in list(self._sessions)])
        await self._connection.close()

    def _ids(self, sessions: Iterable[AsyncSession], layer: int) -> list[str]:
        """The ids of open sessions of this database. Raises InvalidArgument, SpecMismatch, SessionClosed or LayerError."""
        given = list(validate.iterable("sessions", sessions, "what create_session returns"))
        own = [one for one in given if isinstance(one, AsyncSession) and one.connection is self._connection]
        validate.together(given, own)
        for i, session in enumerate(own):
            with validate.numbered(i):
                validate.same_spec(session.spec, own[0].spec)
                session.check_layer(layer)
        return [session.id for session in own]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
