"""What is done with each of many sessions of one call, and what is said of each."""

from collections.abc import Callable, Sequence

import kvdb.validate as validate
from kvdb.errors import InvalidArgument, KvdbError
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.status import class_of
from kvdb.server.session_registry import Sessions
from kvdb.session.each import attempted
from kvdb.session.state import SessionState


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
