"""An import on a server: one streaming call. Unless it ends with a commit, nothing is stored."""

from collections.abc import Mapping

import kvdb.forks as forks
import kvdb.validate as validate
from kvdb.client.remote.connection import Connection
from kvdb.errors import SessionClosed
from kvdb.rpc import codec, kv_chunk
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.calls import OF_REQUEST
from kvdb.rpc.kv_chunk import CHUNK_BYTES, Chunk
from kvdb.rpc.request_parts import cut
from kvdb.types import Array, ContextInfo, ModelSpec

METHOD = OF_REQUEST[pb.ImportRequest].path
ABORT_SECONDS_MAX = 5.0
"""How long an abort waits for the server to confirm that everything was given back."""


class RemoteImport:
    """`kvdb.client.transport.ImportTransport` over gRPC; used from one thread at a time.

    Pieces are sent without waiting for an answer, so that a later `write`, or `commit`, may raise the error of an earlier one.
    """

    def __init__(self, connection: Connection, spec: ModelSpec, begin: pb.ImportBegin) -> None:
        self._connection = connection
        self.spec = spec
        self._stream = connection.stream(METHOD, pb.ImportReply.FromString)
        self._open = True
        forks.stays_behind(self, *forks.IMPORT)
        self.start: int = self._exchange(pb.ImportRequest(begin=begin)).begun.start

    def write(self, layer: int, k: Array, v: Array, *, indexer: bool = False, start: int | None = None) -> None:
        """Send the next tokens of one layer, cut along tokens; see `kvdb.ingest.import_writer.ImportWriter.write`. Raises what
        the server raised."""
        self._check_open()
        shape = self.spec.shape(validate.own_place(self.spec, layer, indexer=indexer))
        validate.keys_values(shape, k, v)
        tokens = max(1, min(CHUNK_BYTES, self._connection.payload_bytes_max) // shape.token_nbytes)
        self._connection.check_size("one token of a layer", shape.token_nbytes)
        for at in range(0, k.shape[1], tokens):
            piece = slice(at, at + tokens)
            first = None if start is None else start + at
            self._stream.send(kv_chunk.serialize(Chunk(int(layer), k[:, piece], v[:, piece], indexer, first)))

    def put_state(self, layer: int, arrays: Mapping[str, Array], position: int | None = None) -> None:
        """Send the state of one layer; see `kvdb.ingest.import_writer.ImportWriter.put_state`. Raises what the server raised, and
        MessageTooLarge."""
        self._check_open()
        given = validate.state(self.spec, layer, arrays)
        state = pb.LayerState(layer=int(layer), arrays=codec.to_arrays(given), position=position)
        self._send(f"the state of layer {layer}", pb.ImportRequest(state=state))

    def sample(self, layer: int, q: Array) -> None:
        """Send queries of one layer, `[q_heads, m, head_dim]`. Raises what the server raised, and MessageTooLarge."""
        self._check_open()
        validate.queries(self.spec.shape(validate.place(self.spec, layer)), q)
        sample = pb.ImportSample(layer=int(layer), q=codec.to_array(q))
        self._send(f"the sample of layer {layer}'s queries", pb.ImportRequest(sample=sample))

    def _send(self, what: str, request: pb.ImportRequest) -> None:
        """Send a step of any size, in several messages where it takes them. Raises MessageTooLarge."""
        data = kv_chunk.serialize(request)
        self._connection.check_stream_size(what, len(data))
        if len(data) <= self._connection.message_bytes_max:
            self._stream.send(data)
            return
        for part in cut(data, self._connection.message_bytes_max):
            self._stream.send(kv_chunk.serialize(pb.ImportRequest(part=part)))

    def commit(self) -> ContextInfo:
        """Publish the context. Raises what the server raised; then nothing was stored."""
        self._check_open()
        reply = self._exchange(pb.ImportRequest(commit=pb.ImportCommit()))
        self._open = False
        self._stream.finish(ABORT_SECONDS_MAX)
        return codec.from_info(reply.committed)

    def abort(self) -> None:
        """Let the server give everything back. After the end of the import, this does nothing."""
        if self._open:
            self._open = False
            self._stream.finish(ABORT_SECONDS_MAX)

    def _exchange(self, request: pb.ImportRequest) -> pb.ImportReply:
        group = "store" if request.WhichOneof("step") == "commit" else "attend"
        with self._connection.alarm.within(self._stream, self._connection.limits.group(group)):
            self._stream.send(kv_chunk.serialize(request))
            return self._stream.receive()

    def _check_open(self) -> None:
        if not self._open:
            raise SessionClosed("the import has ended; begin another")
