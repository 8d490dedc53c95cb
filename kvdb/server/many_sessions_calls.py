"""The calls on many sessions, each of which is done or not by itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import grpc

import kvdb.deadlines as deadlines
import kvdb.validate as validate
from kvdb.errors import InvalidArgument, KvdbError
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
        first = starts_in(request)
        ended = each(self._sessions, request.session_ids, lambda i, session: session.update(request.layer, k[i], v[i], first[i]))
        return pb.UpdateSessionsReply(statuses=map(status_of, ended))

    def truncate_sessions(self, request: pb.TruncateSessionsRequest, _context: grpc.ServicerContext) -> pb.TruncateSessionsReply:
        check_counts(request.tokens, len(request.session_ids))
        replies = [pb.TruncatedSession() for _ in request.session_ids]

        def truncate(i: int, session: SessionState) -> None:
            replies[i].session.CopyFrom(truncated(session, request.tokens[i]))

        for reply, error in zip(replies, each(self._sessions, request.session_ids, truncate), strict=True):
            reply.status.CopyFrom(status_of(error))
        return pb.TruncateSessionsReply(sessions=replies)

    def close_sessions(self, request: pb.CloseSessionsRequest, _context: grpc.ServicerContext) -> pb.CloseSessionsReply:
        for name in request.session_ids:
            self._sessions.close(name)
        return pb.CloseSessionsReply()


def each(sessions: Sessions, names: Sequence[str], act: Callable[[int, SessionState], None]) -> list[KvdbError | None]:
    """Do something with each session; the errors, None for each that was done."""

    def one(i: int) -> None:
        with sessions.borrow(names[i]) as session:
            act(i, session)

    return [attempted(lambda i=i: one(i)) for i in range(len(names))]  # type: ignore[misc]


def starts_in(request: pb.UpdateSessionsRequest) -> Sequence[int | None]:
    """The position of each session's first token, None for none. Raises InvalidArgument."""
    starts, count = list(request.starts) or None, len(request.session_ids)
    validate.starts(starts, count)
    return starts or [None] * count


def truncated(session: SessionState, tokens: int) -> pb.TruncateReply:
    """Truncate a session, and say what it is then."""
    session.truncate(tokens)
    return pb.TruncateReply(reused=session.reused, start=session.start, layout=map(codec.to_placed, session.layout))


def statuses_within(ended: Sequence[KvdbError | None], nbytes_max: int) -> pb.UpdateSessionsReply:
    """What became of each session, in so many bytes, to which the texts of errors are cut. Raises InvalidArgument where there is
    no room without them."""
    statuses = [status_of(error) for error in ended]
    reply = pb.UpdateSessionsReply(statuses=statuses)
    over = reply.ByteSize() - nbytes_max
    if over <= 0:
        return reply
    room = max(0, nbytes_max // len(statuses) - STATUS_BYTES)
    reply = pb.UpdateSessionsReply(statuses=[pb.ItemStatus(error=one.error, text=_cut(one.text, room)) for one in statuses])
    if reply.ByteSize() > nbytes_max:
        raise InvalidArgument(f"the statuses of {len(statuses)} sessions need {reply.ByteSize():,} bytes, not {nbytes_max:,}")
    return reply


def _cut(text: str, nbytes_max: int) -> str:
    return text.encode(errors="replace")[:nbytes_max].decode(errors="ignore")


STATUS_BYTES = 64
"""The room that a status takes beside the text of its error."""


def status_of(error: KvdbError | None) -> pb.ItemStatus:
    return pb.ItemStatus() if error is None else pb.ItemStatus(error=class_of(error), text=str(error))
