"""The calls of kvdb.v1.Kvdb, each of them the engine's own method between two messages."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from re import sub

import grpc
from google.protobuf.message_factory import GetMessageClass

from kvdb.database import Database
from kvdb.errors import InvalidArgument
from kvdb.rpc import chunk, codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.chunk import Chunk
from kvdb.rpc.plans import to_choice, to_plan
from kvdb.rpc.wanted import from_wanted
from kvdb.server import calls, edge
from kvdb.server.sessions import Sessions
from kvdb.server.streams import OpenStream, Streams
from kvdb.session import SessionState
from kvdb.types import IndexInfo
from kvdb.version import __version__

SERVICE = pb.DESCRIPTOR.services_by_name["Kvdb"]
IMPORT = "ImportContext"


class KvdbService:
    """One method a call, named as in the proto but in Python's way. What they raise, `edge` turns into statuses."""

    def __init__(self, database: Database, sessions: Sessions, streams: Streams, message_bytes_max: int) -> None:
        self._database = database
        self._sessions = sessions
        self._streams = streams
        self._message_bytes_max = message_bytes_max

    def hello(self, _request: pb.HelloRequest, _context: grpc.ServicerContext) -> pb.HelloReply:
        return pb.HelloReply(version=__version__, message_bytes_max=self._message_bytes_max)

    def import_context(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[pb.ImportReply]:
        """Requests are raw bytes, so that a chunk is read in place."""
        with self._streams.entered(context) as stream:
            self._streams.begin(stream)
            begin = _begin(requests)
            base = begin.base if begin.HasField("base") else None
            tokens = codec.from_tokens(begin.tokens)
            writing = self._database.begin_import(codec.from_spec(begin.spec), tokens, begin.name, base)
            if not context.add_callback(writing.abort):  # called when the call ends, in whatever way
                writing.abort()
                return
            try:
                yield pb.ImportReply(begun=pb.ImportBegun(start=writing.start))
                for data in requests:
                    request = chunk.deserialize(data)
                    if isinstance(request, Chunk):
                        writing.write(request.layer, request.k, request.v)
                    elif request.WhichOneof("step") == "sample":
                        writing.sample(request.sample.layer, codec.from_array(request.sample.q))
                    else:
                        _expect(request, "commit")
                        yield pb.ImportReply(committed=codec.to_info(writing.commit()))
                        return
            finally:
                writing.abort()

    def list_contexts(self, _request: pb.ListContextsRequest, _context: grpc.ServicerContext) -> pb.ListContextsReply:
        return pb.ListContextsReply(contexts=map(codec.to_info, self._database.contexts()))

    def list_tiers(self, _request: pb.ListTiersRequest, _context: grpc.ServicerContext) -> pb.ListTiersReply:
        return pb.ListTiersReply(tiers=map(codec.to_tier, self._database.tiers()))

    def get_context(self, request: pb.GetContextRequest, _context: grpc.ServicerContext) -> pb.ContextInfo:
        return codec.to_info(self._database.get(request.name))

    def drop_context(self, request: pb.DropContextRequest, _context: grpc.ServicerContext) -> pb.DropContextReply:
        self._database.drop(request.name)
        return pb.DropContextReply()

    def offload_context(self, request: pb.OffloadContextRequest, _context: grpc.ServicerContext) -> pb.OffloadContextReply:
        return pb.OffloadContextReply(nbytes=self._database.offload(request.name))

    def build_index(self, request: pb.BuildIndexRequest, context: grpc.ServicerContext) -> pb.IndexesReply:
        """A call that waits is counted with the streams, because it holds its thread as long; it ends with its client."""
        with self._streams.entered(context) if request.wait else nullcontext():
            built = self._database.build_index(request.name, request.kind, request.wait, context.is_active)
        return _indexes(built)

    def list_indexes(self, request: pb.ListIndexesRequest, _context: grpc.ServicerContext) -> pb.IndexesReply:
        return _indexes(self._database.indexes(request.name))

    def verify_indexes(self, request: pb.VerifyIndexesRequest, context: grpc.ServicerContext) -> pb.VerifyIndexesReply:
        with self._streams.entered(context) as stream:
            self._streams.begin(stream)
            return pb.VerifyIndexesReply(indexes=self._database.verify(request.name))

    def context_statistics(
        self, request: pb.ContextStatisticsRequest, _context: grpc.ServicerContext
    ) -> pb.ContextStatisticsReply:
        return codec.to_statistics(self._database.statistics(request.name))

    def create_session(self, request: pb.CreateSessionRequest, _context: grpc.ServicerContext) -> pb.SessionReply:
        spec = codec.from_spec(request.spec)
        if not request.HasField("parts"):
            return self._opened(self._database.create_session(spec, codec.from_tokens(request.tokens)))
        if request.tokens:
            raise InvalidArgument("a session is created of tokens and of parts; expected one of the two")
        state = self._database.lay_out(spec, [codec.from_part(part) for part in request.parts.parts])
        return self._opened(state, codec.to_tokens(state.tokens))

    def update(self, request: pb.UpdateRequest, _context: grpc.ServicerContext) -> pb.UpdateReply:
        with self._sessions.use(request.session_id) as session:
            calls.update(session, request)
        return pb.UpdateReply()

    def attention(self, request: pb.AttentionRequest, _context: grpc.ServicerContext) -> pb.AttentionReply:
        with self._sessions.use(request.session_id) as session:
            return pb.AttentionReply(out=codec.to_array(calls.attention(session, request)))

    def attend(self, request: pb.AttendRequest, _context: grpc.ServicerContext) -> pb.AttentionReply:
        with self._sessions.use(request.session_id) as session:
            return pb.AttentionReply(out=codec.to_array(calls.attend(session, request)))

    def attend_together(self, request: pb.AttendTogetherRequest, _context: grpc.ServicerContext) -> pb.AttentionReply:
        q, k, v = (codec.from_array(array) for array in (request.q, request.k, request.v))
        wanted, starts = from_wanted(request), list(request.starts) or None
        with self._sessions.use_all(request.session_ids) as sessions:
            out = self._database.attend_together(sessions, request.layer, q, k, v, wanted, starts)
        return pb.AttentionReply(out=codec.to_array(out))

    def attention_together(self, request: pb.AttentionTogetherRequest, _context: grpc.ServicerContext) -> pb.AttentionReply:
        q, wanted = codec.from_array(request.q), from_wanted(request)
        with self._sessions.use_all(request.session_ids) as sessions:
            return pb.AttentionReply(out=codec.to_array(self._database.attention_together(sessions, request.layer, q, wanted)))

    def decode(self, requests: Iterator[pb.DecodeRequest], context: grpc.ServicerContext) -> Iterator[pb.DecodeReply]:
        with self._streams.entered(context) as stream:
            for request in requests:
                self._streams.begin(stream)
                yield self._answer(stream, request)
                if not self._streams.end(stream):
                    return

    def fork(self, request: pb.ForkRequest, _context: grpc.ServicerContext) -> pb.SessionReply:
        with self._sessions.use(request.session_id) as session:
            twin = session.fork()
        return self._opened(twin)

    def store(self, request: pb.StoreRequest, _context: grpc.ServicerContext) -> pb.ContextInfo:
        tokens = codec.from_tokens(request.tokens) if request.HasField("tokens") else None
        with self._sessions.use(request.session_id) as session:
            return codec.to_info(session.store(request.name, tokens, chunk=request.chunk))

    def explain(self, request: pb.ExplainRequest, _context: grpc.ServicerContext) -> pb.ExplainReply:
        with self._sessions.use(request.session_id) as session:
            plan = session.explain(request.layer, from_wanted(request), request.analyze)
        return pb.ExplainReply(plan=to_plan(plan))

    def explain_context(self, request: pb.ExplainContextRequest, _context: grpc.ServicerContext) -> pb.ExplainContextReply:
        layer = request.layer if request.HasField("layer") else None
        plans = self._database.explain(request.name, layer, from_wanted(request), request.analyze)
        return pb.ExplainContextReply(plans=map(to_plan, plans))

    def plan_recompute(self, request: pb.PlanRecomputeRequest, _context: grpc.ServicerContext) -> pb.PlanRecomputeReply:
        seconds, ratio = (getattr(request, name) if request.HasField(name) else None for name in ("seconds", "ratio"))
        with self._sessions.use(request.session_id) as session:
            return pb.PlanRecomputeReply(choice=to_choice(session.plan_recompute(seconds, request.floor, ratio)))

    def stats(self, request: pb.StatsRequest, _context: grpc.ServicerContext) -> pb.StatsReply:
        with self._sessions.use(request.session_id) as session:
            return codec.to_stats(session.stats())

    def close_session(self, request: pb.CloseSessionRequest, _context: grpc.ServicerContext) -> pb.CloseSessionReply:
        self._sessions.close(request.session_id)
        return pb.CloseSessionReply()

    def _opened(self, state: SessionState, tokens: bytes = b"") -> pb.SessionReply:
        """Owns the session. tokens: its ids, where the client does not know them."""
        layout = map(codec.to_placed, state.layout)
        name, reused, start = self._sessions.add(state), state.reused, state.start
        return pb.SessionReply(session_id=name, reused=reused, start=start, layout=layout, tokens=tokens)

    def _answer(self, stream: OpenStream, request: pb.DecodeRequest) -> pb.DecodeReply:
        """Raises InvalidArgument for a request that holds no call or names another session than the stream's first."""
        kind = request.WhichOneof("call")
        if kind is None:
            raise InvalidArgument("a decode request holds no call; expected an update, an attention or an attend")
        call = getattr(request, kind)
        stream.session = stream.session or call.session_id
        if call.session_id not in {"", stream.session}:
            raise InvalidArgument("a decode request names another session than the stream's first; open a stream for each")
        with self._sessions.use(stream.session) as session:
            out = calls.CALLS[kind](session, call)
        reply = pb.DecodeReply()
        if out is not None:
            codec.put_array(reply.out, out)
        return reply


def handlers(service: KvdbService) -> grpc.GenericRpcHandler:
    """Every call of the contract, each answered by the service's method of its name."""
    return grpc.method_handlers_generic_handler(SERVICE.full_name, {m.name: _handler(service, m.name) for m in SERVICE.methods})


def _handler(service: KvdbService, name: str) -> "edge.Handler":
    method = SERVICE.methods_by_name[name]
    behaviour = getattr(service, sub(r"(?<!^)(?=[A-Z])", "_", name).lower())
    request = None if name == IMPORT else GetMessageClass(method.input_type).FromString
    reply = GetMessageClass(method.output_type).SerializeToString
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(edge.stream(name, behaviour), request, reply)
    return grpc.unary_unary_rpc_method_handler(edge.unary(name, behaviour), request, reply)


def _begin(requests: Iterator[bytes]) -> pb.ImportBegin:
    """The first message of an import. Raises InvalidArgument."""
    first = chunk.deserialize(next(requests, b""))
    return _expect(first, "begin").begin


def _expect(request: Chunk | pb.ImportRequest, step: str) -> pb.ImportRequest:
    given = "chunk" if isinstance(request, Chunk) else request.WhichOneof("step")
    if isinstance(request, Chunk) or given != step:
        raise InvalidArgument(f"an import goes on with {given or 'nothing'}; expected {step}: begin, chunks, then commit")
    return request


def _indexes(infos: Sequence[IndexInfo]) -> pb.IndexesReply:
    return pb.IndexesReply(indexes=map(codec.to_index_info, infos))
