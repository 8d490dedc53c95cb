"""An import whose pieces come through shared memory: they are copied from the region into blocks."""

from collections.abc import Callable, Mapping

from kvdb.errors import InvalidArgument, MessageTooLarge
from kvdb.events import new_request, origin, originating
from kvdb.ingest.import_writer import ImportWriter
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.shared_records import CallKind, SharedRequest
from kvdb.rpc.shared_region import SharedRegion
from kvdb.server.admission.admission import Admission
from kvdb.server.admission.engine_work import work_on
from kvdb.server.interceptors import parsed
from kvdb.server.tenancy.imports import TenantImport
from kvdb.server.tenancy.tenants import AnyDatabase

SAMPLE_BYTES_MAX = 64 << 20


class SharedImports:
    """The imports of one client, of which one is under way at a time. Used by one thread. calls: the method of each kind of
    request, which returns how many bytes of a reply it wrote."""

    def __init__(self, database: AnyDatabase, admission: Admission, region: SharedRegion) -> None:
        self._database = database
        self._admission = admission
        self._region = region
        self._writer: ImportWriter | TenantImport | None = None
        self._sample_bytes = b""  # of the sample whose pieces come
        self.calls: Mapping[int, Callable[[SharedRequest], int]] = {
            CallKind.IMPORT_BEGIN: self._begin,
            CallKind.IMPORT_WRITE: self._write,
            CallKind.IMPORT_COMMIT: self._commit,
            CallKind.IMPORT_ABORT: self._abort,
            CallKind.IMPORT_SAMPLE: self._sample,
        }

    @property
    def busy(self) -> bool:
        """Whether an import is under way."""
        return self._writer is not None

    def close(self) -> None:
        """Abort the import that is under way, if there is one."""
        writer, self._writer = self._writer, None
        self._sample_bytes = b""
        if writer is not None:
            writer.abort()

    def _begin(self, request: SharedRequest) -> int:
        begin = parsed(pb.ImportBegin, self._region.read(request.message, request.message_nbytes))
        if self._writer is not None:
            raise InvalidArgument("an import is under way already; expected its end before another begins")
        base = begin.base if begin.HasField("base") else None
        tokens = codec.from_tokens(begin.tokens)
        rest = base, codec.from_retention(begin.retention), begin.salt
        self._writer = self._database.begin_import(codec.from_spec(begin.spec), tokens, begin.name, *rest)
        return self._reply(request, pb.ImportBegun(start=self._writer.start).SerializeToString())

    def _write(self, request: SharedRequest) -> int:
        writer = self._open()
        shape = writer.spec.kv_heads, request.tokens, writer.spec.head_dim
        k, v = (self._region.view(at, shape, writer.spec.numpy_dtype) for at in (request.k, request.v))
        with self._admission.admitted(work_on(None, request.layer, request.tokens)):
            writer.write(request.layer, k, v)
        return 0

    def _commit(self, request: SharedRequest) -> int:
        with originating(origin()._replace(request=new_request())):
            info = self._open().commit()
        self._writer = None
        return self._reply(request, codec.to_info(info).SerializeToString())

    def _sample(self, request: SharedRequest) -> int:
        """Take a piece of the message of a sample, and with the last of them the sample."""
        writer = self._open()
        piece = self._region.read(request.message, request.message_nbytes)
        if len(self._sample_bytes) + len(piece) + request.tokens > SAMPLE_BYTES_MAX:
            self._sample_bytes = b""
            raise MessageTooLarge(f"a sample has more than {SAMPLE_BYTES_MAX:,} bytes; sample fewer queries")
        self._sample_bytes += piece
        if request.tokens:
            return 0
        whole, self._sample_bytes = self._sample_bytes, b""
        sample = parsed(pb.ImportSample, whole)
        writer.sample(sample.layer, codec.from_array(sample.q))
        return 0

    def _abort(self, _request: SharedRequest) -> int:
        self.close()
        return 0

    def _reply(self, request: SharedRequest, data: bytes) -> int:
        if len(data) > request.reply_room:
            raise InvalidArgument(f"a reply has {len(data):,} bytes; expected room for it, not for {request.reply_room:,}")
        self._region.write(request.reply, data)
        return len(data)

    def _open(self) -> ImportWriter | TenantImport:
        if self._writer is None:
            raise InvalidArgument("no import is under way; expected its begin first")
        return self._writer
