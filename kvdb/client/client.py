"""The database as a user holds it, embedded or remote."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import kvdb.deadlines as deadlines
import kvdb.types.tenants as tenants
import kvdb.validate as validate
from kvdb.client.arrays import keys_values, like, to_numpy, token_ids
from kvdb.client.context import Context, part_of
from kvdb.client.imports import import_all
from kvdb.client.query_keywords import QueryKeywords, query_options
from kvdb.client.retention_keywords import RetentionKeywords, retention_of
from kvdb.client.session import Session, transports_of
from kvdb.client.transport import ImportTransport
from kvdb.database import Database
from kvdb.errors import InvalidArgument, KvdbError, LayerError
from kvdb.types import (
    LAYERS_MAX,
    BackedUp,
    CallTimings,
    Checked,
    ContextStatistics,
    ContextUpdate,
    DatabaseStatus,
    Dropped,
    IndexInfo,
    ModelSpec,
    PrefixMatch,
    Retention,
    SessionInfo,
    Space,
    TierStats,
    UnknownFile,
)
from query_optimizer.plan import Plan
from query_optimizer.query_options import QueryOptions, checked_error_max

# size: one noun, an open database and its calls


class Client:
    """An open database. Close it, or use it in a `with`. Thread-safe.

    timeout, of every call here, of a context and of a session: how many seconds it may take; then it raises DeadlineExceeded.
    None is what `connect` was given, or the session. Embedded, None is as long as it goes on, and a call stops between two steps.
    """

    def __init__(self, transport: Database) -> None:
        """transport: the database of this process, or what carries its calls to a server."""
        self._transport = transport

    @property
    def last_timings(self) -> CallTimings | None:
        """What a server measured of this thread's last call that went well, and was neither an import nor read KV; None
        embedded."""
        return self._transport.last_timings

    def import_context(  # noqa: PLR0913  # each is a keyword that a caller may leave out
        self,
        spec: ModelSpec,
        tokens: Any,
        kv: Iterable[tuple[Any, Any]],
        *,
        name: str,
        queries: Iterable[Any] | None = None,
        states: Mapping[int, Any] | None = None,
        salt: str = "",
        timeout: float | None = None,
        **retention: Unpack[RetentionKeywords],
    ) -> Context:
        """Store the KV of n tokens under a name. The longest prefix of them that is stored already is not stored again.

        tokens: n ids. kv: one (k, v) for each layer, in order, both `[kv_heads, n, head_dim]` in the spec's dtype, keys after
        RoPE; it may be a generator, so that one layer at a time is in memory. queries: a sample of each layer's queries, from
        which indexes learn, one `[q_heads, m, head_dim]` (after RoPE) or None for each layer; they are kept as float32.

        Where layers differ (`kvdb.Attention`, `kvdb.State`, `kvdb.Shares`), kv has (k, v) in the layer's sizes, (k, None) for
        values in keys, (k, v, keys of the indexer), or None for a layer that keeps no tokens. states: by position, or for all n
        tokens, the arrays of each layer with a state by its number; a prompt is found up to such a position.

        salt: what lookups have to say beside the tokens, such as a tenant, an adapter of the model, the hash of an image; nothing
        that is stored under one is found or shared under another, and sessions of all may be asked in one call.

        retention, also of `import_chunk` and `store`: `durability`, of a store, what the context outlives once this returns:
        "memory", an orderly end of the database; "os", the end of the process, however it comes; "durable", the loss of power
        too; None for `storage.durability`. `ttl`, `metadata` and `pinned` are as in `update`; the context is never there without
        them, and its time begins when it is stored. `format`: how the tokens that are not stored yet are held: "" as they came,
        "int8", "int8-int4" or "int4" with errors that `info` says; None for `storage.format`.

        timeout: how many seconds all of it may take, None for as long as it goes on; then it raises DeadlineExceeded.

        Raises AlreadyExists, ShapeError, DtypeError, NonFiniteError, LayerError, CapacityError, InvalidArgument, or Unsupported
        for a durability without a store, and then nothing is stored."""
        ids = validate.token_ids(token_ids(tokens))
        with deadlines.within(timeout):
            writer = self._begin(spec, ids, name, None, retention_of(**retention), salt)
            return Context(self._transport, import_all(writer, len(ids), kv, queries, states))

    def import_chunk(  # noqa: PLR0913  # each is a keyword that a caller may leave out
        self,
        spec: ModelSpec,
        tokens: Any,
        kv: Iterable[tuple[Any, Any]],
        *,
        name: str,
        base: int = 0,
        queries: Iterable[Any] | None = None,
        salt: str = "",
        timeout: float | None = None,
        **retention: Unpack[RetentionKeywords],
    ) -> Context:
        """Store the KV of n tokens that were computed alone, or behind what every prompt begins with, to be laid out anywhere.

        The same text of one model is stored once, whatever names and bases it was imported with, and whatever stood before it.
        base: the position of the first token when it was computed. The other arguments are as in `import_context`. Raises what
        that raises, and Unsupported for a model whose keys cannot be moved: one without RoPE, or with one whose frequencies
        depend on the length.
        """
        ids = validate.token_ids(token_ids(tokens))
        with deadlines.within(timeout):
            writer = self._begin(spec, ids, name, validate.base(base), retention_of(**retention), salt)
            return Context(self._transport, import_all(writer, len(ids), kv, queries))

    def create_session(  # noqa: PLR0913  # each is a keyword that a caller may leave out
        self,
        spec: ModelSpec,
        tokens: Any = None,
        *,
        parts: Iterable[Any] | None = None,
        error_max: float | None = None,
        salt: str = "",
        share: bool = False,
        label: str = "",
        expected_tokens: int | None = None,
        timeout: float | None = None,
    ) -> Session:
        """A session for a prompt over the longest stored prefix of its tokens; `session.reused` of them need no prefill.

        parts: used in place of tokens. Contexts, token ids, and `kvdb.PromptPart`s of either are laid out one behind the other.
        A chunk, or any context that was computed alone, may stand anywhere and several times; nothing of it is copied or changed.
        Any other context can only be the first part. Token ids before the last context are gaps, to be filled with
        `Session.overlay`; token ids behind it are the prompt's end, which is appended with `update` and `attend`. error_max: of
        queries that name nothing, in this session and its forks, 0 to 1; None for the configuration's `optimizer.error_max`.
        salt: as in `import_context`; it is also that of what the session is stored as, and of its parts. share: whether
        other sessions may stand on what this one holds of `tokens`, as soon as it fills whole blocks in every layer, before it is
        stored; they keep it when this one ends, or is truncated. label: under which `sessions` and `explain_session` tell of a
        session of tokens, such as the id of a request. expected_tokens: how many tokens it will ask for, such as a request's
        max_new_tokens, by which it is judged whether a faster way would pay; None where nobody knows. timeout: how many seconds
        this call, and each of the session's, may take; None for the database's own time.

        Raises ShapeError, DtypeError or InvalidArgument for tokens that are no ids or parts that cannot stand where they are,
        NotFound, SpecMismatch, PositionError for a part that is not `at` its place, and Unsupported for a chunk whose keys cannot
        be moved to where it would stand.
        """
        if (tokens is None) == (parts is None):
            raise InvalidArgument("create_session takes tokens or parts=; expected one of the two")
        rest = checked_error_max(error_max), validate.salt(salt)
        expected = validate.expected_tokens(expected_tokens)
        if parts is None:
            shared, told, ids = validate.flag("share", share), validate.text("label", label), token_ids(tokens)
            with deadlines.within(timeout):
                state = self._transport.create_session(
                    validate.spec(spec), ids, *rest, share=shared, label=told, expected_tokens=expected
                )
            return Session(state, timeout)
        if share or label:
            raise InvalidArgument(
                "a session of parts is not shared and has no label, because it is not found by its tokens; expected tokens"
            )
        given = validate.iterable("parts", parts, "contexts, token ids and kvdb.PromptParts of either")
        with deadlines.within(timeout):
            laid = [part_of(part) for part in given]
            state = self._transport.create_session_of_parts(validate.spec(spec), laid, *rest, expected_tokens=expected)
        return Session(state, timeout)

    def name_chunk(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        name: str,
        salt: str = "",
        timeout: float | None = None,
        **retention: Unpack[RetentionKeywords],
    ) -> Context | None:
        """Give a stored chunk of exactly these tokens another name. Returns None where there is none, so that it must be
        computed.

        salt, retention: as in `import_context`. Raises what `import_chunk` raises.
        """
        ids = token_ids(tokens)
        with deadlines.within(timeout):
            writer = self._begin(spec, ids, name, 0, retention_of(**retention), salt)
            if writer.start < len(ids):
                writer.abort()
                return None
            return Context(self._transport, writer.commit())

    def attend(  # noqa: PLR0913  # each is a keyword that a caller may leave out
        self,
        sessions: Iterable[Session],
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        starts: Sequence[int] | None = None,
        timeout: float | None = None,
        options: QueryOptions | None = None,
        **keywords: Unpack[QueryKeywords],
    ) -> Any:
        """Do what `Session.attend` does for several sessions of one model in one call. The results are the same up to rounding,
        and a stored segment that several sessions read whole is read once.

        q (after RoPE) and the result: `[sessions, q_heads, n, head_dim]`; k (after RoPE), v: `[sessions, kv_heads, n, head_dim]`.
        starts: one `start` of `Session.attend` for each session. options, keywords: as in `Session.attention`, for every session.
        Raises what `Session.attend` raises, InvalidArgument for a session that is given twice or is another database's,
        SpecMismatch, and MessageTooLarge; then every session is as it was.
        """
        query, given = query_options(options, **keywords), transports_of(sessions)
        with deadlines.within(timeout):
            out = self._transport.step(given, layer, q, k, v, query, starts)
            if out is not None:
                return out
            return like(self._transport.attend(given, layer, to_numpy(q), *keys_values(k, v), query, starts), q)

    def attention(
        self,
        sessions: Iterable[Session],
        layer: int,
        q: Any,
        *,
        timeout: float | None = None,
        options: QueryOptions | None = None,
        **keywords: Unpack[QueryKeywords],
    ) -> Any:
        """Do what `Session.attention` does, for the last n tokens of several sessions of one model in one call; see `attend`.

        q (after RoPE) and the result: `[sessions, q_heads, n, head_dim]`. Raises what `Session.attention` and `attend` raise.
        """
        query = query_options(options, **keywords)
        with deadlines.within(timeout):
            return like(self._transport.attention(transports_of(sessions), layer, to_numpy(q), query), q)

    def store(
        self,
        session: Session,
        *,
        name: str,
        tokens: Any = None,
        chunk: bool = False,
        timeout: float | None = None,
        **retention: Unpack[RetentionKeywords],
    ) -> Context:
        """Keep everything in a session as a context. The session goes on, and shares its blocks with what is stored.

        tokens: the ids of everything in it, needed when it holds more than it was opened with. chunk: keep only what stands
        behind `session.start`, as a chunk, see `import_chunk`; it was computed alone, or behind the stored tokens that the
        session was opened on. Otherwise a session that was laid out of parts becomes a blended context: it is not exact, so it is
        never found by its tokens, but sessions may begin with it as a part. retention: as in `import_context`. Raises
        AlreadyExists, InvalidArgument, PositionError (layers of different lengths, or gaps that hold nothing), CapacityError,
        Unsupported or SessionClosed, and then nothing is stored.
        """
        if not isinstance(session, Session):
            raise InvalidArgument(f"session is a {type(session).__name__}; expected what create_session returns")
        return Context(self._transport, session.store(name, tokens, chunk=chunk, timeout=timeout, **retention))

    def close(self) -> None:
        """Close it and, when embedded, every session. Closing twice does nothing."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

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
                self._transport.update(name, ContextUpdate(pinned=True))

    def unpin(self, *names: str, timeout: float | None = None) -> None:
        """Undo `pin`, however often that was called. Raises NotFound as that does."""
        with deadlines.within(timeout):
            for name in [validate.name(name) for name in names]:
                self._transport.update(name, ContextUpdate(pinned=False))

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
            return Context(self._transport, self._transport.update(validate.name(name), change))

    def rename(self, name: str, new: str, *, timeout: float | None = None) -> Context:
        """Give a context another name; what reads it goes on. Raises NotFound, and AlreadyExists for a name that is taken."""
        with deadlines.within(timeout):
            return Context(self._transport, self._transport.rename(validate.name(name), validate.name(new)))

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

    def verify(self, name: str, *, timeout: float | None = None) -> Checked:
        """Read everything that is on disk of a context, keys, values, indexes, evidence and statistics, and compare it with its
        checksums, and indexes in memory with their keys. Raises NotFound, IntegrityError, Unavailable or CapacityError."""
        with deadlines.within(timeout):
            return self._transport.verify(validate.name(name))

    def verify_store(self, *, timeout: float | None = None) -> list[str]:
        """Prove that every block and every file is owned by what is stored or open, and by nothing else.

        Returns the names of contexts that were found damaged when the store was opened: they are not listed and not answered
        from, and can be dropped. Call it while nothing is being imported. Raises IntegrityError.
        """
        with deadlines.within(timeout):
            return self._transport.verify_store()

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

    def create_sessions(
        self,
        spec: ModelSpec,
        prompts: Iterable[Any],
        *,
        error_max: float | None = None,
        salt: str = "",
        expected_tokens: int | None = None,
        timeout: float | None = None,
    ) -> list[Session]:
        """A session for each of many prompts; see `create_session`, whose errors it raises. All are created or none.
        expected_tokens: that each will ask for."""
        given = [token_ids(tokens) for tokens in validate.iterable("prompts", prompts, "token ids of each session")]
        rest = checked_error_max(error_max), validate.salt(salt)
        with deadlines.within(timeout):
            expected = validate.expected_tokens(expected_tokens)
            states = self._transport.create_sessions(validate.spec(spec), given, *rest, expected_tokens=expected)
        return [Session(state, timeout) for state in states]

    def update_sessions(
        self,
        sessions: Iterable[Session],
        layer: int,
        k: Any,
        v: Any,
        *,
        starts: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[KvdbError | None]:
        """Do what `Session.update` does for many sessions of one model, each by itself.

        k (after RoPE), v: `[sessions, kv_heads, n, head_dim]`. starts: one `start` of `Session.update` for each. Returns None for
        each session that was updated, and the error for each other. Raises InvalidArgument or ShapeError for what is no such
        call, and then nothing is done.
        """
        with deadlines.within(timeout):
            return self._transport.update_sessions(transports_of(sessions), layer, *keys_values(k, v), starts)

    def truncate_sessions(
        self, sessions: Iterable[Session], tokens: Iterable[int], *, timeout: float | None = None
    ) -> list[KvdbError | None]:
        """Do what `Session.truncate` does for many sessions, each by itself, to its own number of tokens.

        Returns None for each session that was truncated, and the error for each other. Raises InvalidArgument or PositionError
        for what is no such call, and then nothing is done.
        """
        kept = [validate.position("tokens", count) for count in validate.iterable("tokens", tokens, "a number for each session")]
        with deadlines.within(timeout):
            return self._transport.truncate_sessions(transports_of(sessions), kept)

    def close_sessions(self, sessions: Iterable[Session], *, timeout: float | None = None) -> None:
        """Close many sessions; those that are closed already stay so. Raises InvalidArgument for a session of another database,
        and then none is closed."""
        given = list(validate.iterable("sessions", sessions, "what create_session returns"))
        with deadlines.within(timeout):
            if given:
                self._transport.close_sessions(transports_of(given))
            for session in given:
                session.close()

    def _begin(self, spec: ModelSpec, ids: Any, name: str, base: int | None, retention: Retention, salt: str) -> ImportTransport:
        rest = validate.retention(retention), validate.salt(salt)
        return self._transport.begin_import(validate.spec(spec), ids, validate.name(name), base, *rest)


def _layer(given: int | None) -> int | None:
    """Raises LayerError for what is no number of a layer."""
    if given is not None and not (validate.is_whole(given) and abs(given) < LAYERS_MAX):
        raise LayerError(f"layer is {given!r}; expected the number of a layer, or None for all")
    return given
