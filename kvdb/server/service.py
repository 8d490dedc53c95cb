"""The calls of kvdb.v1.Kvdb, each of them the engine's own method between two messages."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from re import sub
from time import perf_counter
from typing import Any

import grpc
from google.protobuf.message import Message

import kvdb.deadlines as deadlines
import kvdb.validate as validate
from kvdb.config import ServerConfig
from kvdb.errors import InvalidArgument
from kvdb.rpc import codec, kv_chunk
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.call import SERVICE, WireCall, given
from kvdb.rpc.calls import CALLS, OF_REQUEST
from kvdb.rpc.kv_chunk import CHUNK_BYTES, Chunk
from kvdb.rpc.query_options import to_query_options
from kvdb.server import decode_calls, import_calls, interceptors
from kvdb.server.admission.admission import Admission
from kvdb.server.admission.engine_work import work_on
from kvdb.server.admission.fair_queue import Work
from kvdb.server.each_session import each, starts_in, status_of, truncated
from kvdb.server.incoming import Incoming
from kvdb.server.inflight import InflightBytes
from kvdb.server.interceptors import UnaryCalls, answering
from kvdb.server.session_registry import Sessions
from kvdb.server.streams import OpenStream, Streams
from kvdb.server.tenancy.tenants import AnyDatabase
from kvdb.server.tracing import Together
from kvdb.server.turns import Turn, Turns
from kvdb.session.each import check_counts
from kvdb.session.state import SessionState
from kvdb.version import __version__

TOKENS_OF_REPLY = 1 << 17
"""The most ids in a reply, half of the smallest limit of a message."""

# size: one noun, the service and its calls


class KvdbService:
    """Answers calls; what it raises becomes a status. A call of which the table does not say all has a method here, named as in
    the contract but in Python's way.

    queries: what answers those of several sessions; whoever makes the service says it."""

    queries: Together

    def __init__(
        self,
        database: AnyDatabase,
        sessions: Sessions,
        streams: Streams,
        turns: Turns,
        inflight: InflightBytes,
        config: ServerConfig,
        stepped: Callable[[str, float], None],
    ) -> None:
        """stepped: told of each message of a Decode stream which call it held, and the seconds that it took."""
        self._database = database
        self._sessions = sessions
        self._streams = streams
        self._turns = turns
        self._inflight = inflight
        self._stepped = stepped
        self.admission = Admission(config.requests_max, config.queue_max)
        self._incoming = partial(Incoming, inflight, nbytes_max=config.request_bytes_max)
        self._greeting = pb.HelloReply(
            version=__version__,
            message_bytes_max=config.message_bytes_max,
            request_bytes_max=config.request_bytes_max,
            stream_idle_seconds=config.stream_idle_seconds,
        )

    def offer_memory(self, path: str, identity: bytes) -> None:
        """Tell clients from now on of the socket through which this server shares memory, and what it says of itself there."""
        self._greeting.local_socket, self._greeting.local_server = path, identity

    def hello(self, _request: pb.HelloRequest, _context: grpc.ServicerContext) -> pb.HelloReply:
        return self._greeting

    def import_context(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[pb.ImportReply]:
        with self._streams.opened(context, finishes=True) as stream, closing(self._incoming(stream.client)) as incoming:
            begin = import_calls.begin(requests)
            base = begin.base if begin.HasField("base") else None
            tokens = codec.from_tokens(begin.tokens)
            rest = base, codec.from_retention(begin.retention), begin.salt
            writer = self._database.begin_import(codec.from_spec(begin.spec), tokens, begin.name, *rest)
            if not context.add_callback(writer.abort):  # called when the call ends, in whatever way
                writer.abort()
                return
            try:
                yield pb.ImportReply(begun=pb.ImportBegun(start=writer.start))
                for data in requests:
                    self._streams.begin(stream)
                    with answering(context):
                        info = import_calls.carry_out(writer, incoming, self.admission, data)
                    self._streams.end(stream)
                    if info is not None:
                        yield pb.ImportReply(committed=codec.to_info(info))
                        return
            finally:
                writer.abort()

    def create_session(self, request: pb.CreateSessionRequest, _context: grpc.ServicerContext) -> pb.SessionReply:
        spec = codec.from_spec(request.spec)
        error_max = request.error_max if request.HasField("error_max") else None
        expected = request.expected_tokens if request.HasField("expected_tokens") else None
        if not request.HasField("parts"):
            rest = error_max, request.salt
            tokens = codec.from_tokens(request.tokens)
            share, label = request.share, request.label
            state = self._database.create_session(spec, tokens, *rest, share=share, label=label, expected_tokens=expected)
            return self._opened(state)
        if request.tokens:
            raise InvalidArgument("a session is created of tokens and of parts; expected one of the two")
        parts = [codec.from_part(part) for part in request.parts.parts]
        state = self._database.create_session_of_parts(spec, parts, error_max, request.salt, expected_tokens=expected)
        return self._opened(state, codec.to_tokens(state.tokens))

    def update(self, request: pb.UpdateRequest, _context: grpc.ServicerContext) -> pb.UpdateReply:
        with self._sessions.borrow(request.session_id) as session:
            decode_calls.update(session, request)
        return pb.UpdateReply()

    def attention(self, request: pb.AttentionRequest, _context: grpc.ServicerContext) -> pb.AttentionReply:
        with self._sessions.borrow(request.session_id) as session:
            return pb.AttentionReply(out=codec.to_array(decode_calls.attention(session, request)))

    def attend(self, request: pb.AttendRequest, _context: grpc.ServicerContext) -> pb.AttentionReply:
        with self._sessions.borrow(request.session_id) as session:
            return pb.AttentionReply(out=codec.to_array(decode_calls.attend(session, request)))

    def attend_together(self, request: pb.AttendTogetherRequest, _context: grpc.ServicerContext) -> pb.AttentionReply:
        q, k, v = (codec.from_array(array) for array in (request.q, request.k, request.v))
        options, starts = to_query_options(request), list(request.starts) or None
        with self._sessions.borrow_all(request.session_ids) as sessions:
            out = self.queries.attend(sessions, request.layer, q, k, v, options, starts)
        return pb.AttentionReply(out=codec.to_array(out))

    def attention_together(self, request: pb.AttentionTogetherRequest, _context: grpc.ServicerContext) -> pb.AttentionReply:
        q, options = codec.from_array(request.q), to_query_options(request)
        with self._sessions.borrow_all(request.session_ids) as sessions:
            return pb.AttentionReply(out=codec.to_array(self.queries.attention(sessions, request.layer, q, options)))

    def decode(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[pb.DecodeReply]:
        with self._streams.opened(context) as stream, closing(self._incoming(stream.client)) as incoming:
            for data in requests:
                self._streams.begin(stream)
                yield self._decoded(stream, incoming, data)
                if not self._streams.end(stream):
                    return

    def fork(self, request: pb.ForkRequest, _context: grpc.ServicerContext) -> pb.SessionReply:
        with self._sessions.borrow(request.session_id) as session:
            twin = session.fork()
        return self._opened(twin)

    def truncate(self, request: pb.TruncateRequest, _context: grpc.ServicerContext) -> pb.TruncateReply:
        with self._sessions.borrow(request.session_id) as session:
            return truncated(session, request.tokens)

    def store(self, request: pb.StoreRequest, _context: grpc.ServicerContext) -> pb.ContextInfo:
        tokens = codec.from_tokens(request.tokens) if request.HasField("tokens") else None
        with self._sessions.borrow(request.session_id) as session:
            retention = codec.from_retention(request.retention)
            return codec.to_info(self._database.store(session, request.name, tokens, chunk=request.chunk, retention=retention))

    def status(self, request: pb.StatusRequest, _context: grpc.ServicerContext) -> Message:
        door = self.admission
        now = replace(self._database.status(), calls=door.under_way, calls_max=door.room, calls_waiting=door.waiting)
        return OF_REQUEST[type(request)].reply(now)

    def build_index(self, request: pb.BuildIndexRequest, context: grpc.ServicerContext) -> Message:
        """A call that waits counts among the streams, because it holds a thread as long as they do. It ends with its client."""
        with self._streams.opened(context) if request.wait else nullcontext():
            built = self._database.build_index(request.name, request.kind, request.wait, context.is_active)
        return OF_REQUEST[type(request)].reply(built)

    def close_session(self, request: pb.CloseSessionRequest, _context: grpc.ServicerContext) -> pb.CloseSessionReply:
        self._sessions.close(request.session_id)
        return pb.CloseSessionReply()

    def context_tokens(self, request: pb.ContextTokensRequest, _context: grpc.ServicerContext) -> pb.ContextTokensReply:
        ids = self._database.token_ids(request.name)[request.start :]
        return pb.ContextTokensReply(tokens=codec.to_tokens(ids[:TOKENS_OF_REPLY]))

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

    def read_context(self, request: pb.ReadContextRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        layers, start, stop = list(request.layers), int(request.start), int(request.stop)
        with ExitStack() as held:
            stream = held.enter_context(self._streams.opened(context, finishes=True))
            session = self._source(request, held)
            session.check_read(layers, start, stop, indexer=request.indexer)
            step = max(1, CHUNK_BYTES // session.spec.token_nbytes)
            for layer in layers:
                for at in range(start, stop, step):
                    end = min(at + step, stop)
                    self._streams.begin(stream)
                    counted = self._inflight.wait(stream.client, (end - at) * session.spec.token_nbytes)
                    try:
                        with answering(context):
                            ((k, v),) = session.read([layer], at, end, indexer=request.indexer)
                        data = kv_chunk.serialize(Chunk(layer, k, v, request.indexer))
                        self._streams.end(stream)
                        yield data
                    finally:
                        self._inflight.give_back(stream.client, counted)

    def ask(self, call: WireCall, request: Message, context: grpc.ServicerContext) -> Message:
        """What the database, or a session, answers to a call of which the table says all. A long one counts among the streams."""
        arguments = call.arguments(request)
        with ExitStack() as stack:
            if call.long:
                self._streams.begin(stack.enter_context(self._streams.opened(context)))
            asked: Any = self._database
            if call.of_session:
                asked = stack.enter_context(self._sessions.borrow(given(request, "session_id")))
            return call.reply(getattr(asked, call.method)(*arguments))

    def _opened(self, state: SessionState, tokens: bytes = b"") -> pb.SessionReply:
        """Take over a session, and tell the client of it. tokens: its ids, where the client does not know them."""
        layout = map(codec.to_placed, state.layout)
        return pb.SessionReply(
            session_id=self._sessions.add(state),
            reused=state.reused,
            start=state.start,
            layout=layout,
            tokens=tokens,
            error_max=state.error_max,
        )

    def _decoded(self, stream: OpenStream, incoming: Incoming, data: bytes) -> pb.DecodeReply:
        """The reply to one message of a stream: an empty one to a piece of a request, but for the last."""
        request = interceptors.parsed(pb.DecodeRequest, data)
        try:
            if request.WhichOneof("call") != "part":
                incoming.count(len(data))
                return self._answer(stream, request)
            whole = incoming.put_together(request.part)
            return pb.DecodeReply() if whole is None else self._answer(stream, interceptors.parsed(pb.DecodeRequest, whole))
        finally:
            incoming.answered()

    def _answer(self, stream: OpenStream, request: pb.DecodeRequest) -> pb.DecodeReply:
        """Raises InvalidArgument for a request that holds no call or names another session than the stream's first."""
        kind = request.WhichOneof("call")
        if kind is None or kind == "part":
            raise InvalidArgument("a decode request holds no call; expected an update, an attention or an attend")
        call = getattr(request, kind)
        if not stream.session:
            stream.session, stream.turn = call.session_id, Turn("", frozenset((call.session_id,)))
        elif call.session_id not in {"", stream.session}:
            raise InvalidArgument("a decode request names another session than the stream's first; open a stream for each")
        started = began = perf_counter()
        kernel = 0.0
        self._turns.wait(stream.turn)
        try:
            with (
                answering(stream.context),
                self._sessions.borrow(stream.session) as session,
                self.admission.admitted(work_on(session, call.layer, decode_calls.tokens_of(call))),
            ):
                deadlines.check()
                began = perf_counter()
                out = decode_calls.CALLS[kind](session, call)
                ended = perf_counter()
                if kind == "attend":
                    kernel, _ = session.last_kernel(call.layer)
        finally:
            self._turns.end(stream.turn)
            self._stepped(kind, perf_counter() - started)
        reply = pb.DecodeReply(queue_us=(began - started) * 1e6, engine_us=(ended - began) * 1e6, kernel_us=kernel * 1e6)
        if out is not None:
            codec.put_array(reply.out, out)
        return reply

    def _source(self, request: pb.ReadContextRequest, held: ExitStack) -> SessionState:
        """The session whose tokens are read, until `held` ends: an open one, or one over a context. Raises NotFound or
        SessionClosed, and InvalidArgument for a request that names neither."""
        source = request.WhichOneof("source")
        if source is None:
            raise InvalidArgument("a read names no context and no session; expected one of the two")
        if source == "session_id":
            return held.enter_context(self._sessions.borrow(request.session_id))
        session = self._database.open_context(request.context, int(request.stop))
        held.callback(session.close)
        return session


ServiceOf = Callable[[grpc.ServicerContext], KvdbService]
"""What answers a call: the service of whoever makes it. Raises Unauthenticated."""


def handlers(service_of: ServiceOf, unary: UnaryCalls, work_of: Callable[[Message], Work]) -> grpc.GenericRpcHandler:
    """Every call of the contract, each answered by the service's method of its name, or by the database's. work_of: what a call
    asks of the engine that is made through shared memory too."""
    methods = {call.rpc: _handler(service_of, unary, work_of, call) for call in OF_REQUEST.values()}
    return grpc.method_handlers_generic_handler(SERVICE.full_name, methods)


def _handler(
    service_of: ServiceOf, unary: UnaryCalls, work_of: Callable[[Message], Work], call: WireCall
) -> "interceptors.Handler":
    name = snake(call.rpc)
    meant = [other for other in CALLS if other.rpc == call.rpc]
    by_hand = hasattr(KvdbService, name)
    assert by_hand or call.method, f"no method answers {call.rpc}"

    def behaviour(request: Any, context: grpc.ServicerContext) -> Any:
        service = service_of(context)
        if by_hand:
            return getattr(service, name)(request, context)
        return service.ask(next(one for one in meant if one.holds(request)), request, context)

    kind: Any = call.request_type
    if call.contract.client_streaming:
        return interceptors.stream(call.rpc, behaviour)
    if call.contract.server_streaming:
        return interceptors.replies(call.rpc, kind, behaviour)
    if call.long:
        return interceptors.blocking(call.rpc, kind, behaviour)
    return unary.handler(call.rpc, kind, behaviour, None if call.shared is None else work_of)


def snake(rpc: str) -> str:
    """The name of a method that answers a call, by the call's name in the contract."""
    return sub(r"(?<!^)(?=[A-Z])", "_", rpc).lower()
