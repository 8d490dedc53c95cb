"""The database a user holds; the same for an embedded and a remote one."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import kvdb.check as check
from indexes.retrieval import Retrieval
from kvdb.client.arrays import like, to_numpy, token_ids
from kvdb.client.context import Context
from kvdb.client.session import Session, transports_of
from kvdb.client.transport import ImportTransport, Transport
from kvdb.errors import InvalidArgument, LayerError, ShapeError
from kvdb.types import Array, ContextStatistics, IndexInfo, ModelSpec, Part, TierStats
from query_optimizer.plan import Plan
from query_optimizer.wanted import Hints


class Client:
    """An open database. Close it, or use it in a `with`. Thread-safe."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def import_context(
        self,
        spec: ModelSpec,
        tokens: Any,
        kv: Iterable[tuple[Any, Any]],
        *,
        name: str,
        queries: Iterable[Any] | None = None,
    ) -> Context:
        """Store the KV of n tokens under a name. What is stored already of their beginning is not stored again.

        tokens: n ids. kv: one (k, v) a layer, in order, each `[kv_heads, n, head_dim]` in the spec's dtype, keys after RoPE; it
        may be a generator, so that one layer at a time is in memory. queries: a sample of each layer's queries, from which
        indexes learn, one `[q_heads, m, head_dim]` (after RoPE) or None a layer. Raises AlreadyExists, ShapeError, DtypeError,
        NonFiniteError, LayerError, CapacityError or InvalidArgument, and then nothing is stored.
        """
        ids = token_ids(tokens)
        return _import(self._transport, self._transport.begin_import(spec, ids, name), len(ids), kv, queries)

    def import_chunk(
        self,
        spec: ModelSpec,
        tokens: Any,
        kv: Iterable[tuple[Any, Any]],
        *,
        name: str,
        base: int = 0,
        queries: Iterable[Any] | None = None,
    ) -> Context:
        """Store the KV of n tokens that were computed alone, with nothing before them, so that they may be laid out anywhere.

        The same text of one model is stored once, under however many names and from whatever base. base: the position of the
        first token when it was computed. The rest is as in `import_context`. Raises what that raises, and Unsupported for a
        model whose keys cannot be moved: one without RoPE, or with one whose frequencies depend on the length.
        """
        ids = token_ids(tokens)
        return _import(self._transport, self._transport.begin_import(spec, ids, name, base), len(ids), kv, queries)

    def create_session(self, spec: ModelSpec, tokens: Any = None, *, parts: Iterable[Any] | None = None) -> Session:
        """A session for a prompt over the longest stored prefix of its tokens; `session.reused` of them need no prefill.

        parts: in place of tokens, contexts, token ids and `kvdb.Part`s of either, which are laid out one behind the other. A
        chunk, or any context that was computed alone, may stand anywhere and several times; nothing of it is copied or changed.
        Any other context may be the first part. Token ids before the last context are gaps, to be filled with
        `Session.overlay`; those behind it are the prompt's end, which is appended as ever.

        Raises ShapeError, DtypeError or InvalidArgument for tokens that are no ids or parts that cannot stand where they are,
        NotFound, SpecMismatch, PositionError for a part that is not `at` its place, and Unsupported where a chunk would have to
        be moved whose keys cannot be.
        """
        if (tokens is None) == (parts is None):
            raise InvalidArgument("create_session takes tokens or parts=; expected one of the two")
        if parts is None:
            return Session(self._transport.create_session(spec, token_ids(tokens)))
        return Session(self._transport.lay_out(spec, [_part(given) for given in parts]))

    def name_chunk(self, spec: ModelSpec, tokens: Any, *, name: str) -> Context | None:
        """Another name for a chunk of exactly these tokens, None where there is none, which is then to be computed.

        Raises what `import_chunk` raises.
        """
        ids = token_ids(tokens)
        writing = self._transport.begin_import(spec, ids, name, 0)
        if writing.start < len(ids):
            writing.abort()
            return None
        return Context(self._transport, writing.commit())

    def attend(  # noqa: PLR0913  # the three arrays, and what `Session.attend` takes
        self,
        sessions: Iterable[Session],
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        retrieval: Retrieval | None = None,
        max_missed_mass: float | None = None,
        estimate_tail: bool = False,
        hints: Hints | None = None,
        starts: Sequence[int] | None = None,
    ) -> Any:
        """`Session.attend` of several sessions of one model in one call: the same results as one after the other, to rounding,
        but a stored segment that several of them read whole is read once.

        q (after RoPE) and the result: `[sessions, q_heads, n, head_dim]`; k (after RoPE), v: `[sessions, kv_heads, n, head_dim]`.
        starts: of each session, what `Session.attend` calls start. Raises what that raises, InvalidArgument for a session that is
        given twice or is not this database's, SpecMismatch, MessageTooLarge; then every session is as it was.
        """
        wanted = check.wanted(retrieval, max_missed_mass, estimate_tail, hints)
        arrays = to_numpy(q), to_numpy(k), to_numpy(v)
        return like(self._transport.attend_together(transports_of(sessions), layer, *arrays, wanted, starts), q)

    def attention(  # what `Session.attention` takes
        self,
        sessions: Iterable[Session],
        layer: int,
        q: Any,
        *,
        retrieval: Retrieval | None = None,
        max_missed_mass: float | None = None,
        estimate_tail: bool = False,
        hints: Hints | None = None,
    ) -> Any:
        """`Session.attention` of the last n tokens of several sessions of one model in one call, see `attend`.

        q (after RoPE) and the result: `[sessions, q_heads, n, head_dim]`. Raises what `Session.attention` raises, and what
        `attend` does for the sessions.
        """
        wanted = check.wanted(retrieval, max_missed_mass, estimate_tail, hints)
        return like(self._transport.attention_together(transports_of(sessions), layer, to_numpy(q), wanted), q)

    def store(self, session: Session, *, name: str, tokens: Any = None, chunk: bool = False) -> Context:
        """Keep everything in a session as a context; the session goes on, and shares its blocks with what is stored.

        tokens: the ids of everything in it, when it outgrew those it was opened with. chunk: as a chunk, see `import_chunk`, for
        a session that was opened on no tokens. A session that was laid out of parts becomes a blended context: not found by its
        tokens, for it is not exact, but a part that other sessions may begin with. Raises AlreadyExists, InvalidArgument,
        PositionError (layers of different lengths, or gaps that hold nothing), CapacityError, Unsupported or SessionClosed, and
        then nothing is stored.
        """
        return Context(self._transport, session.store(name, tokens, chunk=chunk))

    def contexts(self) -> list[Context]:
        """Every stored context, in the order of their names."""
        return [Context(self._transport, info) for info in self._transport.contexts()]

    def get(self, name: str) -> Context:
        """Raises NotFound."""
        return Context(self._transport, self._transport.get(name))

    def drop(self, name: str) -> None:
        """Forget a context. Open sessions over it go on; what nobody holds is freed. Raises NotFound."""
        self._transport.drop(name)

    def offload(self, name: str) -> int:
        """Move a context's KV to disk, and its indexes out of memory; bytes of main memory that were freed now.

        What a session reads, or an index is built over, leaves when that ends. The next session over it brings it back layer by
        layer, and answers of a layer as soon as that is there. Raises NotFound, Unsupported for a database without
        storage.disk_path, CapacityError for a full disk or more than storage.disk_bytes_max, Unavailable for a folder that cannot
        be written; what was not written is in memory as before.
        """
        return self._transport.offload(name)

    def build_index(self, name: str, kind: str = "flat", *, wait: bool = True) -> list[IndexInfo]:
        """Build an index over a context's keys, from which queries that name a retrieval, or none, are then answered.

        kind: "flat", "coarse-bounds", "coarse-means", "coarse-clusters" or "hnsw". wait: until it stands; otherwise it is built
        in the background. Returns the indexes there are then; segments shorter than the configuration's segment_tokens_min are
        read whole and get none. Raises NotFound, InvalidArgument for another kind, CapacityError where all indexes would keep
        more than indexes.bytes_max, Unsupported for a kind whose library is missing.
        """
        return self._transport.build_index(name, kind, wait)

    def indexes(self, name: str) -> list[IndexInfo]:
        """The indexes over a context's segments: those that stand, and how far those are that are under way. Raises NotFound."""
        return self._transport.indexes(name)

    def verify(self, name: str) -> int:
        """Check every index of a context against its keys; how many there are. Raises NotFound or IntegrityError."""
        return self._transport.verify(name)

    def explain(  # what a query takes
        self,
        name: str,
        layer: int | None = None,
        *,
        analyze: bool = False,
        retrieval: Retrieval | None = None,
        max_missed_mass: float | None = None,
        estimate_tail: bool = False,
        hints: Hints | None = None,
    ) -> list[Plan]:
        """The plans of a query of one token behind a context: of one layer or, without a number, of each.

        analyze: carry them out, for queries that were kept of the context when it was stored. Raises NotFound, LayerError, or
        InvalidArgument (also for an analysis where no query was kept).
        """
        wanted = check.wanted(retrieval, max_missed_mass, estimate_tail, hints)
        return self._transport.explain(name, layer, wanted, bool(analyze))

    def tiers(self) -> list[TierStats]:
        """What each tier holds and takes, to the byte, one entry for each size of block: main memory, the GPU ("gpu" for blocks,
        "gpu tables" for everything else there) and disk, where they are used."""
        return self._transport.tiers()

    def statistics(self, name: str) -> ContextStatistics:
        """What the queries that searched a context's segments were like, by layer and head: which share of the tokens they
        retrieved, how sharp they were, how often the window held their largest token. A part of all queries is observed, and
        the latest count most. Raises NotFound."""
        return self._transport.statistics(name)

    def close(self) -> None:
        """Close it and, when embedded, every session. Closing twice does nothing."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _import(
    transport: Transport,
    writing: ImportTransport,
    tokens: int,
    kv: Iterable[tuple[Any, Any]],
    queries: Iterable[Any] | None,
) -> Context:
    """Hand an import everything, and end it."""
    spec = writing.spec
    done = False
    try:
        layers = 0
        for k, v in kv:
            _write(writing, layers, to_numpy(k), to_numpy(v), tokens)
            layers += 1
        if layers != spec.layers:
            raise LayerError(f"kv holds {layers} layers; expected {spec.layers}, those of {spec.name}")
        if queries is not None:
            _sample(writing, queries, spec)
        info = writing.commit()
        done = True
    finally:
        if not done:
            writing.abort()
    return Context(transport, info)


def _part(given: Any) -> Part:
    """What the transports take: contexts by their names. Raises ShapeError, DtypeError or InvalidArgument for anything else."""
    part = given if isinstance(given, Part) else Part(given)
    check.part(part)
    source = part.source
    if isinstance(source, Context):
        return replace(part, source=source.name)
    return part if isinstance(source, str) else replace(part, source=check.token_ids(token_ids(source)))


def _write(writing: ImportTransport, layer: int, k: Array, v: Array, n: int) -> None:
    for what, array in (("k", k), ("v", v)):
        if array.ndim != 3 or array.shape[1] != n:
            raise ShapeError(
                f"{what} of layer {layer} has the shape {array.shape}; expected (kv_heads, {n}, head_dim), all {n} tokens"
            )
    if writing.start < n:
        writing.write(layer, k[:, writing.start :], v[:, writing.start :])


def _sample(writing: ImportTransport, queries: Iterable[Any], spec: ModelSpec) -> None:
    layers = 0
    for q in queries:
        if q is not None:
            writing.sample(layers, to_numpy(q))
        layers += 1
    if layers != spec.layers:
        raise LayerError(f"queries holds {layers} layers; expected {spec.layers}, one sample or None for each of {spec.name}")
