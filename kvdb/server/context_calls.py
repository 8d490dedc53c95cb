"""The calls about stored contexts, without a session."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict

import grpc

from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.plans import to_plan
from kvdb.rpc.query_options import to_query_options
from kvdb.server.streams import Streams
from kvdb.server.tenancy.tenants import AnyDatabase
from kvdb.types import IndexInfo

TOKENS_OF_REPLY = 1 << 17
"""The most ids in a reply, half of the smallest limit of a message."""


class ContextCalls:
    """Calls of the service that name a context, or none; the service sets what they work on."""

    _database: AnyDatabase
    _streams: Streams

    def list_contexts(self, request: pb.ListContextsRequest, _context: grpc.ServicerContext) -> pb.ListContextsReply:
        metadata = codec.from_metadata(request.metadata)
        infos = self._database.contexts(request.prefix, request.limit or None, request.after, metadata)
        return pb.ListContextsReply(contexts=map(codec.to_info, infos))

    def context_tokens(self, request: pb.ContextTokensRequest, _context: grpc.ServicerContext) -> pb.ContextTokensReply:
        ids = self._database.token_ids(request.name)[request.start :]
        return pb.ContextTokensReply(tokens=codec.to_tokens(ids[:TOKENS_OF_REPLY]))

    def match_prefix(self, request: pb.MatchPrefixRequest, _context: grpc.ServicerContext) -> pb.MatchPrefixReply:
        match = self._database.match(codec.from_spec(request.spec), codec.from_tokens(request.tokens), request.salt)
        return pb.MatchPrefixReply(tokens=match.tokens, resident=match.resident)

    def list_tiers(self, _request: pb.ListTiersRequest, _context: grpc.ServicerContext) -> pb.ListTiersReply:
        return pb.ListTiersReply(tiers=map(codec.to_tier, self._database.tiers()))

    def get_context(self, request: pb.GetContextRequest, _context: grpc.ServicerContext) -> pb.ContextInfo:
        return codec.to_info(self._database.get(request.name))

    def update_context(self, request: pb.UpdateContextRequest, _context: grpc.ServicerContext) -> pb.ContextInfo:
        return codec.to_info(self._database.update_context(request.name, codec.from_update(request)))

    def drop_contexts(self, request: pb.DropContextsRequest, _context: grpc.ServicerContext) -> pb.DropContextsReply:
        if request.WhichOneof("which") == "matching":
            wanted = request.matching
            done = self._database.drop_all(wanted.prefix, codec.from_metadata(wanted.metadata))
            return pb.DropContextsReply(dropped=done.names, in_use=done.in_use)
        self._database.drop(*request.names.names)
        return pb.DropContextsReply(dropped=request.names.names)

    def offload_context(self, request: pb.OffloadContextRequest, _context: grpc.ServicerContext) -> pb.OffloadContextReply:
        return pb.OffloadContextReply(nbytes=self._database.offload(request.name))

    def build_index(self, request: pb.BuildIndexRequest, context: grpc.ServicerContext) -> pb.IndexesReply:
        """A call that waits counts among the streams, because it holds a thread as long as they do. It ends with its client."""
        with self._streams.opened(context) if request.wait else nullcontext():
            built = self._database.build_index(request.name, request.kind, request.wait, context.is_active)
        return _indexes(built)

    def list_indexes(self, request: pb.ListIndexesRequest, _context: grpc.ServicerContext) -> pb.IndexesReply:
        return _indexes(self._database.indexes(request.name))

    def verify_indexes(self, request: pb.VerifyIndexesRequest, context: grpc.ServicerContext) -> pb.VerifyIndexesReply:
        with self._streams.opened(context) as stream:
            self._streams.begin(stream)
            return pb.VerifyIndexesReply(indexes=self._database.verify(request.name))

    def context_statistics(
        self, request: pb.ContextStatisticsRequest, _context: grpc.ServicerContext
    ) -> pb.ContextStatisticsReply:
        return codec.to_statistics(self._database.statistics(request.name))

    def explain_context(self, request: pb.ExplainContextRequest, _context: grpc.ServicerContext) -> pb.ExplainContextReply:
        layer = request.layer if request.HasField("layer") else None
        plans = self._database.explain(request.name, layer, to_query_options(request), request.analyze)
        return pb.ExplainContextReply(plans=map(to_plan, plans))

    def list_sessions(self, _request: pb.ListSessionsRequest, _context: grpc.ServicerContext) -> pb.ListSessionsReply:
        return pb.ListSessionsReply(sessions=(pb.SessionInfo(**asdict(session)) for session in self._database.sessions()))

    def explain_session(self, request: pb.ExplainSessionRequest, _context: grpc.ServicerContext) -> pb.ExplainContextReply:
        layer = request.layer if request.HasField("layer") else None
        plans = self._database.explain_session(request.label, layer, to_query_options(request), request.analyze)
        return pb.ExplainContextReply(plans=map(to_plan, plans))


def _indexes(infos: Sequence[IndexInfo]) -> pb.IndexesReply:
    return pb.IndexesReply(indexes=map(codec.to_index_info, infos))
