"""The steps of an import stream: each message is handed to the import's method of its name."""

from collections.abc import Iterator

from kvdb.errors import InvalidArgument
from kvdb.ingest.import_writer import ImportWriter
from kvdb.rpc import codec, kv_chunk
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.call import given
from kvdb.rpc.kv_chunk import Chunk
from kvdb.server.admission.admission import Admission
from kvdb.server.admission.engine_work import work_on
from kvdb.server.incoming import Incoming
from kvdb.server.tenancy.imports import TenantImport
from kvdb.types import ContextInfo


def begin(requests: Iterator[bytes]) -> pb.ImportBegin:
    """The first message of an import. Raises InvalidArgument."""
    first = kv_chunk.deserialize(next(requests, b""))
    return _expect(first, "begin").begin


def carry_out(writer: ImportWriter | TenantImport, incoming: Incoming, admission: Admission, data: bytes) -> ContextInfo | None:
    """Carry out what one message of an import asks for; what was published, once it is. Raises InvalidArgument."""
    request = kv_chunk.deserialize(data)
    try:
        if isinstance(request, Chunk) or request.WhichOneof("step") != "part":
            incoming.count(len(data))
            return _written(writer, admission, request)
        whole = incoming.put_together(request.part)
        return None if whole is None else _written(writer, admission, kv_chunk.deserialize(whole))
    finally:
        incoming.answered()


def _written(writer: ImportWriter | TenantImport, admission: Admission, request: Chunk | pb.ImportRequest) -> ContextInfo | None:
    """Carry out one step of an import; what was published, once it is. Raises InvalidArgument."""
    if isinstance(request, Chunk):
        with admission.admitted(work_on(None, request.layer, request.k.shape[-2])):
            writer.write(request.layer, request.k, request.v, indexer=request.indexer, start=request.start)
    elif request.WhichOneof("step") == "sample":
        writer.sample(request.sample.layer, codec.from_array(request.sample.q))
    elif request.WhichOneof("step") == "state":
        state = request.state
        writer.put_state(state.layer, codec.from_arrays(state.arrays), given(state, "position"))
    else:
        _expect(request, "commit")
        return writer.commit()
    return None


def _expect(request: Chunk | pb.ImportRequest, step: str) -> pb.ImportRequest:
    given = "chunk" if isinstance(request, Chunk) else request.WhichOneof("step")
    if isinstance(request, Chunk) or given != step:
        raise InvalidArgument(f"an import goes on with {given or 'nothing'}; expected {step}: begin, chunks, then commit")
    return request
