"""The session a user holds; the same for an embedded and a remote database."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import numpy as np

import kvdb.check as check
from indexes.retrieval import Retrieval
from kvdb.blend.controller import Choice
from kvdb.blend.strategies import DEFAULT_RATIO
from kvdb.client.arrays import like, to_numpy, token_ids
from kvdb.client.transport import SessionTransport
from kvdb.errors import DtypeError, InvalidArgument
from kvdb.types import ContextInfo, ModelSpec, Placed, Positions, SessionStats, Tokens
from query_optimizer.plan import Plan
from query_optimizer.wanted import Hints


class Session:
    """A context opened for decoding: what is stored of the prompt, and a tail of new tokens.

    Arrays are numpy or torch, in the spec's dtype, and answers are of the kind of the query. A call that raises leaves the
    session as it was. Close it, or use it in a `with`, to give its memory back.
    """

    def __init__(self, transport: SessionTransport) -> None:
        self._transport = transport

    @property
    def spec(self) -> ModelSpec:
        return self._transport.spec

    @property
    def reused(self) -> int:
        """How many tokens of the prompt need no prefill."""
        return self._transport.reused

    @property
    def start(self) -> int:
        """The position of the first token that `update` and `attend` append: behind the stored prefix, or behind the last
        context that was laid out."""
        return self._transport.start

    @property
    def tokens(self) -> Tokens:
        """The ids it was opened with, int32 `[n]`, a copy: of its prompt, or of all its parts."""
        return self._transport.tokens.copy()

    @property
    def layout(self) -> tuple[Placed, ...]:
        """What stands where before `start`: a stored prefix, chunks, and tokens of which nothing was stored."""
        return self._transport.layout

    def update(self, layer: int, k: Any, v: Any, *, start: int | None = None) -> None:
        """Append the KV of the next n tokens of one layer.

        k (after RoPE), v: `[kv_heads, n, head_dim]`. start: the position the caller believes the first has, to be checked.
        Raises LayerError, ShapeError, DtypeError, NonFiniteError, PositionError, CapacityError or SessionClosed.
        """
        self._transport.update(layer, to_numpy(k), to_numpy(v), start)

    def plan_recompute(self, *, seconds: float | None = None, floor: float = DEFAULT_RATIO, ratio: float | None = None) -> Choice:
        """How much to recompute of what was laid out, so that loading chunks from where they lie hides it: the largest ratio that
        does, never under the floor. EXPLAIN shows it.

        seconds: what recomputing one token takes in one layer, None where the caller has not measured it. floor: the least ratio
        that quality needs. ratio: the caller's own, which is kept. Raises InvalidArgument for ratios outside [0, 1] and for what
        are no numbers, or SessionClosed.
        """
        measured = None if seconds is None else check.number("seconds", seconds)
        asked = None if ratio is None else check.number("ratio", ratio)
        return self._transport.plan_recompute(measured, check.number("floor", floor), asked)

    def overlay(self, layer: int, positions: Any, k: Any, v: Any) -> None:
        """Fill gaps of one layer, or recompute tokens that are stored: their new KV masks the stored one, which stays as it is.

        positions: n ascending positions before `start`, of tokens that have no overlay in this layer yet. k (after RoPE at these
        positions), v: `[kv_heads, n, head_dim]`. Raises LayerError, ShapeError, DtypeError, NonFiniteError, PositionError,
        InvalidArgument for a session on a prefix, CapacityError or SessionClosed.
        """
        self._transport.overlay(layer, _positions(positions), to_numpy(k), to_numpy(v))

    def deviation(self, layer: int, positions: Any, k: Any, v: Any, *, score: str | None = None) -> Any:
        """How far fresh KV is from what this layer holds at these positions, moved there: float32 `[n]`, of the kind of k,
        infinite for gaps. Arguments as in `overlay`; score: one of kvdb.blend.deviation.SCORES, None for its default. Raises what
        `overlay` raises, and InvalidArgument for another score."""
        return like(self._transport.deviation(layer, _positions(positions), to_numpy(k), to_numpy(v), score), k)

    def attention(
        self,
        layer: int,
        q: Any,
        *,
        positions: Any = None,
        retrieval: Retrieval | None = None,
        max_missed_mass: float | None = None,
        estimate_tail: bool = False,
        hints: Hints | None = None,
    ) -> Any:
        """Attention of one layer's last n tokens, each over everything up to and including itself.

        q (after RoPE) and the result: `[q_heads, n, head_dim]`. retrieval: which tokens are read, kvdb.Exact(), Dipr(alpha),
        TopK(k) or TopP(p); None lets the optimizer decide. max_missed_mass: read on until the share of the softmax mass that was
        left out is proven to be at most this. estimate_tail: add an estimate of the attention over what was left out, where the
        index can make one. hints: kvdb.Hints, how it is to be done. positions: ask for n tokens before `start`, ascending,
        in a session that was laid out; they read everything up to their own position, overlays in place of what they mask.
        Raises LayerError, ShapeError, DtypeError, NonFiniteError, InvalidArgument, Unsupported, SessionClosed, and PositionError
        for more queries than tokens, or while a gap holds nothing.
        """
        if positions is not None:
            return like(self._transport.attention_at(layer, to_numpy(q), _positions(positions)), q)
        wanted = check.wanted(retrieval, max_missed_mass, estimate_tail, hints)
        return like(self._transport.attention(layer, to_numpy(q), wanted), q)

    def attend(  # noqa: PLR0913  # the three arrays, and what `attention` and `update` take
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        retrieval: Retrieval | None = None,
        max_missed_mass: float | None = None,
        estimate_tail: bool = False,
        hints: Hints | None = None,
        start: int | None = None,
    ) -> Any:
        """`update` and `attention` of the same n tokens in one call. Raises what both raise."""
        wanted = check.wanted(retrieval, max_missed_mass, estimate_tail, hints)
        return like(self._transport.attend(layer, to_numpy(q), to_numpy(k), to_numpy(v), wanted, start), q)

    def fork(self) -> "Session":
        """Another session over the same tokens; nothing is copied until one of the two goes on. Raises SessionClosed."""
        return Session(self._transport.fork())

    def store(self, name: str, tokens: Any = None, *, chunk: bool = False) -> ContextInfo:
        """Keep everything in the session as a context; see `Client.store`."""
        return self._transport.store(name, token_ids(tokens), chunk=chunk)

    def explain(  # what `attention` takes
        self,
        layer: int,
        *,
        analyze: bool = False,
        retrieval: Retrieval | None = None,
        max_missed_mass: float | None = None,
        estimate_tail: bool = False,
        hints: Hints | None = None,
    ) -> Plan:
        """The plan of this layer's next query of one token; `str` of it is EXPLAIN, `to_dict` the same for machines.

        analyze: carry it out for the layer's last query, and say beside every estimate what it took, and what was missed; the
        session is left as it was. Raises LayerError, InvalidArgument (also for an analysis before the first query) or
        SessionClosed.
        """
        wanted = check.wanted(retrieval, max_missed_mass, estimate_tail, hints)
        return self._transport.explain(layer, wanted, bool(analyze))

    def stats(self) -> SessionStats:
        """What the session holds and has done. Raises SessionClosed."""
        return self._transport.stats()

    def close(self) -> None:
        """Give everything back. Closing twice does nothing."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def transports_of(sessions: Iterable[Any]) -> list[SessionTransport]:
    """What stands behind each session. Raises InvalidArgument for what is none."""
    given = list(sessions)
    for i, session in enumerate(given):
        if not isinstance(session, Session):
            raise InvalidArgument(f"sessions[{i}] is a {type(session).__name__}; expected what create_session returns")
    return [session._transport for session in given]


def _positions(given: Any) -> Positions:
    """int64 `[n]`. Raises DtypeError for what are no integers."""
    array = np.asarray(token_ids(given))
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise DtypeError(f"positions have the dtype {array.dtype}; expected integers")
    return array.astype(np.int64)
