"""KV read back: a call that is answered chunk by chunk."""

from collections.abc import Iterator
from contextlib import ExitStack

import grpc

from kvdb.errors import InvalidArgument
from kvdb.rpc import kv_chunk
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.kv_chunk import CHUNK_BYTES, Chunk
from kvdb.server.inflight import InflightBytes
from kvdb.server.interceptors import answering
from kvdb.server.session_registry import Sessions
from kvdb.server.streams import Streams
from kvdb.server.tenancy.tenants import AnyDatabase
from kvdb.session.state import SessionState


class ReadCalls:
    """The call of the service that reads KV back; the service sets what it works on.

    A stream holds one chunk at a time, which counts in the bytes in flight until gRPC has taken it; gRPC takes no more than the
    client reads. A client that stops reading is ended as one that says nothing.
    """

    _database: AnyDatabase
    _sessions: Sessions
    _streams: Streams
    _inflight: InflightBytes

    def read_context(self, request: pb.ReadContextRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        layers, start, stop = list(request.layers), int(request.start), int(request.stop)
        with ExitStack() as held:
            stream = held.enter_context(self._streams.opened(context, finishes=True))
            session = self._source(request, held)
            session.check_read(layers, start, stop)
            step = max(1, CHUNK_BYTES // session.spec.token_nbytes)
            for layer in layers:
                for at in range(start, stop, step):
                    end = min(at + step, stop)
                    self._streams.begin(stream)
                    counted = self._inflight.wait(stream.client, (end - at) * session.spec.token_nbytes)
                    try:
                        with answering(context):
                            ((k, v),) = session.read([layer], at, end)
                        data = kv_chunk.serialize(Chunk(layer, k, v))
                        self._streams.end(stream)
                        yield data
                    finally:
                        self._inflight.give_back(stream.client, counted)

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
