"""`QueryOptions` as a message of the wire, and back."""

from functools import lru_cache

from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP
from kvdb.errors import Unsupported
from kvdb.rpc import kvdb_pb2 as pb
from query_optimizer.query_options import NO_HINTS, NO_OPTIONS, Hints, QueryOptions

Request = (
    pb.AttentionRequest
    | pb.AttendRequest
    | pb.AttentionTogetherRequest
    | pb.AttendTogetherRequest
    | pb.ExplainRequest
    | pb.ExplainContextRequest
    | pb.ExplainSessionRequest
)

K_MAX = (1 << 64) - 1
"""The largest number that the wire carries; no context has more tokens."""
KEPT_MAX, KEPT_BYTES_MAX = 256, 1024
"""The number of options that are kept with their messages, and the most bytes of such a message."""
BUDGET_MAX = K_MAX
"""No machine has more bytes."""


def put_query_options(request: Request, options: QueryOptions) -> None:
    """Write the options into a request; options that ask for nothing take no bytes."""
    if options is not NO_OPTIONS and options != NO_OPTIONS:
        request.options.CopyFrom(_message(options))


@lru_cache(KEPT_MAX)
def _message(options: QueryOptions) -> pb.QueryOptions:
    """The message of the options. It is kept, because the next step asks for the same, and must not be changed."""
    message = pb.QueryOptions()
    if options.retrieval is not None:
        _put_retrieval(message.retrieval, options.retrieval)
    if options.max_missed_mass is not None:
        message.max_missed_mass = options.max_missed_mass
    if options.estimate_tail:
        message.estimate_tail = True
    if options.hints != NO_HINTS:
        message.hints.index = options.hints.index or ""
        message.hints.rules_off.extend(options.hints.rules_off)
        if options.hints.memory_budget is not None:
            message.hints.memory_budget = min(options.hints.memory_budget, BUDGET_MAX)
    if options.error_max is not None:
        message.error_max = options.error_max
    return message


def to_query_options(request: Request) -> QueryOptions:
    """The options in a request. Raises InvalidArgument for invalid values, Unsupported for a newer client's retrieval."""
    if not request.HasField("options"):
        return NO_OPTIONS
    data = request.options.SerializeToString()
    return _kept(data) if len(data) <= KEPT_BYTES_MAX else _options(data)


def _options(data: bytes) -> QueryOptions:
    """The options of a message's bytes."""
    message = pb.QueryOptions.FromString(data)
    return QueryOptions(
        retrieval=_retrieval(message.retrieval) if message.HasField("retrieval") else None,
        max_missed_mass=message.max_missed_mass if message.HasField("max_missed_mass") else None,
        estimate_tail=message.estimate_tail,
        hints=_hints(message.hints) if message.HasField("hints") else NO_HINTS,
        error_max=message.error_max if message.HasField("error_max") else None,
    )


_kept = lru_cache(KEPT_MAX)(_options)


def _put_retrieval(message: pb.Retrieval, retrieval: Retrieval) -> None:
    match retrieval:
        case Exact():
            message.exact.SetInParent()
        case Dipr(alpha):
            message.dipr.alpha = alpha
        case TopK(k):
            message.top_k.k = min(k, K_MAX)
        case TopP(p):
            message.top_p.p = p


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
