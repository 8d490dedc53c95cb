"""An import of a tenant, which is told of under the tenant's own name."""

from kvdb.ingest.import_writer import ImportWriter
from kvdb.server.tenancy.names import Names
from kvdb.types import Array, ContextInfo, ModelSpec


class TenantImport:
    """An `ImportWriter` whose context has the tenant's name when it is told of."""

    def __init__(self, writer: ImportWriter, names: Names) -> None:
        self._writer = writer
        self._names = names
        self.start = writer.start

    @property
    def spec(self) -> ModelSpec:
        return self._writer.spec

    def write(self, layer: int, k: Array, v: Array) -> None:
        self._writer.write(layer, k, v)

    def sample(self, layer: int, q: Array) -> None:
        self._writer.sample(layer, q)

    def commit(self) -> ContextInfo:
        return self._names.info(self._writer.commit())

    def abort(self) -> None:
        self._writer.abort()
