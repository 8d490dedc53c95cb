"""Calls on many sessions of a server."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import kvdb.client.remote.messages as messages
import kvdb.validate as validate
from kvdb.client.remote.connection import Connection
from kvdb.client.remote.open_sessions import OpenSessions
from kvdb.client.remote.session import RemoteSession
from kvdb.errors import KvdbError, Unavailable
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.status import error_of
from kvdb.types import Array, ModelSpec, Tokens


class RemoteManySessions(ABC):
    """Each call is one of the server's. Thread-safe."""

    _sessions: OpenSessions

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

    @abstractmethod
    def _connected(self) -> Connection:
        """Raises Unavailable for a closed database."""

    @abstractmethod
    def _own(self, sessions: Sequence[object]) -> list[RemoteSession]:
        """Raises InvalidArgument for a session of another database, or one that is given twice."""


def _error(status: pb.ItemStatus) -> KvdbError | None:
    return error_of(status.error, status.text) if status.error else None
