"""The session as a user holds it, in an embedded or a remote database."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np

import kvdb.deadlines as deadlines
import kvdb.forks as forks
import kvdb.validate as validate
from kvdb.blend.controller import Choice
from kvdb.blend.deviation import deviation
from kvdb.blend.strategies import DEFAULT_RATIO
from kvdb.client.arrays import keys_values, like, to_numpy, token_ids
from kvdb.client.forgotten import CLOSER
from kvdb.client.query_keywords import QueryKeywords, query_options
from kvdb.client.reading import read_layers, read_range
from kvdb.client.retention_keywords import RetentionKeywords, retention_of
from kvdb.client.transport import SessionTransport
from kvdb.errors import DtypeError, InvalidArgument
from kvdb.types import Array, ContextInfo, ModelSpec, Placed, Positions, SessionStats, Tokens
from query_optimizer.plan import Plan
from query_optimizer.query_options import QueryOptions

# size: one noun, a session and its calls


class Session:
    """A context opened for decoding: what is stored of the prompt, and a tail of new tokens.

    Arrays are numpy or torch, in the spec's dtype; answers are numpy or torch as the query is. A call that raises leaves the
    session as it was. Close it, or use it in a `with`, to give its memory back; one that is forgotten is closed when Python
    collects it.

    timeout, of a call: how many seconds it may take, None for the session's own or else the database's. Where it takes longer, it
    raises DeadlineExceeded; embedded it has no effect then, on a server it may have had one, which `stats` says.
    """

    def __init__(self, transport: SessionTransport, timeout: float | None = None) -> None:
        """timeout: how many seconds each call may take that says nothing else, None for the database's own time."""
        self._transport = transport
        self._timeout = None if timeout is None else deadlines.checked_timeout(timeout)
        self._forgotten = CLOSER.close_with(self, transport)

    @property
    def spec(self) -> ModelSpec:
        return self._transport.spec

    @property
    def reused(self) -> int:
        """How many tokens of the prompt need no prefill."""
        return self._transport.reused

    @property
    def start(self) -> int:
        """The position of the first token that `update` and `attend` append. It lies behind the stored prefix, or behind the last
        context that was laid out."""
        return self._transport.start

    @property
    def error_max(self) -> float:
        """How far an answer may be from exact attention where a query names nothing; see `attention`."""
        return self._transport.error_max

    @property
    def tokens(self) -> Tokens:
        """A copy of the ids it was opened with, int32 `[n]`: those of its prompt, or of all its parts; only those that `truncate`
        kept."""
        return self._transport.tokens.copy()

    @property
    def layout(self) -> tuple[Placed, ...]:
        """What stands at which positions before `start`: a stored prefix, chunks, and tokens of which nothing was stored."""
        return self._transport.layout

    def update(self, layer: int, k: Any, v: Any, *, start: int | None = None, timeout: float | None = None) -> None:
        """Append the KV of the next n tokens of one layer.

        k (after RoPE), v: `[kv_heads, n, head_dim]`; where layers differ, in the layer's own sizes, and None for values that lie
        in the keys. start: the position the caller believes the first has, to be checked. Raises LayerError, ShapeError,
        DtypeError, NonFiniteError, PositionError, CapacityError or SessionClosed.
        """
        with self._within(timeout):
            self._transport.update(layer, *keys_values(k, v), start)

    def update_indexer(self, layer: int, keys: Any, *, start: int | None = None, timeout: float | None = None) -> None:
        """Append the keys of the next n tokens of one layer's indexer, `[1, n, dim]`. start: as in `update`, whose errors it
        raises; LayerError for a layer without an indexer."""
        with self._within(timeout):
            self._transport.update(layer, *keys_values(keys, None), start, indexer=True)

    def read_indexer(self, layer: int, start: int = 0, stop: int | None = None, *, timeout: float | None = None) -> Array:
        """The keys of tokens [start, stop) of one layer's indexer, `[1, stop - start, dim]`. Raises what `read` raises."""
        with self._within(timeout):
            return self._transport.read([layer], *read_range(start, stop), indexer=True)[0][0]

    def state(self, layer: int, position: int | None = None, *, timeout: float | None = None) -> Mapping[str, Array]:
        """The state of a layer that keeps one (`kvdb.State`): its arrays by name, numpy, not to be written.

        position: how many tokens it is of, None for all that the session holds; behind a prefix that was found, that is `start`.
        Raises LayerError for a layer without a state, PositionError where there is none at that position, IntegrityError or
        Unavailable for one on disk that cannot be read, or SessionClosed.
        """
        with self._within(timeout):
            return self._transport.state(layer, None if position is None else validate.position("position", position))

    def put_state(self, layer: int, arrays: Any, position: int | None = None, *, timeout: float | None = None) -> None:
        """Keep the state of a layer: its arrays by name, numpy or torch, as `kvdb.State` describes them.

        position: how many tokens it is of, None for all that the session holds. Of the positions of which it has the states of
        all such layers, a session keeps the last and a few before, the fewer the older they are, and `store` stores them: a
        prompt is found up to one of them. Raises LayerError, InvalidArgument, ShapeError, DtypeError, PositionError,
        CapacityError or SessionClosed, and then nothing is kept.
        """
        given = {name: to_numpy(array) for name, array in arrays.items()} if isinstance(arrays, Mapping) else arrays
        with self._within(timeout):
            self._transport.put_state(layer, given, None if position is None else validate.position("position", position))

    def put_sinks(self, layer: int, sinks: Any, *, timeout: float | None = None) -> None:
        """The logits of a layer's sinks, float32 `[q_heads]`, numpy or torch: weights of the model, which weigh in the softmax of
        every query of the layer from now on, and have no value. A layer that is described with `sinks=True` is not attended
        before. Raises LayerError, InvalidArgument for a layer without sinks, ShapeError, DtypeError, NonFiniteError or
        SessionClosed.
        """
        with self._within(timeout):
            self._transport.put_sinks(layer, to_numpy(sinks))

    def plan_recompute(
        self,
        *,
        seconds: float | None = None,
        floor: float = DEFAULT_RATIO,
        ratio: float | None = None,
        timeout: float | None = None,
    ) -> Choice:
        """The share of the laid-out tokens to recompute: the largest that takes no longer than loading the chunks takes, and at
        least the floor. EXPLAIN shows it.

        seconds: what recomputing one token takes in one layer, None where the caller has not measured it. floor: the least ratio
        that quality needs. ratio: the caller's own choice, which is kept. Raises InvalidArgument for what is no number in [0, 1],
        or SessionClosed.
        """
        measured = None if seconds is None else validate.number("seconds", seconds)
        own = None if ratio is None else validate.number("ratio", ratio)
        with self._within(timeout):
            return self._transport.plan_recompute(measured, validate.number("floor", floor), own)

    def overlay(self, layer: int, positions: Any, k: Any, v: Any, *, timeout: float | None = None) -> None:
        """Fill gaps of one layer, or recompute tokens that are stored: their new KV masks the stored one, which stays as it is.

        positions: n ascending positions before `start`, of tokens that have no overlay in this layer yet. k (after RoPE at these
        positions), v: `[kv_heads, n, head_dim]`. Raises LayerError, ShapeError, DtypeError, NonFiniteError, PositionError,
        InvalidArgument for a session on a prefix, CapacityError or SessionClosed.
        """
        with self._within(timeout):
            self._transport.overlay(layer, _positions(positions), to_numpy(k), to_numpy(v))

    def deviation(
        self, layer: int, positions: Any, k: Any, v: Any, *, score: str | None = None, timeout: float | None = None
    ) -> Any:
        """How far fresh KV is from what this layer holds at these positions, moved there. Returns float32 `[n]`, numpy or torch
        as k is, infinite for gaps. Arguments as in `overlay`; score: one of kvdb.blend.deviation.SCORES, None for its default.
        Raises what `overlay` raises, and InvalidArgument for another score."""
        with self._within(timeout):
            measures = self._transport.deviation(layer, _positions(positions), to_numpy(k), to_numpy(v), score)
        return like(deviation(measures, score), k)

    def attention(
        self,
        layer: int,
        q: Any,
        *,
        positions: Any = None,
        timeout: float | None = None,
        options: QueryOptions | None = None,
        **keywords: Unpack[QueryKeywords],
    ) -> Any:
        """Attention of one layer's last n tokens, each over everything up to and including itself.

        q (after RoPE) and the result: `[q_heads, n, head_dim]`. What the query asks for is said either by keywords or by one
        `options`, a kvdb.QueryOptions of the same fields. retrieval: which tokens are read, kvdb.Exact(), Dipr(alpha), TopK(k) or
        TopP(p); None lets the optimizer decide. max_missed_mass: read on until the share of the softmax mass that was left out is
        proven to be at most this. estimate_tail: add an estimate of the attention over what was left out, where the index can
        make one. error_max: in place of these three, the largest L2 error of the output over all query heads, relative to exact
        attention; 0 is exact, None the session's. hints: kvdb.Hints, how it is to be done.

        positions: instead of the last tokens, n ascending positions before `start` of a session that was laid out of parts; they
        read everything up to their own position, overlays in place of what they mask. Such a query is always exact.

        Raises LayerError, ShapeError, DtypeError, NonFiniteError, InvalidArgument, Unsupported, SessionClosed, and PositionError
        for more queries than tokens, or while a gap holds nothing.
        """
        query = query_options(options, **keywords)
        with self._within(timeout):
            if positions is not None:
                return like(self._transport.attention_at(layer, to_numpy(q), _positions(positions)), q)
            return like(self._transport.attention(layer, to_numpy(q), query), q)

    def attend(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        start: int | None = None,
        timeout: float | None = None,
        options: QueryOptions | None = None,
        **keywords: Unpack[QueryKeywords],
    ) -> Any:
        """`update` and `attention` of the same n tokens in one call. Raises what both raise.

        Of one token whose q, k and v lie on the GPU that holds the layer, nothing comes to main memory, and the result is there
        when the caller's stream is. A number that is not finite is then found out by a later call of the session: it raises
        NonFiniteError, and that token and what followed it are forgotten. It raises GpuLost where the GPU failed, and then tokens
        that only it had are gone.
        """
        query = query_options(options, **keywords)
        with self._within(timeout):
            out = self._transport.step(layer, q, k, v, query, start)
            if out is not None:
                return out
            return like(self._transport.attend(layer, to_numpy(q), *keys_values(k, v), query, start), q)

    def attend_selected(  # noqa: PLR0913  # a call of a model that selects
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        index_q: Any,
        index_weights: Any,
        *,
        start: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """`attend` for a model that selects tokens itself: each query attends, exactly, the `top` tokens of the layer's
        `kvdb.Indexer` with the largest scores, the sum over the indexer's heads of weight * ReLU(q . k), among those that it
        sees.

        q, k, v, the result: as in `attend`; None for k and v to append nothing, and ask of the last n tokens. index_q: float32
        `[heads, n, dim]`. index_weights: float32 `[heads, n]`, the indexer's own scales multiplied in. `update_indexer` was
        handed the keys of the n tokens before. EXPLAIN says what the selection was, and what it missed. Raises what `attend`
        raises, and LayerError for a layer without an indexer.
        """
        kv = None if k is None else keys_values(k, v)
        asked = to_numpy(index_q), to_numpy(index_weights)
        with self._within(timeout):
            return like(self._transport.attend_selected(layer, to_numpy(q), kv, asked, start), q)

    def truncate(self, tokens: int, *, timeout: float | None = None) -> None:
        """Keep the first `tokens` tokens of every layer and forget those behind, such as rejected drafts; a layer with fewer
        stays as it is.

        It may cut into the stored prefix, which stays stored; then `start` and `reused` are less from now on. Ids behind `tokens`
        are forgotten. Raises PositionError for more tokens than any layer holds, CapacityError, Unavailable or SessionClosed.
        """
        with self._within(timeout):
            self._transport.truncate(validate.position("tokens", tokens))

    def read(self, layers: Any, start: int = 0, stop: int | None = None, *, out: Any = None, timeout: float | None = None) -> Any:
        """The KV of tokens [start, stop), as attention sees it: a pair (k, v) for the number of a layer, a list of pairs for
        several. k (after RoPE at these positions), v: `[kv_heads, stop - start, head_dim]`, numpy in the spec's dtype.

        stop: None for all tokens that every layer holds. out: arrays of numpy's or torch's in main memory to write into, in place
        of new ones, and to return, of the same form; their last dimension is contiguous. Raises LayerError, ShapeError,
        DtypeError, InvalidArgument, SessionClosed, and PositionError for tokens that are not there.
        """
        span = read_range(start, stop)
        with self._within(timeout):
            return read_layers(layers, out, lambda numbers, buffers: self._transport.read(numbers, *span, buffers))

    def fork(self, *, timeout: float | None = None) -> "Session":
        """Another session over the same tokens; nothing is copied until one of the two goes on. Raises SessionClosed."""
        with self._within(timeout):
            return Session(self._transport.fork(), self._timeout)

    def store(
        self,
        name: str,
        tokens: Any = None,
        *,
        chunk: bool = False,
        timeout: float | None = None,
        **retention: Unpack[RetentionKeywords],
    ) -> ContextInfo:
        """Keep everything in the session as a context; see `Client.store`."""
        ids = None if tokens is None else token_ids(tokens)
        kept = validate.retention(retention_of(**retention))
        with self._within(timeout):
            return self._transport.store(validate.name(name), ids, chunk=validate.flag("chunk", chunk), retention=kept)

    def explain(
        self,
        layer: int,
        *,
        analyze: bool = False,
        timeout: float | None = None,
        options: QueryOptions | None = None,
        **keywords: Unpack[QueryKeywords],
    ) -> Plan:
        """The plan of this layer's next query of one token; `str` of it is EXPLAIN, `to_dict` the same for machines.

        options, keywords: what the query asks for, as in `attention`. analyze: carry the plan out for the layer's last query, and
        say beside every estimate what it took, and what was missed; the session is left as it was. Raises LayerError,
        InvalidArgument (also for an analysis before the first query) or SessionClosed.
        """
        with self._within(timeout):
            return self._transport.explain(layer, query_options(options, **keywords), validate.flag("analyze", analyze))

    def stats(self, *, timeout: float | None = None) -> SessionStats:
        """What the session holds and has done. Raises SessionClosed."""
        with self._within(timeout):
            return self._transport.stats()

    def close(self) -> None:
        """Give everything back. Closing twice does nothing."""
        self._transport.close()
        self._forgotten.detach()

    def _within(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """The time of a call. Raises InvalidArgument for what is none."""
        return deadlines.within(self._timeout if timeout is None else timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        """Without a call on a server, so without what the layers hold by now."""
        asked, reused = len(self._transport.tokens), self._transport.reused
        return f"<Session of {self.spec.name} {self._transport.where}: prompt of {asked:,} tokens, {reused:,} of them reused>"


def transports_of(sessions: Iterable[Any]) -> list[SessionTransport]:
    """The transport of each session. Raises InvalidArgument for what is no session, and ForkedProcess."""
    given = list(validate.iterable("sessions", sessions, "what create_session returns"))
    for i, session in enumerate(given):
        if not isinstance(session, Session):
            raise InvalidArgument(f"sessions[{i}] is a {type(session).__name__}; expected what create_session returns")
    transports = [session._transport for session in given]
    forks.check(transports)
    return transports


def _positions(given: Any) -> Positions:
    """int64 `[n]`. Raises DtypeError for what are no integers."""
    array = validate.as_array("positions", token_ids(given))
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise DtypeError(f"positions have the dtype {array.dtype}; expected integers")
    return array.astype(np.int64)
