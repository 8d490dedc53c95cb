"""A database on a server."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
from kvdb.client.remote.open_sessions import OpenSessions
from kvdb.client.remote.reading import read
from kvdb.client.remote.session import RemoteSession
from kvdb.client.remote.shared_memory.calls import SharedCalls
from kvdb.client.remote.shared_memory.imports import SharedImport
from kvdb.config import Timeouts, Tls
from kvdb.errors import KvdbError, Unavailable
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.plans import from_plan
from kvdb.rpc.query_options import put_query_options
from kvdb.rpc.status import error_of
from kvdb.types import (
    DEFAULT_RETENTION,
    Array,
    BackedUp,
    CallTimings,
    Checked,
    ContextInfo,
    ContextStatistics,
    ContextUpdate,
    DatabaseStatus,
    Dropped,
    IndexInfo,
    KeysValues,
    ModelSpec,
    PrefixMatch,
    PromptPart,
    Retention,
    SessionInfo,
    Space,
    TierStats,
    Tokens,
    UnknownFile,
)
from query_optimizer.plan import Plan
from query_optimizer.query_options import QueryOptions

# size: one noun, a database on a server and its calls


class RemoteDatabase:
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

    def create_sessions(
        self,
        spec: ModelSpec,
        prompts: Sequence[Tokens],
        error_max: float | None = None,
        salt: str = "",
        *,
        expected_tokens: int | None = None,
    ) -> list[RemoteSession]:
        """A session for each prompt; see `kvdb.operations.many_sessions.ManySessions`, whose errors it raises."""
        connection = self._connected()
        ids = []
        for i, tokens in enumerate(prompts):
            with validate.numbered(i):
                ids.append(validate.token_ids(tokens))
        each = partial(messages.create_session, spec, error_max=error_max, salt=salt, expected_tokens=expected_tokens)
        request = pb.CreateSessionsRequest(sessions=map(each, ids))
        connection.check_size(f"the prompts of {len(ids)} sessions", request.ByteSize())
        reply: pb.CreateSessionsReply = connection.call(connection.stub.CreateSessions, request)
        return [
            RemoteSession(connection, spec, created, tokens, self._sessions)
            for created, tokens in zip(reply.sessions, ids, strict=True)
        ]

    def update_together(
        self, sessions: Sequence[object], layer: int, k: Array, v: Array, starts: Sequence[int] | None = None
    ) -> list[KvdbError | None]:
        """See `kvdb.operations.many_sessions.ManySessions`, whose errors it raises, and MessageTooLarge."""
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
            reply = connection.call(connection.stub.UpdateSessions, request)
        return [_error(status) for status in reply.statuses]

    def truncate_together(self, sessions: Sequence[object], tokens: Sequence[int]) -> list[KvdbError | None]:
        """See `kvdb.operations.many_sessions.ManySessions`, whose errors it raises."""
        connection, own = self._connected(), self._own(sessions)
        request = pb.TruncateSessionsRequest(session_ids=[one.id for one in own], tokens=tokens)
        reply: pb.TruncateSessionsReply = connection.call(connection.stub.TruncateSessions, request)
        for session, kept, done in zip(own, tokens, reply.sessions, strict=True):
            if not done.status.error:
                session.truncated(done.session, kept)
        return [_error(done.status) for done in reply.sessions]

    def close_together(self, sessions: Sequence[object]) -> None:
        """Close each session; where their server is gone, they went with it. Raises InvalidArgument."""
        connection = self._connected()
        ids = [session.id for session in self._own(sessions) if session.forget()]
        with suppress(Unavailable):
            connection.call(connection.stub.CloseSessions, pb.CloseSessionsRequest(session_ids=ids))

    def check(self, name: str) -> Checked:
        """Check a context on the server; see `kvdb.database.Database.check`, whose errors it raises."""
        connection = self._connected()
        reply: pb.CheckContextReply = connection.call(connection.stub.CheckContext, pb.CheckContextRequest(name=name))
        return Checked(reply.blocks, reply.nbytes, reply.indexes)

    def check_store(self) -> list[str]:
        """Check the server's store; see `kvdb.database.Database.check_store`, whose errors it raises."""
        connection = self._connected()
        reply: pb.CheckStoreReply = connection.call(connection.stub.CheckStore, pb.CheckStoreRequest())
        return list(reply.damaged)

    def unknown_files(self, remove: bool) -> list[UnknownFile]:
        """Files of the server's store; see `kvdb.database.Database.unknown_files`, whose errors it raises."""
        connection = self._connected()
        reply: pb.UnknownFilesReply = connection.call(connection.stub.UnknownFiles, pb.UnknownFilesRequest(remove=remove))
        return [UnknownFile(file.name, file.nbytes) for file in reply.files]

    def compact(self) -> int:
        """Give space back on the server; see `kvdb.database.Database.compact`, whose errors it raises."""
        connection = self._connected()
        reply: pb.CompactReply = connection.call(connection.stub.Compact, pb.CompactRequest())
        return int(reply.nbytes)

    def status(self) -> DatabaseStatus:
        """How the server is used at the moment; see `kvdb.database.Database.status`."""
        connection = self._connected()
        reply: pb.StatusReply = connection.call(connection.stub.Status, pb.StatusRequest())
        counts = reply.contexts, reply.sessions, dict(reply.indexes), reply.building
        return DatabaseStatus(reply.version, reply.uptime_seconds, *counts, reply.calls, reply.calls_max, reply.calls_waiting)

    def space(self) -> Space:
        """How much space the contexts of the server take; see `kvdb.database.Database.space`."""
        connection = self._connected()
        reply: pb.SpaceReply = connection.call(connection.stub.Space, pb.SpaceRequest())
        return Space(reply.held, reply.reachable)

    def backup(self, folder: str, link: bool) -> BackedUp:
        """Copy the server's store on its machine; see `kvdb.database.Database.backup`, whose errors it raises."""
        connection = self._connected()
        reply: pb.BackupReply = connection.call(connection.stub.Backup, pb.BackupRequest(folder=folder, link=link))
        counts = reply.contexts, reply.copied, reply.reflinked, reply.linked
        return BackedUp(*counts, reply.nbytes, reply.same_file_system)

    def explain(self, name: str, layer: int | None, options: QueryOptions, analyze: bool) -> list[Plan]:
        """The plans of a query behind a context; see `kvdb.database.Database.explain`, whose errors it raises."""
        connection = self._connected()
        request = pb.ExplainContextRequest(name=name, layer=layer, analyze=analyze)
        put_query_options(request, options)
        reply: pb.ExplainContextReply = connection.call(connection.stub.ExplainContext, request)
        return [from_plan(text) for text in reply.plans]

    def sessions(self) -> list[SessionInfo]:
        """The open sessions on the server that have a label."""
        connection = self._connected()
        reply: pb.ListSessionsReply = connection.call(connection.stub.ListSessions, pb.ListSessionsRequest())
        return [SessionInfo(told.label, told.tokens, told.reused, told.queries) for told in reply.sessions]

    def explain_session(self, label: str, layer: int | None, options: QueryOptions, analyze: bool) -> list[Plan]:
        """The plans of a session's next query; see `kvdb.database.Database.explain_session`, whose errors it raises."""
        connection = self._connected()
        request = pb.ExplainSessionRequest(label=label, layer=layer, analyze=analyze)
        put_query_options(request, options)
        reply: pb.ExplainContextReply = connection.call(connection.stub.ExplainSession, request)
        return [from_plan(text) for text in reply.plans]

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


def _error(status: pb.ItemStatus) -> KvdbError | None:
    return error_of(status.error, status.text) if status.error else None
