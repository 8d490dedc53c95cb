"""A session inside the engine: the views of what is stored, a mutable tail a layer, and the queries over both."""

from collections.abc import Mapping
from threading import RLock
from typing import Protocol

import numpy as np

import kvdb.analyze as analysis
import kvdb.check as check
import kvdb.planner as planner
from indexes.base import Float32
from kvdb.attention.execute import Reading
from kvdb.catalog.catalog import release
from kvdb.catalog.prefix_tree import common_prefix
from kvdb.catalog.segment import Views, visible_tokens
from kvdb.errors import InvalidArgument, NonFiniteError, PositionError, SessionClosed
from kvdb.layer import Layer
from kvdb.storage.table import BlockTable
from kvdb.types import Array, ContextInfo, ModelSpec, SessionStats, Tokens
from query_optimizer.plan import Plan
from query_optimizer.wanted import Wanted

ANYTHING = Wanted()


class Engine(planner.Engine, Protocol):
    """What a session needs of the database that opened it."""

    def opened(self, session: "SessionState") -> None: ...

    def closed(self, session: "SessionState") -> None: ...

    def store(self, session: "SessionState", name: str, tokens: Tokens | None) -> ContextInfo: ...


class Work:
    """What a session has done so far."""

    def __init__(self) -> None:
        self.queries = self.bytes_read = self.kernel_ns = 0
        self.tokens_scanned = self.tokens_retrieved = self.missed = self.missed_bound = self.missed_bound_max = 0.0
        self.rules: dict[str, int] = {}

    def count(self, plan: Plan, reading: Reading) -> None:
        self.queries += 1
        self.tokens_scanned += reading.scanned
        self.tokens_retrieved += reading.retrieved
        self.bytes_read += reading.nbytes
        self.kernel_ns += reading.kernel_ns
        self.missed += reading.missed
        self.missed_bound += reading.missed_bound
        self.missed_bound_max = max(self.missed_bound_max, reading.missed_bound_max)
        self.rules[plan.rule] = self.rules.get(plan.rule, 0) + 1


class SessionState:
    """One open session. Takes over the caller's references to `views` and the `tails`, one a layer; `close` gives them back.

    tokens: the ids known of it, int32; at least those that the views show. Thread-safe: calls on one session take turns.
    A call that raises leaves the session as it was.
    """

    def __init__(self, engine: Engine, spec: ModelSpec, views: Views, tails: list[BlockTable], tokens: Tokens) -> None:
        self.spec = spec
        self.views = views
        self.tokens = tokens
        self.reused = visible_tokens(views)
        self._engine = engine
        self._layers = [Layer(engine, spec, views, number, tail) for number, tail in enumerate(tails)]
        self._work = Work()
        self._lock = RLock()
        self._open = True
        engine.opened(self)

    @property
    def tails(self) -> list[BlockTable]:
        """One a layer; the session owns them."""
        return [layer.tail for layer in self._layers]

    def update(self, layer: int, k: Array, v: Array, start: int | None = None) -> None:
        """Append the KV of n tokens to one layer: k (after RoPE) and v, `[kv_heads, n, head_dim]`.

        start: the position the caller believes the first of them has. Raises LayerError, ShapeError, DtypeError,
        NonFiniteError, PositionError, CapacityError or SessionClosed.
        """
        with self._lock:
            state = self._layer(layer)
            check.keys_values(self.spec, k, v)
            check.start(start, state.run.tokens, layer)
            state.append(k, v)

    def attention(self, layer: int, q: Array, wanted: Wanted = ANYTHING) -> Array:
        """Attention of one layer's last n tokens over everything before and including each; q and the result are
        `[q_heads, n, head_dim]` in the spec's dtype.

        Raises LayerError, ShapeError, DtypeError, NonFiniteError, SessionClosed, and PositionError for more queries than tokens.
        """
        with self._lock:
            state = self._layer(layer)
            n = self._queries(state, q)
            state.planner.check(wanted)
            if n > state.run.tokens:
                raise PositionError(
                    f"q asks for the last {n} tokens of layer {layer}, which holds {state.run.tokens}; "
                    "update the layer first, or use attend"
                )
            return self._answer(state, q, wanted)

    def attend(self, layer: int, q: Array, k: Array, v: Array, wanted: Wanted = ANYTHING, start: int | None = None) -> Array:
        """`update` and `attention` in one call, for the same n tokens. Raises what they raise, and ShapeError when q, k and v
        are not of the same n."""
        with self._lock:
            state = self._layer(layer)
            n = self._queries(state, q)
            state.planner.check(wanted)
            check.same_tokens(n, check.keys_values(self.spec, k, v))
            check.start(start, state.run.tokens, layer)
            state.append(k, v)
            return self._answer(state, q, wanted)

    def fork(self) -> "SessionState":
        """Another session over the same tokens. Nothing is copied until one of the two writes."""
        with self._lock:
            self._check_open()
            for view in self.views:
                view.segment.retain()
            tails = [tail.share() for tail in self.tails]
            return SessionState(self._engine, self.spec, self.views, tails, self.tokens)

    def store(self, name: str, tokens: Tokens | None = None) -> ContextInfo:
        """Keep everything in the session as a context. tokens: the ids of all of it, when it outgrew those it was opened with.

        Raises AlreadyExists, InvalidArgument, PositionError (layers of different lengths) or SessionClosed.
        """
        with self._lock:
            self._check_open()
            return self._engine.store(self, name, tokens)

    def ids(self, tokens: Tokens | None) -> Tokens:
        """The ids of everything in it, of which `tokens` are all, where given. Raises PositionError or InvalidArgument."""
        lengths = {self.reused + tail.length for tail in self.tails}
        if len(lengths) > 1:
            raise PositionError(
                f"the session's layers hold {min(lengths)} to {max(lengths)} tokens; update them all before it is stored"
            )
        length = lengths.pop()
        ids = self.tokens if tokens is None else check.token_ids(tokens)
        if len(ids) < length or (tokens is not None and len(ids) != length):
            raise InvalidArgument(
                f"the session holds {length} tokens and {len(ids)} ids are known; pass tokens= with the ids of all {length}"
            )
        if not length:
            raise InvalidArgument("the session holds no tokens; expected at least one to store")
        known = self.tokens[:length]
        where = common_prefix(ids, known)
        if where < len(known):
            raise InvalidArgument(f"tokens[{where}] is {ids[where]}, but the session was opened with {known[where]} there")
        return np.ascontiguousarray(ids[:length])

    def explain(self, layer: int, wanted: Wanted = ANYTHING, analyze: bool = False) -> Plan:
        """`plan`; analyze: with what it takes to carry it out for the layer's last query. Raises LayerError, SessionClosed, and
        InvalidArgument for hints that cannot be, or an analysis before the first query."""
        with self._lock:
            state = self._layer(layer)
            state.planner.check(wanted)
            if not analyze:
                return state.planner.plan(wanted)
            if state.samples.last is None:
                raise InvalidArgument(f"layer {layer} has seen no query to analyze; ask one, or explain without analyze")
            return analysis.analyze(state, self.spec, wanted, state.samples.last)

    def suppose(self, samples: Mapping[int, Float32]) -> None:
        """Take the last of these queries, float32 `[q_heads, m, head_dim]` by layer, as the last that was asked."""
        for number, queries in samples.items():
            self._layers[number].samples.last = queries[:, -1:].astype(self.spec.numpy_dtype)

    def samples(self) -> dict[int, Float32]:
        """Some queries of each layer that was asked any, float32 `[q_heads, m, head_dim]`."""
        kept = {number: layer.samples.all() for number, layer in enumerate(self._layers)}
        return {number: queries for number, queries in kept.items() if queries is not None}

    def stats(self) -> SessionStats:
        """What the session holds and has done. Raises SessionClosed."""
        with self._lock:
            self._check_open()
            work, lengths = self._work, [layer.run.tokens for layer in self._layers]
            return SessionStats(
                tokens=min(lengths),
                reused=self.reused,
                tail_tokens=min(lengths) - self.reused,
                tail_nbytes=sum(tail.nbytes for tail in self.tails),
                queries=work.queries,
                tokens_scanned=round(work.tokens_scanned),
                tokens_retrieved=round(work.tokens_retrieved),
                bytes_read=work.bytes_read,
                missed_mass=work.missed / max(work.queries, 1),
                missed_mass_bound=work.missed_bound / max(work.queries, 1),
                missed_mass_bound_max=work.missed_bound_max,
                kernel_seconds=work.kernel_ns / 1e9,
                rules=dict(work.rules),
            )

    def close(self) -> None:
        """Give every block back. Closing twice does nothing."""
        with self._lock:
            if self._open:
                self._open = False
                for layer in self._layers:
                    layer.tally.hand_on()
                for tail in self.tails:
                    tail.release()
                release(self.views)
                self._engine.closed(self)

    def _check_open(self) -> None:
        if not self._open:
            raise SessionClosed("the session is closed; open another with create_session")

    def _layer(self, number: int) -> Layer:
        self._check_open()
        check.layer(self.spec, number)
        return self._layers[number]

    def _queries(self, layer: Layer, q: Array) -> int:
        n = check.queries(self.spec, q)
        if not layer.tail.layout.finite(q):
            raise NonFiniteError("q holds NaN or infinity; expected finite numbers, so find where the model produced them")
        return n

    def _answer(self, layer: Layer, q: Array, wanted: Wanted) -> Array:
        out, plan, reading = layer.answer(q, wanted)
        self._work.count(plan, reading)
        return out
