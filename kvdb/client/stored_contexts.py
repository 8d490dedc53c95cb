"""What a user asks of stored contexts, and does with them, without a session."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

import kvdb.deadlines as deadlines
import kvdb.types.tenants as tenants
import kvdb.validate as validate
from kvdb.client.arrays import token_ids
from kvdb.client.context import Context
from kvdb.client.query_keywords import QueryKeywords, query_options
from kvdb.client.transport import Transport
from kvdb.errors import InvalidArgument, LayerError
from kvdb.types import (
    LAYERS_MAX,
    BackedUp,
    Checked,
    ContextStatistics,
    ContextUpdate,
    DatabaseStatus,
    Dropped,
    IndexInfo,
    ModelSpec,
    PrefixMatch,
    SessionInfo,
    Space,
    TierStats,
    UnknownFile,
)
from query_optimizer.plan import Plan
from query_optimizer.query_options import QueryOptions


class StoredContexts:
    """The contexts of a database, by their names. Thread-safe."""

    _transport: Transport

    def contexts(
        self,
        prefix: str = "",
        *,
        metadata: Mapping[str, Any] | None = None,
        limit: int | None = None,
        after: str = "",
        timeout: float | None = None,
    ) -> list[Context]:
        """The stored contexts, in the order of their names.

        prefix: only names that begin like this. metadata: only contexts of which all of it is noted. limit: how many at most, at
        least 1. after: only names behind this one, so that the last of a page begins the next. timeout: in seconds.
        Raises InvalidArgument and DeadlineExceeded.
        """
        page = validate.text("prefix", prefix), validate.limit(limit), validate.text("after", after)
        with deadlines.within(timeout):
            found = self._transport.contexts(*page, validate.metadata({} if metadata is None else metadata))
        return [Context(self._transport, info) for info in found]

    def pin(self, *names: str, timeout: float | None = None) -> None:
        """Keep contexts whatever room is needed, until `unpin`: they stay in the tier that they are in. Raises NotFound for the
        first that is not there; those before it are pinned."""
        with deadlines.within(timeout):
            for name in [validate.name(name) for name in names]:
                self._transport.update_context(name, ContextUpdate(pinned=True))

    def unpin(self, *names: str, timeout: float | None = None) -> None:
        """Undo `pin`, however often that was called. Raises NotFound as that does."""
        with deadlines.within(timeout):
            for name in [validate.name(name) for name in names]:
                self._transport.update_context(name, ContextUpdate(pinned=False))

    def update(
        self,
        name: str,
        *,
        pinned: bool | None = None,
        ttl: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        shared_with: Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> Context:
        """Change how long a context is kept, what is noted of it, or who may read it, for all who use the database; None leaves
        what there is.

        pinned: see `pin`. ttl: in how many seconds from now it is dropped, pinned or not; math.inf for never. metadata: what to
        note of it from now on, as small as 16 KiB of JSON. shared_with: the other tenants of a server that may read it from now
        on, as OWNER/NAME: they get and read it, and lay it out as a part of sessions, which go on when it is shared no more;
        they cannot find it by its tokens, list or change it, nor store what stands on it. Returns the context as it is then.

        Raises NotFound and InvalidArgument, and CapacityError or Unavailable where a store cannot write it.
        """
        change = ContextUpdate(
            pinned=None if pinned is None else validate.flag("pinned", pinned),
            ttl=None if ttl is None else validate.ttl(ttl),
            metadata=None if metadata is None else validate.metadata(metadata),
            shared_with=None if shared_with is None else tenants.shared_with(shared_with),
        )
        with deadlines.within(timeout):
            return Context(self._transport, self._transport.update_context(validate.name(name), change))

    def rename(self, name: str, new: str, *, timeout: float | None = None) -> Context:
        """Give a context another name; what reads it goes on. Raises NotFound, and AlreadyExists for a name that is taken."""
        change = ContextUpdate(name=validate.name(new))
        with deadlines.within(timeout):
            return Context(self._transport, self._transport.update_context(validate.name(name), change))

    def match(self, spec: ModelSpec, tokens: Any, *, salt: str = "", timeout: float | None = None) -> PrefixMatch:
        """How many leading tokens of a prompt are stored, and how many of these are in main memory, without opening a session.

        salt: as in `import_context`. timeout: in seconds. Raises ShapeError, DtypeError or InvalidArgument for tokens that are no
        ids, and DeadlineExceeded.
        """
        with deadlines.within(timeout):
            return self._transport.match(validate.spec(spec), token_ids(tokens), validate.salt(salt))

    def get(self, name: str, *, timeout: float | None = None) -> Context:
        """The context of that name. timeout: in seconds. Raises NotFound and DeadlineExceeded."""
        with deadlines.within(timeout):
            return Context(self._transport, self._transport.get(validate.name(name)))

    def drop(self, *names: str, timeout: float | None = None) -> None:
        """Forget contexts, all of them or none, in one call and, of a store, one transaction. Open sessions over them go on;
        segments that nobody holds any more are freed. Raises NotFound for a name that is not there, and CapacityError or
        Unavailable where a store cannot write it; then all are as they were. timeout: in seconds; DeadlineExceeded leaves open
        whether they were dropped."""
        if names:
            with deadlines.within(timeout):
                self._transport.drop(*[validate.name(name) for name in names])

    def drop_all(self, prefix: str = "", *, metadata: Mapping[str, Any] | None = None, timeout: float | None = None) -> Dropped:
        """Forget the contexts whose names begin with `prefix` and of which all of `metadata` is noted, in one call and one
        transaction, but for those that a session stands on. Says which were forgotten, and which are in use.

        Raises InvalidArgument without a prefix and metadata, and CapacityError or Unavailable where a store cannot write it; then
        none is forgotten.
        """
        wanted = validate.metadata({} if metadata is None else metadata)
        if not validate.text("prefix", prefix) and not wanted:
            raise InvalidArgument("drop_all was given no prefix and no metadata, which would forget everything; expected one")
        with deadlines.within(timeout):
            return self._transport.drop_all(prefix, wanted)

    def offload(self, name: str, *, timeout: float | None = None) -> int:
        """Move a context's KV to disk, and its indexes out of memory. Returns the bytes of main memory that were freed at once.

        KV that a session reads, or an index is built over, leaves memory when that ends. The next session over the context
        brings it back layer by layer, and answers queries of a layer as soon as that is back. Raises NotFound, Unsupported for a
        database without storage.disk_path, CapacityError for a full disk or more than storage.disk_bytes_max, Unavailable for a
        folder that cannot be written; what was not written is in memory as before.
        """
        with deadlines.within(timeout):
            return self._transport.offload(validate.name(name))

    def build_index(self, name: str, kind: str = "flat", *, wait: bool = True, timeout: float | None = None) -> list[IndexInfo]:
        """Build an index over a context's keys, which queries may search from then on. Returns the indexes that there are then.

        kind: "flat", "quantized", "coarse-bounds", "coarse-means", "coarse-clusters" or "hnsw". wait: whether to return when it
        is ready; otherwise it is built in the background. Segments shorter than indexes.segment_tokens_min are read whole and
        get none.
        Raises NotFound, InvalidArgument for another kind, CapacityError where all indexes together would take more than
        indexes.bytes_max, Unsupported for a kind whose library is missing.
        """
        with deadlines.within(timeout):
            return self._transport.build_index(validate.name(name), validate.kind(kind), validate.flag("wait", wait))

    def indexes(self, name: str, *, timeout: float | None = None) -> list[IndexInfo]:
        """The indexes over a context's segments, ready or being built. Raises NotFound."""
        with deadlines.within(timeout):
            return self._transport.indexes(validate.name(name))

    def verify(self, name: str, *, timeout: float | None = None) -> int:
        """Check every index of a context against its keys. Returns how many there are. Raises NotFound or IntegrityError."""
        with deadlines.within(timeout):
            return self._transport.verify(validate.name(name))

    def check(self, name: str, *, timeout: float | None = None) -> Checked:
        """Read everything that is on disk of a context, keys, values, indexes, evidence and statistics, and compare it with its
        checksums, and indexes in memory with their keys. Raises NotFound, IntegrityError, Unavailable or CapacityError."""
        with deadlines.within(timeout):
            return self._transport.check(validate.name(name))

    def check_store(self, *, timeout: float | None = None) -> list[str]:
        """Prove that every block and every file is owned by what is stored or open, and by nothing else.

        Returns the names of contexts that were found damaged when the store was opened: they are not listed and not answered
        from, and can be dropped. Call it while nothing is being imported. Raises IntegrityError.
        """
        with deadlines.within(timeout):
            return self._transport.check_store()

    def unknown_files(self, *, remove: bool = False, timeout: float | None = None) -> list[UnknownFile]:
        """The files of the store's segments that its catalogue did not know when it was opened: the catalogue may be older than
        they are, and the newer one names them, or they are what dead processes left. remove: remove them; nothing brings them
        back. Raises IntegrityError where they may be of contexts that were damaged, and Unavailable."""
        with deadlines.within(timeout):
            return self._transport.unknown_files(validate.flag("remove", remove))

    def compact(self, *, timeout: float | None = None) -> int:
        """Give back the space of tokens that no context names any more, and of blocks that are hardly filled, in memory and on
        disk, while queries go on. Returns the bytes of blocks that were given back. Raises CapacityError without room for what
        takes their place, Unavailable, and IntegrityError for a segment on disk that was changed."""
        with deadlines.within(timeout):
            return self._transport.compact()

    def status(self, *, timeout: float | None = None) -> DatabaseStatus:
        """How the database is used at the moment: since when, by how many sessions and calls, and with which indexes. It takes
        time with the number of contexts."""
        with deadlines.within(timeout):
            return self._transport.status()

    def space(self, *, timeout: float | None = None) -> Space:
        """How many bytes of blocks the stored contexts hold, in memory and on disk, and the least that what they name can take.
        It takes time with the number of contexts."""
        with deadlines.within(timeout):
            return self._transport.space()

    def backup(self, folder: str | Path, *, link: bool = False, timeout: float | None = None) -> BackedUp:
        """Copy the store to a new folder, or an empty one, while sessions and imports go on; `kvdb.connect` opens the copy. On a
        server it is a folder of the server's machine, by its absolute path.

        Files are copied, by reflinks where the file system has them, and the copies read and compared with their checksums. link:
        give the files of segments and indexes a second name instead (hard links): that takes no room, and what damages one
        damages both. Contexts of the durability "memory" are left out. Raises InvalidArgument for a folder that is not empty
        and for links that cannot be, Unsupported for a database without a store, IntegrityError, also where the store itself is
        damaged, CapacityError or Unavailable; then the folder is no store.
        """
        with deadlines.within(timeout):
            return self._transport.backup(str(folder), validate.flag("link", link))

    def explain(
        self,
        name: str,
        layer: int | None = None,
        *,
        analyze: bool = False,
        timeout: float | None = None,
        options: QueryOptions | None = None,
        **keywords: Unpack[QueryKeywords],
    ) -> list[Plan]:
        """The plans of a query by one more token behind a context, one for each layer, or only for the given layer.

        analyze: carry the plans out, for queries that were kept when the context was stored. options, keywords: what the query
        asks for, as in `Session.attention`. Raises NotFound, LayerError, or InvalidArgument (also for an analysis where no query
        was kept).
        """
        query = query_options(options, **keywords)
        with deadlines.within(timeout):
            return self._transport.explain(validate.name(name), _layer(layer), query, validate.flag("analyze", analyze))

    def sessions(self, *, timeout: float | None = None) -> list[SessionInfo]:
        """The open sessions, of all who use the database, that were created with a label, in the order in which they were."""
        with deadlines.within(timeout):
            return self._transport.sessions()

    def explain_session(
        self,
        label: str,
        layer: int | None = None,
        *,
        analyze: bool = False,
        timeout: float | None = None,
        options: QueryOptions | None = None,
        **keywords: Unpack[QueryKeywords],
    ) -> list[Plan]:
        """The plans of the next query of an open session, one for each layer, or only for the given layer; of several sessions
        with this label, of the one that was created last.

        analyze: carry the plans out, for each layer's last query. options, keywords: as in `explain`. Raises NotFound,
        LayerError, SessionClosed, or InvalidArgument (also for an analysis before the first query).
        """
        query, analyzes = query_options(options, **keywords), validate.flag("analyze", analyze)
        with deadlines.within(timeout):
            return self._transport.explain_session(validate.text("label", label), _layer(layer), query, analyzes)

    def tiers(self, *, timeout: float | None = None) -> list[TierStats]:
        """What each tier holds and takes, to the byte, one entry for each size of block. The tiers are main memory and, where
        they are used, the GPU ("gpu" for blocks, "gpu tables" for everything else there) and disk."""
        with deadlines.within(timeout):
            return self._transport.tiers()

    def statistics(self, name: str, *, timeout: float | None = None) -> ContextStatistics:
        """Statistics of the queries that searched a context's segments, by layer and head: the share of the tokens they
        retrieved, how sharp they were, how often the window held their largest token. They are averages over a sample of the
        queries, in which the latest count most. Raises NotFound."""
        with deadlines.within(timeout):
            return self._transport.statistics(validate.name(name))


def _layer(given: int | None) -> int | None:
    """Raises LayerError for what is no number of a layer."""
    if given is not None and not (validate.is_whole(given) and abs(given) < LAYERS_MAX):
        raise LayerError(f"layer is {given!r}; expected the number of a layer, or None for all")
    return given
