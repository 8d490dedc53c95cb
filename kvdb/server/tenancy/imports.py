"""An import of a tenant, which is told of under the tenant's own name."""

from collections.abc import Mapping

from kvdb.ingest.import_writer import ImportWriter
from kvdb.server.tenancy.names import Names
from kvdb.server.tenancy.quota import Holdings, Quota
from kvdb.types import Array, ContextInfo, ModelSpec


class TenantImport:
    """An `ImportWriter` whose context has the tenant's name when it is told of."""

    def __init__(self, writer: ImportWriter, names: Names, quota: Quota, announced: Holdings) -> None:
        """announced: what the quota counts until the import ends."""
        self._quota = quota
        self._announced = announced
        self._open = True
        self._writer = writer
        self._names = names
        self.start = writer.start

    @property
    def spec(self) -> ModelSpec:
        return self._writer.spec

    def write(self, layer: int, k: Array, v: Array, *, indexer: bool = False, start: int | None = None) -> None:
        self._quota.pace(k.nbytes + v.nbytes)
        self._writer.write(layer, k, v, indexer=indexer, start=start)

    def put_state(self, layer: int, arrays: Mapping[str, Array], position: int | None = None) -> None:
        self._quota.pace(sum(array.nbytes for array in arrays.values()))
        self._writer.put_state(layer, arrays, position)

    def sample(self, layer: int, q: Array) -> None:
        self._writer.sample(layer, q)

    def commit(self) -> ContextInfo:
        info = self._names.info(self._writer.commit())
        self._ended()
        return info

    def abort(self) -> None:
        self._writer.abort()
        self._ended()

    def _ended(self) -> None:
        was, self._open = self._open, False
        if was:
            self._quota.done(self._announced)
