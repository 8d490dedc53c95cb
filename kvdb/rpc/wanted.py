"""What a query asks for beside its vectors, as the requests carry it."""

from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP
from kvdb.errors import InvalidArgument, Unsupported
from kvdb.rpc import kvdb_pb2 as pb
from query_optimizer.wanted import NO_HINTS, Hints, Wanted

Request = (
    pb.AttentionRequest
    | pb.AttendRequest
    | pb.AttentionTogetherRequest
    | pb.AttendTogetherRequest
    | pb.ExplainRequest
    | pb.ExplainContextRequest
)

K_MAX = (1 << 64) - 1
"""The most that the wire carries; no context has more tokens."""
BUDGET_MAX = K_MAX
"""No machine has more bytes."""


def put_wanted(message: Request, wanted: Wanted) -> None:
    """Into a request. Raises Unsupported for a retrieval that this version has no message for."""
    match wanted.retrieval:
        case None:
            pass
        case Exact():
            message.retrieval.exact.SetInParent()
        case Dipr(alpha):
            message.retrieval.dipr.alpha = alpha
        case TopK(k):
            message.retrieval.top_k.k = min(k, K_MAX)
        case TopP(p):
            message.retrieval.top_p.p = p
        case _:
            raise Unsupported(f"retrieval {wanted.retrieval!r} cannot be sent to a server; expected Exact, Dipr, TopK or TopP")
    if wanted.missed_mass_max is not None:
        message.missed_mass_max = wanted.missed_mass_max
    if wanted.estimate_tail:
        message.estimate_tail = True
    if wanted.hints != NO_HINTS:
        message.hints.index = wanted.hints.index or ""
        message.hints.rules_off.extend(wanted.hints.rules_off)
        if wanted.hints.memory_budget is not None:
            message.hints.memory_budget = min(wanted.hints.memory_budget, BUDGET_MAX)


def from_wanted(message: Request) -> Wanted:
    """What a request asks for. Raises InvalidArgument for values that cannot be, Unsupported for a newer client's retrieval."""
    try:
        return Wanted(
            retrieval=_retrieval(message.retrieval) if message.HasField("retrieval") else None,
            missed_mass_max=message.missed_mass_max if message.HasField("missed_mass_max") else None,
            estimate_tail=message.estimate_tail,
            hints=_hints(message.hints) if message.HasField("hints") else NO_HINTS,
        )
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def _hints(message: pb.Hints) -> Hints:
    budget = message.memory_budget if message.HasField("memory_budget") else None
    return Hints(message.index or None, tuple(message.rules_off), budget)


def _retrieval(message: pb.Retrieval) -> Retrieval:
    match message.WhichOneof("kind"):
        case "exact":
            return Exact()
        case "dipr":
            return Dipr(message.dipr.alpha)
        case "top_k":
            return TopK(message.top_k.k)
        case "top_p":
            return TopP(message.top_p.p)
    raise Unsupported(
        "this server does not know the request's retrieval; expected exact, dipr, top_k or top_p, or run both from one version"
    )
