"""The calls that come through shared memory, each of them the engine's own method between two places of a region."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np

import kvdb._native as _native
import kvdb.validate as validate
from kvdb.errors import InvalidArgument, KvdbError
from kvdb.events import Origin, new_request
from kvdb.rpc.calls import SHARED
from kvdb.rpc.query_options import to_query_options
from kvdb.rpc.shared_records import CallKind, SharedRequest, check_span
from kvdb.rpc.shared_region import SharedRegion
from kvdb.server.admission.engine_work import work_on
from kvdb.server.each_session import each, statuses_within
from kvdb.server.interceptors import parsed
from kvdb.server.shared_memory.engine import Head, SharedEngine
from kvdb.server.shared_memory.imports import SharedImports
from kvdb.server.shared_memory.prepared import Places, PreparedAttend
from kvdb.server.turns import Turn
from kvdb.session.state import SessionState
from kvdb.types import Array
from query_optimizer.query_options import NO_OPTIONS

HEADS_MAX = 4096
"""How many messages are kept with what they say, since the next step sends the same."""
TOGETHER = {kind for kind, call in SHARED.items() if "session_ids" in call.contract.input_type.fields_by_name}
NAMES = {kind: CallKind(kind).name.lower() for kind in SHARED}


class Answered(NamedTuple):
    """How many bytes of a reply were written, and how many seconds the call waited, was carried out, and was in the kernel."""

    nbytes: int
    queue: float = 0.0
    engine: float = 0.0
    kernel: float = 0.0


class SharedCalls:
    """What one client asks for through its region. Used by one thread. sessions_used: the ids of sessions that were asked for.
    native: where requests come from; one like an earlier attend comes as its `PreparedAttend`."""

    def __init__(self, engine: SharedEngine, region: SharedRegion, generation: int) -> None:
        self._database, self._sessions, self._turns, self._admission, self._stepped, *_ = engine
        self._queries = engine.queries
        self._engine = engine
        self._region = region
        self.native = _native.SharedCalls(region.ring, generation)
        self._heads: dict[tuple[int, bytes], Head] = {}
        self._began = self._kernel = 0.0
        self.sessions_used: set[str] = set()
        self.imports = SharedImports(engine.database, engine.admission, region)
        self._calls: Mapping[int, Callable[[SharedRequest], int]] = {
            CallKind.PING: lambda _request: 0,
            CallKind.UPDATE: partial(self._of_one, self._update),
            CallKind.ATTENTION: partial(self._of_one, self._attention),
            CallKind.ATTEND: partial(self._of_one, self._attend),
            CallKind.ATTEND_TOGETHER: self._of_several,
            CallKind.ATTENTION_TOGETHER: self._of_several,
            CallKind.UPDATE_TOGETHER: self._update_several,
            **self.imports.calls,
        }

    def answer(self, request: SharedRequest) -> Answered:
        """Carry out a request. Raises what the engine raises, and InvalidArgument."""
        call = self._calls.get(request.kind)
        if call is None:
            raise InvalidArgument(f"a request is of kind {request.kind}; expected 0 to {max(CallKind)}")
        if request.kind not in SHARED:
            return Answered(call(request))
        started = self._began = perf_counter()
        try:
            nbytes = call(request)
            return Answered(nbytes, self._began - started, perf_counter() - self._began, self._kernel)
        finally:
            self._kernel = 0.0
            self._stepped(NAMES[request.kind], perf_counter() - started)

    def failed(self, kind: int, whose: Origin, error: KvdbError) -> None:
        """Tell that a request has failed."""
        name = CallKind(kind).name.lower() if kind in self._calls else "unknown"
        self._engine.failed(name, whose if whose.request else whose._replace(request=new_request()), error)

    def close(self) -> None:
        """End an import that is under way, and let go of the region at once."""
        self.imports.close()
        self.native.forget()
        self._calls = self.imports.calls = {}  # methods refer to their objects, which would wait for the garbage collector

    def _of_one(self, call: Callable[[SessionState, Head, SharedRequest], Array | None], request: SharedRequest) -> int:
        head = self._head(request)
        self._turns.wait(head.turn)
        try:
            with self._sessions.borrow(head.sessions[0]) as session:
                self._note(head)
                work = work_on(session, head.layer, request.tokens)
                with self._admission.admitted(work):
                    self._began = perf_counter()
                    out = call(session, head, request)
        finally:
            self._turns.end(head.turn)
        nbytes = 0 if out is None else self._reply(request, out)
        if request.kind == CallKind.ATTEND and request.tokens == 1:
            self.native.learn(head.message, PreparedAttend(self._engine, head, self._places(session, request), work))
        return nbytes

    def _update(self, session: SessionState, head: Head, request: SharedRequest) -> None:
        k, v = (self._heads_at(at, session.spec.kv_heads, session, request) for at in (request.k, request.v))
        session.update(head.layer, k, v, request.start)

    def _attention(self, session: SessionState, head: Head, request: SharedRequest) -> Array:
        q = self._heads_at(request.q, session.spec.q_heads, session, request)
        return session.attention(head.layer, q, head.options)

    def _attend(self, session: SessionState, head: Head, request: SharedRequest) -> Array:
        q, k, v, _ = self._places(session, request)
        out = session.attend(head.layer, q, k, v, head.options, request.start)
        self._kernel, _ = session.last_kernel(head.layer)
        return out

    def _places(self, session: SessionState, request: SharedRequest) -> Places:
        """Where the arrays of an attend lie. Raises InvalidArgument."""
        spec = session.spec
        heads = (request.q, spec.q_heads), (request.k, spec.kv_heads), (request.v, spec.kv_heads), (request.reply, spec.q_heads)
        return Places(*(self._heads_at(at, number, session, request) for at, number in heads))

    def _of_several(self, request: SharedRequest) -> int:
        head = self._head(request)
        self._turns.wait(head.turn)
        try:
            with self._sessions.borrow_all(head.sessions) as sessions:
                self._note(head)
                with self._admission.admitted(work_on(sessions[0], head.layer, request.tokens * len(sessions))):
                    self._began = perf_counter()
                    return self._reply(request, self._together(sessions, head, request))
        finally:
            self._turns.end(head.turn)

    def _together(self, sessions: list[SessionState], head: Head, request: SharedRequest) -> Array:
        spec, count = sessions[0].spec, len(sessions)
        shape = request.tokens, spec.head_dim
        q = self._region.view(request.q, (count, spec.q_heads, *shape), spec.numpy_dtype)
        if request.kind == CallKind.ATTENTION_TOGETHER:
            return self._queries.attention(sessions, head.layer, q, head.options)
        k, v = (self._region.view(at, (count, spec.kv_heads, *shape), spec.numpy_dtype) for at in (request.k, request.v))
        return self._queries.attend(sessions, head.layer, q, k, v, head.options, head.starts)

    def _update_several(self, request: SharedRequest) -> int:
        head = self._head(request)
        count = len(head.sessions)
        first: Sequence[int | None] = head.starts or [None] * count

        def update(i: int, session: SessionState) -> None:
            spec = session.spec
            shape = count, spec.kv_heads, request.tokens, spec.head_dim
            k, v = (self._region.view(at, shape, spec.numpy_dtype) for at in (request.k, request.v))
            session.update(head.layer, k[i], v[i], first[i])

        self._turns.wait(head.turn)
        try:
            self._note(head)
            with self._admission.admitted(work_on(self._sessions.peek(head.sessions[0]), head.layer, request.tokens * count)):
                self._began = perf_counter()
                ended = each(self._sessions, head.sessions, update)
        finally:
            self._turns.end(head.turn)
        data = statuses_within(ended, request.reply_room).SerializeToString()
        self._region.write(request.reply, data)
        return len(data)

    def _heads_at(self, offset: int, heads: int, session: SessionState, request: SharedRequest) -> Array:
        spec = session.spec
        return self._region.view(offset, (heads, request.tokens, spec.head_dim), spec.numpy_dtype)

    def _note(self, head: Head) -> None:
        """Remember the sessions. Where there are too many to remember, older ones end by being idle."""
        if len(self.sessions_used) >= HEADS_MAX:
            self.sessions_used.clear()
        self.sessions_used.update(head.sessions)

    def _head(self, request: SharedRequest) -> Head:
        """What the message of a request says. Raises InvalidArgument."""
        data = self._region.read(request.message, request.message_nbytes)
        key = request.kind, data
        known = self._heads.get(key)
        if known is not None:
            return known
        message = parsed(SHARED[request.kind].request_type, data)
        sessions = tuple(message.session_ids) if request.kind in TOGETHER else (message.session_id,)
        if not sessions:
            raise InvalidArgument("a request names no session; expected one or more")
        options = NO_OPTIONS if request.kind in {CallKind.UPDATE, CallKind.UPDATE_TOGETHER} else to_query_options(message)
        starts = list(message.starts) or None if request.kind in {CallKind.ATTEND_TOGETHER, CallKind.UPDATE_TOGETHER} else None
        if request.kind == CallKind.UPDATE_TOGETHER:
            validate.starts(starts, len(sessions))
        head = Head(data, sessions, Turn("", frozenset(sessions)), message.layer, options, starts)
        if len(self._heads) >= HEADS_MAX:
            self._heads.clear()
            self.native.forget()
        self._heads[key] = head
        return head

    def _reply(self, request: SharedRequest, out: Array) -> int:
        """Write the array where the request says. Raises InvalidArgument where it does not fit."""
        if out.nbytes > request.reply_room:
            raise InvalidArgument(f"a reply has {out.nbytes:,} bytes; expected room for it, not for {request.reply_room:,}")
        check_span(request.reply, out.nbytes)
        np.copyto(self._region.view(request.reply, out.shape, out.dtype), out)
        return out.nbytes
