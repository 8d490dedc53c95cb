"""A database on a server."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

import kvdb.client.remote.messages as messages
import kvdb.deadlines as deadlines
import kvdb.forks as forks
import kvdb.validate as validate
from kvdb.client.remote.connection import Connection
from kvdb.client.remote.imports import RemoteImport
from kvdb.client.remote.many_sessions import RemoteManySessions
from kvdb.client.remote.open_sessions import OpenSessions
from kvdb.client.remote.reading import read
from kvdb.client.remote.session import RemoteSession
from kvdb.client.remote.shared_memory.calls import SharedCalls
from kvdb.client.remote.shared_memory.imports import SharedImport
from kvdb.client.remote.store import RemoteStore
from kvdb.config import Timeouts, Tls
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.types import (
    DEFAULT_RETENTION,
    Array,
    CallTimings,
    ContextInfo,
    ContextStatistics,
    ContextUpdate,
    Dropped,
    IndexInfo,
    KeysValues,
    ModelSpec,
    PrefixMatch,
    PromptPart,
    Retention,
    TierStats,
    Tokens,
)
from query_optimizer.query_options import QueryOptions

# size: a database at the other end of a wire, with every call of one


class RemoteDatabase(RemoteManySessions, RemoteStore):
    """`kvdb.client.transport.Transport` over gRPC. Thread-safe.

    Names, token ids and layer numbers are checked here, as an embedded database checks them. The server checks everything else;
    its errors arrive as the same classes with the same messages.
    """

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
    ) -> RemoteImport | SharedImport:
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
    ) -> RemoteSession:
        """A session on the server; see `kvdb.database.Database.create_session`, whose errors it raises, and MessageTooLarge."""
        connection = self._connected()
        ids = validate.token_ids(tokens)
        connection.check_size("the list of tokens", ids.nbytes)
        request = messages.create_session(spec, ids, error_max, salt, share=share, label=label, expected_tokens=expected_tokens)
        reply = connection.call(connection.stub.CreateSession, request)
        return RemoteSession(connection, spec, reply, ids, self._sessions)

    def create_session_of_parts(
        self,
        spec: ModelSpec,
        parts: Sequence[PromptPart],
        error_max: float | None = None,
        salt: str = "",
        *,
        expected_tokens: int | None = None,
    ) -> RemoteSession:
        """A session over several parts; see `kvdb.database.Database.create_session_of_parts`, whose errors it raises, and
        MessageTooLarge."""
        connection = self._connected()
        laid = pb.Parts(parts=map(codec.to_part, parts))
        connection.check_size("the list of parts", laid.ByteSize())
        request = messages.create_session(spec, None, error_max, salt, expected_tokens=expected_tokens)
        request.parts.CopyFrom(laid)
        reply: pb.SessionReply = connection.call(connection.stub.CreateSession, request)
        return RemoteSession(connection, spec, reply, codec.from_tokens(reply.tokens), self._sessions)

    def attend_together(
        self,
        sessions: Sequence[object],
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        options: QueryOptions,
        starts: Sequence[int] | None = None,
    ) -> Array:
        """One step of several sessions; see `kvdb.database.Database.attend_together`, whose errors it raises, and
        MessageTooLarge."""
        connection = self._connected()
        ids = self._ids(sessions, layer)
        validate.starts(starts, len(ids))
        if ids and (out := self._together(sessions).attend_together(ids, layer, (q, k, v), options, starts)) is not None:
            return out
        connection.check_size(f"the step of {len(ids)} sessions", q.nbytes + k.nbytes + v.nbytes)
        request = messages.attend_together(ids, layer, (q, k, v), options, starts)
        return codec.from_array(connection.call(connection.stub.AttendTogether, request).out).copy()

    def step_together(self, *_: object) -> None:
        """Nothing: the caller's arrays travel as numpy has them, by `attend_together`."""

    def attention_together(self, sessions: Sequence[object], layer: int, q: Array, options: QueryOptions) -> Array:
        """A query of several sessions; see `kvdb.database.Database.attention_together`, and `attend_together`."""
        connection = self._connected()
        ids = self._ids(sessions, layer)
        if ids and (out := self._together(sessions).attention_together(ids, layer, q, options)) is not None:
            return out
        connection.check_size(f"q of {len(ids)} sessions", q.nbytes)
        request = messages.attention_together(ids, layer, q, options)
        return codec.from_array(connection.call(connection.stub.AttentionTogether, request).out).copy()

    def contexts(self, prefix: str, limit: int | None, after: str, metadata: Mapping[str, Any]) -> list[ContextInfo]:
        """The stored contexts; see `kvdb.database.Database.contexts`."""
        connection = self._connected()
        reply = connection.call(connection.stub.ListContexts, messages.list_contexts(prefix, limit, after, metadata))
        return [codec.from_info(info) for info in reply.contexts]

    def get(self, name: str) -> ContextInfo:
        """What is stored under a name. Raises NotFound."""
        connection = self._connected()
        return codec.from_info(connection.call(connection.stub.GetContext, pb.GetContextRequest(name=name)))

    def token_ids(self, name: str) -> Tokens:
        """The ids of a context's tokens, in as many replies as they need. Raises NotFound."""
        connection, pieces, start = self._connected(), list[Tokens](), 0
        while not pieces or len(pieces[-1]):
            request = pb.ContextTokensRequest(name=name, start=start)
            pieces.append(codec.from_tokens(connection.call(connection.stub.ContextTokens, request).tokens))
            start += len(pieces[-1])
        return np.concatenate(pieces)

    def read(
        self, name: str, layers: Sequence[int], start: int, stop: int | None = None, out: Sequence[KeysValues] | None = None
    ) -> list[KeysValues]:
        """KV of a context; see `kvdb.operations.reading.ReadOperations.read`, whose errors it raises."""
        info = self.get(name)
        for number in layers:
            validate.layer(info.spec, number)
        end = info.tokens if stop is None else stop
        request = pb.ReadContextRequest(context=name, layers=layers, start=start, stop=end)
        return read(self._connected(), info.spec, request, out)

    def match(self, spec: ModelSpec, tokens: Tokens, salt: str = "") -> PrefixMatch:
        """How much of a prompt is stored on the server."""
        connection = self._connected()
        reply = connection.call(connection.stub.MatchPrefix, messages.match(spec, tokens, salt))
        return PrefixMatch(int(reply.tokens), int(reply.resident))

    def tiers(self) -> list[TierStats]:
        """What each tier of the server holds."""
        connection = self._connected()
        return [codec.from_tier(stats) for stats in connection.call(connection.stub.ListTiers, pb.ListTiersRequest()).tiers]

    def update_context(self, name: str, change: ContextUpdate) -> ContextInfo:
        """Change how long a context is kept, what is noted of it, or its name; see `kvdb.database.Database.update_context`."""
        connection = self._connected()
        return codec.from_info(connection.call(connection.stub.UpdateContext, codec.to_update(name, change)))

    def drop(self, *names: str) -> None:
        """Forget contexts, all or none. Raises NotFound, and MessageTooLarge."""
        self._drop(pb.DropContextsRequest(names=pb.Names(names=names)))

    def drop_all(self, prefix: str, metadata: Mapping[str, Any]) -> Dropped:
        """Forget contexts that no session stands on; see `kvdb.database.Database.drop_all`."""
        wanted = pb.Matching(prefix=prefix, metadata=json.dumps(dict(metadata)))
        reply = self._drop(pb.DropContextsRequest(matching=wanted))
        return Dropped(tuple(reply.dropped), tuple(reply.in_use))

    def offload(self, name: str) -> int:
        """Move a context to the server's disk; see `kvdb.database.Database.offload`, whose errors it raises."""
        connection = self._connected()
        reply: pb.OffloadContextReply = connection.call(connection.stub.OffloadContext, pb.OffloadContextRequest(name=name))
        return int(reply.nbytes)

    def build_index(self, name: str, kind: str, wait: bool) -> list[IndexInfo]:
        """Build an index on the server; see `kvdb.database.Database.build_index`, whose errors it raises."""
        connection = self._connected()
        request = pb.BuildIndexRequest(name=name, kind=validate.kind(kind), wait=bool(wait))
        return _infos(connection.call(connection.stub.BuildIndex, request))

    def indexes(self, name: str) -> list[IndexInfo]:
        """The indexes over a context, built and under way. Raises NotFound."""
        connection = self._connected()
        return _infos(connection.call(connection.stub.ListIndexes, pb.ListIndexesRequest(name=name)))

    def verify(self, name: str) -> int:
        """Check every index of a context on the server. Raises NotFound or IntegrityError."""
        connection = self._connected()
        request = pb.VerifyIndexesRequest(name=name)
        reply: pb.VerifyIndexesReply = connection.call(connection.stub.VerifyIndexes, request)
        return reply.indexes

    def statistics(self, name: str) -> ContextStatistics:
        """Raises NotFound."""
        connection = self._connected()
        request = pb.ContextStatisticsRequest(name=name)
        return codec.from_statistics(name, connection.call(connection.stub.ContextStatistics, request))

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

    def _drop(self, request: pb.DropContextsRequest) -> pb.DropContextsReply:
        connection = self._connected()
        connection.check_size("the list of names", request.ByteSize())
        reply: pb.DropContextsReply = connection.call(connection.stub.DropContexts, request)
        return reply

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


def _infos(reply: pb.IndexesReply) -> list[IndexInfo]:
    return [codec.from_index_info(info) for info in reply.indexes]
