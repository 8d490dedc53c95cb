"""The calls of a decode stream: each turns a request into arrays and hands them to the session's method of its name."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.codec import from_array, from_positions
from kvdb.rpc.query_options import to_query_options
from kvdb.server.admission.engine_work import work_on
from kvdb.server.admission.fair_queue import Work
from kvdb.session.state import SessionState
from kvdb.types import Array


def update(session: SessionState, request: pb.UpdateRequest) -> None:
    k = from_array(request.k)
    if request.indexer:
        session.update(request.layer, k, k[..., :0], _start(request), indexer=True)
    else:
        session.update(request.layer, k, from_array(request.v), _start(request))


def attention(session: SessionState, request: pb.AttentionRequest) -> Array:
    return session.attention(request.layer, from_array(request.q), to_query_options(request))


def attend(session: SessionState, request: pb.AttendRequest) -> Array:
    q, k, v = (from_array(array) for array in (request.q, request.k, request.v))
    return session.attend(request.layer, q, k, v, to_query_options(request), _start(request))


def overlay(session: SessionState, request: pb.OverlayRequest) -> None:
    session.overlay(request.layer, from_positions(request.positions), from_array(request.k), from_array(request.v))


def attention_at(session: SessionState, request: pb.AttentionAtRequest) -> Array:
    return session.attention_at(request.layer, from_array(request.q), from_positions(request.positions))


def deviation(session: SessionState, request: pb.DeviationRequest) -> Array:
    k, v = from_array(request.k), from_array(request.v)
    return session.deviation(request.layer, from_positions(request.positions), k, v, request.score or None)


TOKENS_COUNTED_MAX = 1 << 20
"""The most tokens that a call counts as; what claims to have more is refused later."""
NO_QUERIES = (pb.UpdateRequest, pb.UpdateSessionsRequest, pb.OverlayRequest, pb.DeviationRequest)

CALLS: Mapping[str, Callable[[SessionState, Any], Array | None]] = {
    "update": update,
    "attention": attention,
    "attend": attend,
    "overlay": overlay,
    "attention_at": attention_at,
    "deviation": deviation,
}
"""The call for each field of `DecodeRequest.call`. It returns None where there is no answer."""


def tokens_of(request: Any) -> int:
    """How many tokens a call asks about or appends, over all its sessions; 0 for one that names none."""
    shape = (request.k if isinstance(request, NO_QUERIES) else request.q).shape
    return min(prod(shape[:-3]) * shape[-2], TOKENS_COUNTED_MAX) if len(shape) > 1 else 0


def work_of(request: Any, session: Callable[[str], SessionState | None]) -> Work:
    """What a unary call asks of the engine that could be a step of a stream. session: finds a session by its id."""
    names = request.session_ids if hasattr(request, "session_ids") else (request.session_id,)
    return work_on(session(names[0]) if names else None, request.layer, tokens_of(request))


def _start(request: pb.UpdateRequest | pb.AttendRequest) -> int | None:
    return request.start if request.HasField("start") else None
