"""The calls on sessions that go through shared memory, where their arrays are what the model's spec says."""

import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np

import kvdb._native as _native
from kvdb.client.arrays import like
from kvdb.client.remote.shared_memory.lane import SharedLane
from kvdb.client.remote.shared_memory.lanes import SharedLanes
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.calls import SHARED
from kvdb.rpc.query_options import put_query_options
from kvdb.rpc.shared_records import (
    ARENA_AT,
    ERROR_ROOM_BYTES,
    REGION_BYTES,
    STATUS_ROOM_BYTES,
    CallKind,
    SharedAnswer,
    SharedRequest,
    aligned,
)
from kvdb.types import Array, ModelSpec
from query_optimizer.query_options import NO_OPTIONS, QueryOptions

T = TypeVar("T")
Read = Callable[[SharedLane, SharedRequest, SharedAnswer], T]
"""What makes something of an answer, while it lies in the region."""
START_MAX = (1 << 63) - 1
MESSAGES_MAX = 4096


class SharedCalls:
    """Calls on the sessions of one model. Thread-safe. Each returns None where the call has to go over gRPC, which takes
    arrays of any form and size; then nothing was done."""

    def __init__(self, lanes: SharedLanes, spec: ModelSpec, timed: Callable[[float, float, float], None]) -> None:
        """timed: told of each call how many microseconds it waited, was carried out, and was in the kernel."""
        self._lanes = lanes
        self._timed = timed
        self._spec = spec
        self._dtype = spec.numpy_dtype
        self._messages: dict[tuple[Any, ...], bytes] = {}
        self._torch = "torch" in sys.modules
        self._steps: dict[tuple[str, int, QueryOptions | None], _native.SharedStep | None] = {}

    def update(self, session: str, layer: int, k: Array, v: Array, start: int | None) -> Array | None:
        """An empty array once it is done."""
        message = self._message(CallKind.UPDATE, session, layer, NO_OPTIONS)
        return self._call(CallKind.UPDATE, message, (), (None, k, v), start, self._nothing)

    def attention(self, session: str, layer: int, q: Array, options: QueryOptions) -> Array | None:
        message = self._message(CallKind.ATTENTION, session, layer, options)
        return self._call(CallKind.ATTENTION, message, (), (q, None, None), None, self._array_like(q))

    def attend(
        self, session: str, layer: int, q: Array, k: Array, v: Array, options: QueryOptions, start: int | None
    ) -> Array | None:
        message = self._message(CallKind.ATTEND, session, layer, options)
        return self._call(CallKind.ATTEND, message, (), (q, k, v), start, self._array_like(q))

    def step(self, session: str, layer: int, q: Any, k: Any, v: Any, options: QueryOptions, start: int | None) -> Any | None:
        """`attend` of one token, with nothing of Python between the caller's arrays, numpy's or torch's in main memory, and the
        ring. None where an argument is of another form; then nothing was done."""
        if type(q) is not np.ndarray and not self._torch:  # from now on steps are made for its tensors too
            self._steps.clear()
            self._torch = "torch" in sys.modules
        key = session, layer, None if options is NO_OPTIONS else options
        step = self._steps.get(key) or self._new_step(key, options)
        if step is None:
            return None
        lane = self._lanes.take()
        if lane is None:
            return None
        try:
            out = lane.step(step, q, k, v, start, self._lanes.limits.group("attend"))
            if type(out) is SharedRequest:
                out = like(self._reply(lane, out, q.shape), q)
            if out is not None:
                self._timed(*lane.region.ring.times_us)
            return out
        finally:
            self._lanes.give_back(lane)

    def attend_together(
        self,
        sessions: Sequence[str],
        layer: int,
        arrays: tuple[Array, Array, Array],
        options: QueryOptions,
        starts: Sequence[int] | None,
    ) -> Array | None:
        request = pb.AttendTogetherRequest(session_ids=sessions, layer=layer, starts=starts)
        put_query_options(request, options)
        return self._call(
            CallKind.ATTEND_TOGETHER, request.SerializeToString(), (len(sessions),), arrays, None, self._array_like(arrays[0])
        )

    def attention_together(self, sessions: Sequence[str], layer: int, q: Array, options: QueryOptions) -> Array | None:
        request = pb.AttentionTogetherRequest(session_ids=sessions, layer=layer)
        put_query_options(request, options)
        arrays, read = (q, None, None), self._array_like(q)
        return self._call(CallKind.ATTENTION_TOGETHER, request.SerializeToString(), (len(sessions),), arrays, None, read)

    def update_together(
        self, sessions: Sequence[str], layer: int, k: Array, v: Array, starts: Sequence[int] | None
    ) -> pb.UpdateSessionsReply | None:
        """What became of each session."""
        request = pb.UpdateSessionsRequest(session_ids=sessions, layer=layer, starts=starts)
        arrays = None, k, v
        return self._call(CallKind.UPDATE_TOGETHER, request.SerializeToString(), (len(sessions),), arrays, None, _statuses)

    def _new_step(self, key: tuple[str, int, QueryOptions | None], options: QueryOptions) -> _native.SharedStep | None:
        """The step of these attends, kept; None where no region has room for it."""
        if key in self._steps or not self._spec.uniform:
            return None
        spec, message = self._spec, self._message(CallKind.ATTEND, *key[:2], options)
        dtype, empty = _native.Dtype[spec.dtype], np.empty(0, self._dtype)
        heads = spec.q_heads, spec.kv_heads, spec.head_dim
        form = [np.empty((h, 1, spec.head_dim), self._dtype) for h in (spec.q_heads, spec.kv_heads, spec.kv_heads)]
        fits = self._places(len(message), (), (form[0], form[1], form[2])) is not None
        step = _native.SharedStep(*heads, dtype, empty, message, ARENA_AT, REGION_BYTES) if fits else None
        if step is not None and (torch := sys.modules.get("torch")) is not None:
            step.take_tensors(torch.Tensor, getattr(torch, self._dtype.name))
        if len(self._steps) >= MESSAGES_MAX:
            self._steps.clear()
        self._steps[key] = step
        return step

    def _message(self, kind: CallKind, session: str, layer: int, options: QueryOptions) -> bytes:
        """The message of a call, kept because the next step sends the same."""
        key = kind, session, layer, None if options is NO_OPTIONS else options
        known = self._messages.get(key)
        if known is None:
            request = SHARED[kind].request_type(session_id=session, layer=layer)
            if kind != CallKind.UPDATE:
                put_query_options(request, options)
            known = request.SerializeToString()
            if len(self._messages) >= MESSAGES_MAX:
                self._messages.clear()
            self._messages[key] = known
        return known

    def _call(
        self,
        kind: CallKind,
        message: bytes,
        sessions: tuple[int, ...],
        arrays: tuple[Array | None, Array | None, Array | None],
        start: int | None,
        read: Read[T],
    ) -> T | None:
        """Send arrays of the spec's form, of the same number of tokens, and return what `read` makes of the answer."""
        places = self._places(len(message), sessions, arrays)
        if places is None or not (start is None or (type(start) is int and -START_MAX <= start <= START_MAX)):
            return None
        lane = self._lanes.take()
        if lane is None:
            return None
        try:
            request = self._request(lane, kind, message, arrays, places, start)
            answer = lane.exchange(request, request.seconds)
            self._timed(*answer.times_us)
            return read(lane, request, answer)
        finally:
            self._lanes.give_back(lane)

    def _request(
        self,
        lane: SharedLane,
        kind: CallKind,
        message: bytes,
        arrays: tuple[Array | None, Array | None, Array | None],
        places: tuple[int, int, int, int],
        start: int | None,
    ) -> SharedRequest:
        """What asks for the call, whose message and arrays lie in the region then."""
        region = lane.region
        region.write(ARENA_AT, message)
        for at, array in zip(places, arrays, strict=False):
            if array is not None:
                np.copyto(region.view(at, array.shape, self._dtype), array)
        q, k, _ = arrays
        counted = k if q is None else q
        assert counted is not None
        q_at, k_at, v_at, reply = places
        return SharedRequest(
            lane.generation,
            lane.number(),
            kind,
            start,
            counted.shape[-2],
            q_at,
            k_at,
            v_at,
            ARENA_AT,
            len(message),
            reply,
            REGION_BYTES - reply,
            seconds=self._lanes.limits.group("attend"),
        )

    def _nothing(self, _lane: SharedLane, _request: SharedRequest, _answer: SharedAnswer) -> Array:
        return np.empty(0, self._dtype)

    def _array_like(self, q: Array) -> Read[Array]:
        return lambda lane, request, _answer: self._reply(lane, request, q.shape)

    def _reply(self, lane: SharedLane, request: SharedRequest, shape: Sequence[int]) -> Array:
        """A copy of the answer to a request."""
        return lane.region.view(request.reply, tuple(shape), self._dtype).copy()

    def _places(
        self, message_nbytes: int, sessions: tuple[int, ...], arrays: tuple[Array | None, Array | None, Array | None]
    ) -> tuple[int, int, int, int] | None:
        """Where q, k, v and the reply go; None where an array is of another form, or where they do not fit into a region."""
        if not self._spec.uniform:
            return None
        spec, at, places, tokens = self._spec, aligned(ARENA_AT + message_nbytes), [0, 0, 0], 0
        reply_nbytes = 0
        for i, array in enumerate(arrays):
            if array is None:
                continue
            tokens = tokens or (array.shape[-2] if array.ndim == 3 + len(sessions) else 0)
            heads = spec.kv_heads if i else spec.q_heads
            if not tokens or array.dtype != self._dtype or array.shape != (*sessions, heads, tokens, spec.head_dim):
                return None
            places[i] = at
            at = aligned(at + array.nbytes)
            reply_nbytes = reply_nbytes or (0 if i else array.nbytes)
        room = max(reply_nbytes, ERROR_ROOM_BYTES, STATUS_ROOM_BYTES * prod(sessions))
        return (places[0], places[1], places[2], at) if at + room <= REGION_BYTES else None


def _statuses(lane: SharedLane, request: SharedRequest, answer: SharedAnswer) -> pb.UpdateSessionsReply:
    return pb.UpdateSessionsReply.FromString(lane.region.read(request.reply, answer.reply_nbytes))
