"""The calls on many sessions, each of which is done or not by itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import grpc

import kvdb.deadlines as deadlines
import kvdb.validate as validate
from kvdb.errors import KvdbError
from kvdb.operations.many_sessions import attempted, check_counts
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.status import class_of
from kvdb.server.session_registry import Sessions
from kvdb.session.state import SessionState


class ManySessionsCalls(ABC):
    """Calls of the service that create, update, truncate and close many sessions; the service sets what they work on."""

    _sessions: Sessions

    @abstractmethod
    def create_session(self, request: pb.CreateSessionRequest, context: grpc.ServicerContext) -> pb.SessionReply: ...

    def create_sessions(self, request: pb.CreateSessionsRequest, context: grpc.ServicerContext) -> pb.CreateSessionsReply:
        with ExitStack() as undo:
            created = []
            for i, one in enumerate(deadlines.each(request.sessions)):
                with validate.numbered(i):
                    created.append(self.create_session(one, context))
                undo.callback(self._sessions.close, created[-1].session_id)
            undo.pop_all()
        return pb.CreateSessionsReply(sessions=created)

    def update_sessions(self, request: pb.UpdateSessionsRequest, _context: grpc.ServicerContext) -> pb.UpdateSessionsReply:
        count, k, v = len(request.session_ids), codec.from_array(request.k), codec.from_array(request.v)
        for what, array in (("k", k), ("v", v)):
            validate.stacked(what, array, count)
        starts = list(request.starts) or None
        validate.starts(starts, count)
        first: Sequence[int | None] = starts or [None] * count
        ended = self._each(request.session_ids, lambda i, session: session.update(request.layer, k[i], v[i], first[i]))
        return pb.UpdateSessionsReply(statuses=map(_status, ended))

    def truncate_sessions(self, request: pb.TruncateSessionsRequest, _context: grpc.ServicerContext) -> pb.TruncateSessionsReply:
        check_counts(request.tokens, len(request.session_ids))
        replies = [pb.TruncatedSession() for _ in request.session_ids]

        def truncate(i: int, session: SessionState) -> None:
            replies[i].session.CopyFrom(truncated(session, request.tokens[i]))

        for reply, error in zip(replies, self._each(request.session_ids, truncate), strict=True):
            reply.status.CopyFrom(_status(error))
        return pb.TruncateSessionsReply(sessions=replies)

    def close_sessions(self, request: pb.CloseSessionsRequest, _context: grpc.ServicerContext) -> pb.CloseSessionsReply:
        for name in request.session_ids:
            self._sessions.close(name)
        return pb.CloseSessionsReply()

    def _each(self, names: Sequence[str], act: Callable[[int, SessionState], None]) -> list[KvdbError | None]:
        """Do something with each session; the errors, None for each that was done."""

        def one(i: int) -> None:
            with self._sessions.borrow(names[i]) as session:
                act(i, session)

        return [attempted(lambda i=i: one(i)) for i in range(len(names))]  # type: ignore[misc]


def truncated(session: SessionState, tokens: int) -> pb.TruncateReply:
    """Truncate a session, and say what it is then."""
    session.truncate(tokens)
    return pb.TruncateReply(reused=session.reused, start=session.start, layout=map(codec.to_placed, session.layout))


def _status(error: KvdbError | None) -> pb.ItemStatus:
    return pb.ItemStatus() if error is None else pb.ItemStatus(error=class_of(error), text=str(error))
