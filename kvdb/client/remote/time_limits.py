"""How long each call on a server may take."""

from collections.abc import Mapping

from google.protobuf.message import Message

import kvdb.deadlines as deadlines
from kvdb.config import Timeouts
from kvdb.rpc import kvdb_pb2 as pb

GROUPS: Mapping[type[Message], str] = {
    pb.CreateSessionRequest: "attend",
    pb.AttendTogetherRequest: "attend",
    pb.AttentionTogetherRequest: "attend",
    pb.ForkRequest: "attend",
    pb.CreateSessionsRequest: "attend",
    pb.UpdateSessionsRequest: "attend",
    pb.TruncateSessionsRequest: "attend",
    pb.TruncateRequest: "attend",
    pb.PlanRecomputeRequest: "attend",
    pb.ExplainRequest: "attend",
    pb.ExplainContextRequest: "attend",
    pb.ExplainSessionRequest: "attend",
    pb.StoreRequest: "store",
    pb.UpdateContextRequest: "store",
    pb.DropContextsRequest: "store",
    pb.OffloadContextRequest: "store",
    pb.BuildIndexRequest: "maintain",
    pb.VerifyIndexesRequest: "maintain",
    pb.CheckContextRequest: "maintain",
    pb.CheckStoreRequest: "maintain",
    pb.UnknownFilesRequest: "maintain",
    pb.BackupRequest: "maintain",
    pb.CompactRequest: "maintain",
}
"""The field of `Timeouts` for each unary call, by its request; lookups are not named."""


class TimeLimits:
    """The seconds for each call: what the caller says in a `with`, or with `timeout=`, and otherwise what the table has."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts

    def of(self, request: object) -> float:
        """The seconds for a unary call. Raises DeadlineExceeded where the caller's time is over."""
        return self.group(GROUPS.get(type(request), "lookup"))  # type: ignore[arg-type]

    def group(self, name: str) -> float:
        """The seconds for a call of a group, a field of `Timeouts`. Raises DeadlineExceeded where the caller's time is over."""
        said = deadlines.remaining()
        seconds: float = getattr(self._timeouts, name) if said is None else said
        return seconds
