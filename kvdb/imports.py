"""An import under way: KV goes straight into blocks, and nothing is visible until it is whole."""

from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np

import kvdb.check as check
from indexes.base import Float32
from kvdb.catalog.catalog import release
from kvdb.catalog.segment import Views, visible_tokens
from kvdb.errors import NonFiniteError, PositionError, SessionClosed
from kvdb.publishing import Publisher
from kvdb.storage.table import BlockTable
from kvdb.types import Array, ContextInfo, ModelSpec, Tokens


class Engine(Protocol):
    """What an import needs of the database that began it."""

    def ended(self, writing: "Import") -> None: ...


class Target(NamedTuple):
    """What an import is to become. base: of a chunk, the position of its first token; None for a context."""

    spec: ModelSpec
    tokens: Tokens
    name: str
    base: int | None = None


class Import:
    """Takes over the caller's references to `views`, the stored prefix, and the empty `tables`, one a layer.

    Layers may come in any order and any pieces; the pieces of one layer come in the order of their tokens.
    """

    def __init__(self, engine: Engine, publisher: Publisher, target: Target, views: Views, tables: list[BlockTable]) -> None:
        self.spec = target.spec
        self.views = views
        self.tables = tables
        self.start = visible_tokens(views)
        self._engine = engine
        self._publisher = publisher
        self._tokens = target.tokens
        self._name = target.name
        self._base = target.base
        self._samples: dict[int, Float32] = {}
        self._lock = Lock()
        self._open = True

    def write(self, layer: int, k: Array, v: Array) -> None:
        """Append the KV of the next tokens of one layer, `[kv_heads, n, head_dim]`, from token `start` on.

        Raises LayerError, ShapeError, DtypeError, NonFiniteError, CapacityError, or PositionError past the last token;
        the import may then go on or be aborted.
        """
        with self._lock:
            self._check_open()
            check.layer(self.spec, layer)
            n = check.keys_values(self.spec, k, v)
            table, new = self.tables[layer], len(self._tokens) - self.start
            if table.length + n > new:
                raise PositionError(
                    f"layer {layer} was given {table.length + n} tokens; expected {new}, those from {self.start} on"
                )
            table.append(k, v)

    def sample(self, layer: int, q: Array) -> None:
        """Queries of one layer, `[q_heads, m, head_dim]` after RoPE, from which its indexes may learn. Of several
        samples the last counts, and one without queries is none.

        Raises LayerError, ShapeError, DtypeError or NonFiniteError.
        """
        with self._lock:
            self._check_open()
            check.layer(self.spec, layer)
            n = check.queries(self.spec, q)
            if not self.tables[layer].layout.finite(q):
                raise NonFiniteError(f"queries of layer {layer} hold NaN or infinity; expected finite numbers")
            if n:
                self._samples[layer] = q.astype(np.float32)

    def commit(self) -> ContextInfo:
        """Publish the context. Raises PositionError while a layer is not whole, and AlreadyExists."""
        with self._lock:
            self._check_open()
            new = len(self._tokens) - self.start
            for layer, table in enumerate(self.tables):
                if table.length != new:
                    raise PositionError(f"layer {layer} was given {table.length} of {new} tokens; write the rest, then commit")
            self._open = False
            try:
                if self._base is not None:
                    return self._commit_chunk(self._base)
                return self._publisher.publish(
                    self.spec, self._name, self.views, self._tokens[self.start :], self.tables, self._samples
                )
            finally:
                self._engine.ended(self)

    def _commit_chunk(self, base: int) -> ContextInfo:
        try:
            tables = [] if self.views else self.tables
            return self._publisher.publish_chunk(self.spec, self._name, self._tokens, tables, base, self._samples)
        finally:
            release(self.views)

    def abort(self) -> None:
        """Give everything back. After the end it does nothing."""
        with self._lock:
            if self._open:
                self._open = False
                for table in self.tables:
                    table.release()
                release(self.views)
                self._engine.ended(self)

    def _check_open(self) -> None:
        if not self._open:
            raise SessionClosed("the import has ended; begin another")
