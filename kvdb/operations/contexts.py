"""What can be asked of stored contexts, and done with them, without a session."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import kvdb.catalog.residency as residency
import kvdb.validate as validate
from kvdb.catalog.catalog import Catalog
from kvdb.catalog.segment_view import release_views, visible_tokens
from kvdb.config import Config
from kvdb.errors import NotFound
from kvdb.events import Kind
from kvdb.session.open_handles import OpenHandles, counted_call
from kvdb.storage.store import BlockStore
from kvdb.types import (
    ContextInfo,
    ContextStatistics,
    ContextUpdate,
    Dropped,
    ModelSpec,
    PrefixMatch,
    Retention,
    TierStats,
    Tokens,
    ViewInfo,
)


class ContextOperations:
    """The calls of a database that name a context, or none. The database sets what they work on. Thread-safe."""

    config: Config
    handles: OpenHandles
    _catalog: Catalog
    _blocks: BlockStore

    @counted_call
    def contexts(
        self, prefix: str = "", limit: int | None = None, after: str = "", metadata: Mapping[str, Any] | None = None
    ) -> list[ContextInfo]:
        """The contexts in the order of their names: those that begin with `prefix` and come behind `after`, at most `limit`.
        metadata: only those of which all of it is noted."""
        self._catalog.drop_expired()
        return [context.info() for context in self._catalog.contexts(prefix, limit, after, metadata or {})]

    @counted_call
    def match(self, spec: ModelSpec, tokens: Tokens, salt: str = "") -> PrefixMatch:
        """How many leading tokens are stored, and in which tier, without opening a session. salt: as in `create_session`. Raises
        what `create_session` raises for tokens that are no ids."""
        views = self._catalog.match(spec, validate.token_ids(tokens), validate.salt(salt))
        try:
            resident = sum(view.visible for view in views if view.segment.resident)
            return PrefixMatch(visible_tokens(views), resident)
        finally:
            release_views(views)

    @counted_call
    def token_ids(self, name: str) -> Tokens:
        """The ids of all tokens of a context, int32 `[n]`. Raises NotFound."""
        return self._catalog.get(name).tokens

    @counted_call
    def get(self, name: str) -> ContextInfo:
        """Raises NotFound."""
        self._catalog.drop_expired()
        return self._catalog.get(name).info()

    @counted_call
    def is_shared(self, name: str, tenant: str) -> bool:
        """Whether a context is shared with that tenant of a server, which one that is not there is not."""
        return (context := self._catalog.peek(name)) is not None and tenant in context.life.shared_with

    @counted_call
    def has(self, name: str) -> bool:
        """Whether there is a context of that name."""
        return self._catalog.peek(name) is not None

    @counted_call
    def count_contexts(self) -> int:
        """How many contexts are stored."""
        self._catalog.drop_expired()
        return self._catalog.count

    @counted_call
    def views(self, name: str) -> list[ViewInfo]:
        """What a context sees of its segments, in their order. Raises NotFound."""
        return self._catalog.get(name).view_infos()

    @counted_call
    def update_context(self, name: str, change: ContextUpdate) -> ContextInfo:
        """Change how long a context is kept, what is noted of it, who may read it, or its name. Returns what it is then. Raises
        NotFound, AlreadyExists for a name that is taken, and CapacityError or Unavailable where a store cannot write it."""
        self._catalog.drop_expired()
        return self._catalog.update(name, change).info()

    @counted_call
    def drop(self, *names: str) -> None:
        """Forget contexts, all or none. Open sessions over them go on; segments that nobody holds any more are freed. Raises
        NotFound."""
        self._catalog.drop(*names)
        for name in names:
            self._catalog.events.tell(Kind.DROPPED, context=name)

    @counted_call
    def drop_all(self, prefix: str, metadata: Mapping[str, Any]) -> Dropped:
        """Forget the contexts whose names begin with `prefix` and of which all of `metadata` is noted, but for those all of
        which a session or an import stands on. Raises what `drop` raises, and then none is forgotten."""
        while True:
            found = self._catalog.contexts(prefix, metadata=metadata)
            seen = self.handles.seen()
            in_use = tuple(context.name for context in found if context.ends_in(seen))
            names = tuple(context.name for context in found if context.name not in in_use)
            with suppress(NotFound):  # somebody dropped one meanwhile
                self.drop(*names)
                return Dropped(names, in_use)

    @counted_call
    def tiers(self) -> list[TierStats]:
        """What each tier holds, one entry for each size of block."""
        return self._blocks.stats()

    def tier_limits(self) -> dict[str, int]:
        """The most bytes that a tier may take, by its name, of those that have a limit."""
        storage = self.config.storage
        limits = {"gpu": storage.gpu_bytes_max or None, "cpu": storage.cpu_bytes_max, "disk": storage.disk_bytes_max}
        return {tier: most for tier, most in limits.items() if most is not None}

    @counted_call
    def disk_nbytes(self, names: Iterable[str]) -> int:
        """How many bytes these contexts have on disk; what they share counts for each."""
        views = [view for name in names if (context := self._catalog.peek(name)) is not None for view in context.views]
        return sum(view.segment.nbytes for view in views if view.segment.place is not None)

    @counted_call
    def goes_to_disk(self, retention: Retention) -> bool:
        """Whether a context that is stored so is written to disk. Raises Unsupported."""
        return self._catalog.retention(retention).durability != "memory"

    @counted_call
    def offload(self, name: str) -> int:
        """Move a context's segments to disk; see `residency.offload`. Raises NotFound too."""
        with self._catalog.borrow(name) as context:
            left = residency.offload(context, self._blocks)
        self._catalog.events.tell(Kind.OFFLOADED, context=name, bytes=left)
        return left

    @counted_call
    def statistics(self, name: str) -> ContextStatistics:
        """Statistics of the queries that searched a context. Raises NotFound."""
        return self._catalog.get(name).statistics()
