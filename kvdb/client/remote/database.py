"""A database on a server."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

import kvdb.client.remote.messages as messages
import kvdb.deadlines as deadlines
import kvdb.forks as forks
import kvdb.validate as validate
from kvdb.client.remote.connection import Connection
from kvdb.client.remote.imports import RemoteImport
from kvdb.client.remote.open_sessions import OpenSessions
from kvdb.client.remote.reading import read
from kvdb.client.remote.session import RemoteSession
from kvdb.client.remote.shared_memory.calls import SharedCalls
from kvdb.client.remote.shared_memory.imports import SharedImport
from kvdb.client.transport import ImportTransport, SessionTransport
from kvdb.config import Timeouts, Tls
from kvdb.errors import KvdbError, Unavailable
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.call import WireCall
from kvdb.rpc.calls import OF_METHOD
from kvdb.rpc.status import error_of
from kvdb.types import (
    DEFAULT_RETENTION,
    Array,
    CallTimings,
    ContextStatistics,
    KeysValues,
    ModelSpec,
    PromptPart,
    Retention,
    Tokens,
)
from query_optimizer.query_options import QueryOptions

# size: one noun, a database on a server and its calls


class RemoteDatabase:
    """The calls of `kvdb.database.Database` over gRPC, with the same arguments and errors. Thread-safe. Those that only ask are
    made from the table of calls; here stand those that open something, or are several.

    Names, token ids and layer numbers are checked here, as an embedded database checks them. The server checks everything else;
    its errors arrive as the same classes with the same messages.
    """

    if TYPE_CHECKING:

        def __getattr__(self, method: str) -> Callable[..., Any]: ...

    def __init__(
        self,
        target: str,
        token: str = "",
        timeouts: Timeouts | None = None,
        tls: Tls | None = None,
        connect: type[Connection] = Connection,
    ) -> None:
        """target: `kvdb://host:port`, `kvdbs://host:port` or `kvdb+unix:///path`. token: the server's token. timeouts: how long
        calls may take. tls: the certificates for `kvdbs://`. connect: how its calls wait.

        Raises InvalidArgument, ConfigError, Unavailable or Unauthenticated.
        """
        self._connect = partial(connect, target, token, timeouts or Timeouts(), tls or Tls())
        self._connection: Connection | None = self._connect()
        self._connecting = Lock()
        self._sessions = OpenSessions()
        forks.in_child(self, RemoteDatabase._forked)

    def begin_import(
        self,
        spec: ModelSpec,
        tokens: Tokens,
        name: str,
        base: int | None = None,
        retention: Retention = DEFAULT_RETENTION,
        salt: str = "",
    ) -> ImportTransport:
        """Start storing a context; see `kvdb.database.Database.begin_import`, whose errors it raises, and MessageTooLarge."""
        connection = self._connected()
        begin = messages.import_begin(spec, tokens, name, base, retention, salt)
        connection.check_size("the list of tokens", len(begin.tokens))
        return SharedImport.open(connection.lanes, spec, begin) or RemoteImport(connection, spec, begin)

    def create_session(
        self,
        spec: ModelSpec,
        tokens: Tokens,
        error_max: float | None = None,
        salt: str = "",
        *,
        share: bool = False,
        label: str = "",
        expected_tokens: int | None = None,
    ) -> SessionTransport:
        """A session on the server; see `kvdb.database.Database.create_session`, whose errors it raises, and MessageTooLarge."""
        connection = self._connected()
        ids = validate.token_ids(tokens)
        connection.check_size("the list of tokens", ids.nbytes)
        request = messages.create_session(spec, ids, error_max, salt, share=share, label=label, expected_tokens=expected_tokens)
        reply = connection.call(request)
        return RemoteSession(connection, spec, reply, ids, self._sessions)

    def create_session_of_parts(
        self,
        spec: ModelSpec,
        parts: Sequence[PromptPart],
        error_max: float | None = None,
        salt: str = "",
        *,
        expected_tokens: int | None = None,
    ) -> SessionTransport:
        """A session over several parts; see `kvdb.database.Database.create_session_of_parts`, whose errors it raises, and
        MessageTooLarge."""
        connection = self._connected()
        laid = pb.Parts(parts=map(codec.to_part, parts))
        connection.check_size("the list of parts", laid.ByteSize())
        request = messages.create_session(spec, None, error_max, salt, expected_tokens=expected_tokens)
        request.parts.CopyFrom(laid)
        reply: pb.SessionReply = connection.call(request)
        return RemoteSession(connection, spec, reply, codec.from_tokens(reply.tokens), self._sessions)

    def attend(
        self,
        sessions: Sequence[object],
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        options: QueryOptions,
        starts: Sequence[int] | None = None,
    ) -> Array:
        """One step of several sessions; see `kvdb.database.Database.attend`, whose errors it raises, and
        MessageTooLarge."""
        connection = self._connected()
        ids = self._ids(sessions, layer)
        validate.starts(starts, len(ids))
        if ids and (out := self._together(sessions).attend_together(ids, layer, (q, k, v), options, starts)) is not None:
            return out
        connection.check_size(f"the step of {len(ids)} sessions", q.nbytes + k.nbytes + v.nbytes)
        request = messages.attend_together(ids, layer, (q, k, v), options, starts)
        return codec.from_array(connection.call(request).out).copy()

    def step(self, *_: object) -> None:
        """Nothing: the caller's arrays travel as numpy has them, by `attend`."""

    def attention(self, sessions: Sequence[object], layer: int, q: Array, options: QueryOptions) -> Array:
        """A query of several sessions; see `kvdb.database.Database.attention`, and `attend`."""
        connection = self._connected()
        ids = self._ids(sessions, layer)
        if ids and (out := self._together(sessions).attention_together(ids, layer, q, options)) is not None:
            return out
        connection.check_size(f"q of {len(ids)} sessions", q.nbytes)
        request = messages.attention_together(ids, layer, q, options)
        return codec.from_array(connection.call(request).out).copy()

    def token_ids(self, name: str) -> Tokens:
        """The ids of a context's tokens, in as many replies as they need. Raises NotFound."""
        connection, pieces, start = self._connected(), list[Tokens](), 0
        while not pieces or len(pieces[-1]):
            request = pb.ContextTokensRequest(name=name, start=start)
            pieces.append(codec.from_tokens(connection.call(request).tokens))
            start += len(pieces[-1])
        return np.concatenate(pieces)

    def read(
        self,
        name: str,
        layers: Sequence[int],
        start: int,
        stop: int | None = None,
        out: Sequence[KeysValues] | None = None,
        *,
        indexer: bool = False,
    ) -> list[KeysValues]:
        """KV of a context; see `kvdb.database.Database.read`, whose errors it raises."""
        info = self.get(name)
        for number in layers:
            validate.place(info.spec, number, indexer=indexer)
        end = info.tokens if stop is None else stop
        request = pb.ReadContextRequest(context=name, layers=layers, start=start, stop=end, indexer=indexer)
        return read(self._connected(), info.spec, request, out)

    def statistics(self, name: str) -> ContextStatistics:
        """Raises NotFound."""
        told: ContextStatistics = self._ask(OF_METHOD["statistics"], name)
        return replace(told, name=name)

    @property
    def last_timings(self) -> CallTimings | None:
        """What the server measured of this thread's last unary call."""
        return None if self._connection is None else self._connection.last_timings

    def close(self) -> None:
        """Close every session opened here, and the channel. Closing twice does nothing."""
        connection = self._connection
        if connection is None:
            self._sessions.close()  # there are none
            return
        with deadlines.unbounded(), deadlines.within(connection.limits.group("attend")):
            first = self._sessions.close()
        if first:
            connection.close()

    def create_sessions(
        self,
        spec: ModelSpec,
        prompts: Sequence[Tokens],
        error_max: float | None = None,
        salt: str = "",
        *,
        expected_tokens: int | None = None,
    ) -> Sequence[SessionTransport]:
        """A session for each prompt; see `kvdb.database.Database.create_sessions`, whose errors it raises."""
        connection = self._connected()
        ids = []
        for i, tokens in enumerate(prompts):
            with validate.numbered(i):
                ids.append(validate.token_ids(tokens))
        each = partial(messages.create_session, spec, error_max=error_max, salt=salt, expected_tokens=expected_tokens)
        request = pb.CreateSessionsRequest(sessions=map(each, ids))
        connection.check_size(f"the prompts of {len(ids)} sessions", request.ByteSize())
        reply: pb.CreateSessionsReply = connection.call(request)
        return [
            RemoteSession(connection, spec, created, tokens, self._sessions)
            for created, tokens in zip(reply.sessions, ids, strict=True)
        ]

    def update_sessions(
        self, sessions: Sequence[object], layer: int, k: Array, v: Array, starts: Sequence[int] | None = None
    ) -> list[KvdbError | None]:
        """See `kvdb.database.Database.update_sessions`, whose errors it raises, and MessageTooLarge."""
        connection, own = self._connected(), self._own(sessions)
        validate.starts(starts, len(own))
        for what, array in (("k", k), ("v", v)):
            validate.stacked(what, array, len(own))
        ids = [one.id for one in own]
        reply = own[0].shared.update_together(ids, layer, k, v, starts) if own else None
        if reply is None:
            connection.check_size(f"the update of {len(own)} sessions", k.nbytes + v.nbytes)
            request = pb.UpdateSessionsRequest(session_ids=ids, layer=layer, starts=starts)
            codec.put_array(request.k, k)
            codec.put_array(request.v, v)
            reply = connection.call(request)
        return [_error(status) for status in reply.statuses]

    def truncate_sessions(self, sessions: Sequence[object], tokens: Sequence[int]) -> list[KvdbError | None]:
        """See `kvdb.database.Database.truncate_sessions`, whose errors it raises."""
        connection, own = self._connected(), self._own(sessions)
        request = pb.TruncateSessionsRequest(session_ids=[one.id for one in own], tokens=tokens)
        reply: pb.TruncateSessionsReply = connection.call(request)
        for session, kept, done in zip(own, tokens, reply.sessions, strict=True):
            if not done.status.error:
                session.truncated(done.session, kept)
        return [_error(done.status) for done in reply.sessions]

    def close_sessions(self, sessions: Sequence[object]) -> None:
        """Close each session; where their server is gone, they went with it. Raises InvalidArgument."""
        connection = self._connected()
        ids = [session.id for session in self._own(sessions) if session.forget()]
        with suppress(Unavailable):
            connection.call(pb.CloseSessionsRequest(session_ids=ids))

    def _ask(self, call: WireCall, *values: Any, **named: Any) -> Any:
        """What the server's database returns. Raises what that raises, and MessageTooLarge."""
        connection = self._connected()
        request = call.request(*values, **named)
        connection.check_size(f"the request of {call.method}", request.ByteSize())
        return call.value(connection.call(request))

    def _ids(self, sessions: Sequence[object], layer: int) -> list[str]:
        """The ids of open sessions of this database. Raises InvalidArgument, SpecMismatch, SessionClosed or LayerError."""
        own = self._own(sessions)
        for i, session in enumerate(own):
            with validate.numbered(i):
                validate.same_spec(session.spec, own[0].spec)
                session.check_layer(layer)
        return [session.id for session in own]

    def _own(self, sessions: Sequence[object]) -> list[RemoteSession]:
        own = [one for one in sessions if isinstance(one, RemoteSession) and one.connection is self._connection]
        validate.together(sessions, own)
        return own

    def _together(self, sessions: Sequence[object]) -> SharedCalls:
        """The way through shared memory for calls on several sessions of one model."""
        first = sessions[0]
        assert isinstance(first, RemoteSession)
        return first.shared

    def _connected(self) -> Connection:
        self._sessions.check_open()
        return self._connection or self._reconnected()

    def _reconnected(self) -> Connection:
        """The connection of this process, a child. Raises Unavailable, Unauthenticated or ForkedProcess."""
        with self._connecting:
            self._connection = self._connection or self._connect()
            return self._connection

    def _forked(self) -> None:
        """Have a connection of the child's own, from its first call on."""
        forks.keep(self._connection)
        self._connection, self._connecting = None, Lock()


def _asking(call: WireCall) -> Callable[..., Any]:
    """The method that asks for a call."""

    def ask(self: RemoteDatabase, *values: Any, **named: Any) -> Any:
        return self._ask(call, *values, **named)

    return ask


for _call in OF_METHOD.values():
    if not hasattr(RemoteDatabase, _call.method):
        setattr(RemoteDatabase, _call.method, _asking(_call))


def _error(status: pb.ItemStatus) -> KvdbError | None:
    return error_of(status.error, status.text) if status.error else None
