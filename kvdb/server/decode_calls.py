"""The calls of a decode stream: each turns a request into arrays and hands them to the session's method of its name."""

from collections.abc import Callable, Mapping
from typing import Any

from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.codec import from_array, from_positions
from kvdb.rpc.query_options import to_query_options
from kvdb.session.state import SessionState
from kvdb.types import Array


def update(session: SessionState, request: pb.UpdateRequest) -> None:
    session.update(request.layer, from_array(request.k), from_array(request.v), _start(request))


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
    return session.measure_deviation(request.layer, from_positions(request.positions), k, v, request.score or None)


CALLS: Mapping[str, Callable[[SessionState, Any], Array | None]] = {
    "update": update,
    "attention": attention,
    "attend": attend,
    "overlay": overlay,
    "attention_at": attention_at,
    "deviation": deviation,
}
"""The call for each field of `DecodeRequest.call`. It returns None where there is no answer."""


def _start(request: pb.UpdateRequest | pb.AttendRequest) -> int | None:
    return request.start if request.HasField("start") else None
