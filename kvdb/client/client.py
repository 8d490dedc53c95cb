"""The database as a user holds it, embedded or remote."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

import kvdb.deadlines as deadlines
import kvdb.validate as validate
from kvdb.client.arrays import like, to_numpy, token_ids
from kvdb.client.context import Context
from kvdb.client.imports import import_all
from kvdb.client.many_sessions import ManySessions
from kvdb.client.query_keywords import QueryKeywords, query_options
from kvdb.client.retention_keywords import RetentionKeywords, retention_of
from kvdb.client.session import Session, transports_of
from kvdb.client.stored_contexts import StoredContexts
from kvdb.client.transport import ImportTransport, Transport
from kvdb.errors import InvalidArgument
from kvdb.types import CallTimings, ModelSpec, PromptPart, Retention
from query_optimizer.query_options import QueryOptions, checked_error_max


class Client(StoredContexts, ManySessions):
    """An open database. Close it, or use it in a `with`. Thread-safe.

    timeout, of every call here, of a context and of a session: how many seconds it may take; then it raises DeadlineExceeded.
    None is what `connect` was given, or the session. Embedded, None is as long as it goes on, and a call stops between two steps.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def last_timings(self) -> CallTimings | None:
        """What a server measured of this thread's last call that went well, and was neither an import nor read KV; None
        embedded."""
        return self._transport.last_timings

    def import_context(
        self,
        spec: ModelSpec,
        tokens: Any,
        kv: Iterable[tuple[Any, Any]],
        *,
        name: str,
        queries: Iterable[Any] | None = None,
        salt: str = "",
        timeout: float | None = None,
        **retention: Unpack[RetentionKeywords],
    ) -> Context:
        """Store the KV of n tokens under a name. The longest prefix of them that is stored already is not stored again.

        tokens: n ids. kv: one (k, v) for each layer, in order, both `[kv_heads, n, head_dim]` in the spec's dtype, keys after
        RoPE; it may be a generator, so that one layer at a time is in memory. queries: a sample of each layer's queries, from
        which indexes learn, one `[q_heads, m, head_dim]` (after RoPE) or None for each layer; they are kept as float32.
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
            return Context(self._transport, import_all(writer, len(ids), kv, queries))

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
            laid = [_part(part) for part in given]
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
            out = self._transport.step_together(given, layer, q, k, v, query, starts)
            if out is not None:
                return out
            arrays = to_numpy(q), to_numpy(k), to_numpy(v)
            return like(self._transport.attend_together(given, layer, *arrays, query, starts), q)

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
            return like(self._transport.attention_together(transports_of(sessions), layer, to_numpy(q), query), q)

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

    def _begin(self, spec: ModelSpec, ids: Any, name: str, base: int | None, retention: Retention, salt: str) -> ImportTransport:
        rest = validate.retention(retention), validate.salt(salt)
        return self._transport.begin_import(validate.spec(spec), ids, validate.name(name), base, *rest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _part(given: Any) -> PromptPart:
    """A part as the transports take it: a context by its name, or token ids. Raises ShapeError, DtypeError or InvalidArgument."""
    part = given if isinstance(given, PromptPart) else PromptPart(given)
    validate.part(part)
    source = part.source
    if isinstance(source, Context):
        return replace(part, source=source.name)
    if isinstance(source, str):
        return replace(part, source=validate.name(source))
    return replace(part, source=validate.token_ids(token_ids(source)))
