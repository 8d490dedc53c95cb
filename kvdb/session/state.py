"""An open session: appends to what it holds, and queries over it."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

import kvdb.deadlines as deadlines
import kvdb.validate as validate
from indexes.base import Float32
from kvdb.blend.controller import Choice
from kvdb.blend.strategies import DEFAULT_RATIO
from kvdb.catalog.key_values import read_tokens
from kvdb.errors import PositionError
from kvdb.session.explain_analyze import analyze_plan
from kvdb.session.open_session import OpenSession
from kvdb.storage.paged_segment import paging_notes, pinned
from kvdb.types import DEFAULT_RETENTION, Array, ContextInfo, KeysValues, Positions, Retention, SessionStats, Tokens
from query_optimizer.plan import Plan
from query_optimizer.query_options import NO_OPTIONS, QueryOptions


class SessionState(OpenSession):
    """The calls on one open session. A call that raises leaves the session as it was.

    Calls wait for a layer that is still being loaded from disk, which may raise IntegrityError or Unavailable.
    """

    def update(self, layer: int, k: Array, v: Array, start: int | None = None) -> None:
        """Append the KV of n tokens to one layer: k (after RoPE) and v, `[kv_heads, n, head_dim]`.

        start: the position the caller believes the first of them has. Raises LayerError, ShapeError, DtypeError,
        NonFiniteError, PositionError, CapacityError or SessionClosed.
        """
        with self.turns:
            state = self.layer(layer)
            validate.keys_values(self.spec, k, v)
            validate.start(start, state.run.tokens, layer)
            self.append(state, k, v)

    def attention(self, layer: int, q: Array, options: QueryOptions = NO_OPTIONS) -> Array:
        """Attention of one layer's last n tokens over everything before and including each; q and the result are
        `[q_heads, n, head_dim]` in the spec's dtype.

        Raises LayerError, ShapeError, DtypeError, NonFiniteError, SessionClosed, and PositionError for more queries than tokens.
        """
        with self.turns:
            state = self.layer(layer)
            options = state.resolve(options)
            n = state.check_queries(q)
            state.check_last(n)
            if not n:
                return np.empty_like(q)
            out, plan, stats = state.answer(q, options)
            self.counters.count(plan, stats, state.run.tokens)
            return out

    def attend(
        self, layer: int, q: Array, k: Array, v: Array, options: QueryOptions = NO_OPTIONS, start: int | None = None
    ) -> Array:
        """`update` and `attention` in one call, for the same n tokens. Raises what they raise, and ShapeError when q, k and v
        are not of the same n; then nothing is appended."""
        with self.turns:
            out: Array | None = self.step(layer, q, k, v, options, start)
            return self._attend(layer, q, k, v, options, start) if out is None else out

    def step(self, layer: int, q: Any, k: Any, v: Any, options: QueryOptions, start: int | None) -> Any | None:
        """`attend` of one token by native code alone; arrays are numpy's or torch's, in main memory, and the answer is as q. None
        where more is needed, an argument is wrong, or the session is closed; then nothing was done."""
        with self.turns:
            steps = self.native_steps(layer)
            return None if steps is None else steps.attend(q, k, v, options, start)

    def _attend(self, layer: int, q: Array, k: Array, v: Array, asked: QueryOptions, start: int | None) -> Array:
        """`attend` with Python's help. The caller holds `turns`."""
        state = self.layer(layer)
        n = state.check_queries(q)
        options = state.resolve(asked)
        validate.same_tokens(n, validate.keys_values(self.spec, k, v))
        validate.start(start, state.run.tokens, layer)
        state.check_no_gaps()
        if not n:
            return np.empty_like(q)
        self.append(state, k, v)
        with ExitStack() as undo:
            undo.callback(state.take_back, n)
            out, plan, stats = state.answer(q, options)
            undo.pop_all()
        self.counters.count(plan, stats, state.run.tokens)
        state.native_steps.native.last_ns = stats.kernel_ns
        state.go_on(asked)
        return out

    def look_ahead(self, layer: int) -> None:
        """Do what the next step of this layer would begin with, while nobody waits for it."""
        with self.turns:
            self.native_steps(layer)

    def last_kernel(self, layer: int) -> tuple[float, int]:
        """How many seconds the kernels of the last `attend` of a layer took, and how many threads a native one uses."""
        native = self._layers[layer].native_steps.native
        return native.last_ns / 1e9, native.threads

    def plan_recompute(self, seconds: float | None = None, floor: float = DEFAULT_RATIO, ratio: float | None = None) -> Choice:
        """How much to recompute of what was laid out, from measured rates; EXPLAIN shows it from now on.

        seconds: the time to recompute one token in one layer, None where the caller does not know. floor: the least ratio that
        quality needs. ratio: the ratio that the caller asks for, which is kept. Raises InvalidArgument or SessionClosed.
        """
        with self.turns:
            self._settle()
            return self._recomputing.plan(self.services.loader.rate, seconds, floor, ratio)

    def overlay(self, layer: int, positions: Positions, k: Array, v: Array) -> None:
        """Recomputed KV of tokens before the tail, of one layer: k (after RoPE there) and v, `[kv_heads, n, head_dim]`.

        They replace the stored KV for this session; what is stored stays as it is. positions: int64 `[n]`, ascending, of tokens
        without an overlay in this layer. Raises LayerError, ShapeError, DtypeError, NonFiniteError, PositionError,
        InvalidArgument, CapacityError or SessionClosed.
        """
        with self.turns:
            state = self.layer(layer)
            n = validate.keys_values(self.spec, k, v)
            validate.positions(positions, n, self.start, layer)
            self._recomputing.overlay(state, positions, k, v)

    def attention_at(self, layer: int, q: Array, positions: Positions) -> Array:
        """Attention of tokens before the tail, each over everything up to its own position as the layer is now; q and the result
        are `[q_heads, n, head_dim]` in the spec's dtype.

        Raises LayerError, ShapeError, DtypeError, NonFiniteError, SessionClosed, and PositionError for positions that are not
        ascending or not before the tail, and while any gap of the layer holds nothing yet.
        """
        with self.turns:
            deadlines.check()
            state = self.layer(layer)
            n = state.check_queries(q)
            validate.positions(positions, n, self.start, layer)
            state.check_no_gaps()
            return self._recomputing.attention(state, q, positions)

    def measure_deviation(self, layer: int, positions: Positions, k: Array, v: Array, score: str | None = None) -> Float32:
        """Measures of how far fresh KV is from the session's KV at these positions, float32 `[2, n]`, of which
        `kvdb.blend.deviation.deviation` makes scores; NaN where nothing is stored.

        k, v: as for `overlay`. score: one of kvdb.blend.deviation.SCORES, None for its default. Raises LayerError, ShapeError,
        DtypeError, PositionError, InvalidArgument for another score, or SessionClosed.
        """
        with self.turns:
            state = self.layer(layer)
            n = validate.keys_values(self.spec, k, v)
            validate.positions(positions, n, self.start, layer)
            return self._recomputing.measure_deviation(state, positions, k, v, score)

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of every layer, and forget those behind; a layer that holds fewer stays as it is.

        It may cut into what was stored, which stays stored: then `start` and `reused` are less from now on. Ids behind `tokens`
        are forgotten too. Raises PositionError for more tokens than any layer holds, CapacityError where recomputed tokens have
        to be copied, Unavailable or SessionClosed, and then the session is as it was.
        """
        with self.turns:
            self._settle()
            longest = max(layer.run.tokens for layer in self._layers)
            validate.held("tokens", tokens, longest, "as many as the session holds")
            if tokens < self.start:
                self.cut(tokens)
            if self.shared is not None:
                self.shared.forget()
            for layer in self._layers:
                layer.take_back(max(0, layer.run.tokens - tokens))
            self.tokens = self.tokens[:tokens]

    def read(
        self, layers: Sequence[int], start: int, stop: int | None = None, out: Sequence[KeysValues] | None = None
    ) -> list[KeysValues]:
        """The KV of tokens [start, stop) of some layers, in their order, as attention sees it: keys at these positions, and
        recomputed tokens in place of stored ones. stop: None for all tokens that every layer holds.

        out: what to write into and return, None for new arrays. Raises LayerError, ShapeError, DtypeError, InvalidArgument or
        SessionClosed, and PositionError for tokens that are not there.
        """
        with self.turns:
            end = self.check_read(layers, start, stop)
            pairs = [] if out is None else list(out)
            for k, v in pairs:
                validate.buffers(self.spec, k, v, end - start)
            shape = self.spec.kv_heads, end - start, self.spec.head_dim
            for i, number in enumerate(layers):
                deadlines.check()
                if out is None:
                    pairs.append((np.empty(shape, self.spec.numpy_dtype), np.empty(shape, self.spec.numpy_dtype)))
                layer = self.layer(number)
                with pinned(layer.pages):
                    read_tokens(self.snapshot, number, layer.tail, start, *pairs[i])
            return pairs

    def check_read(self, layers: Sequence[int], start: int, stop: int | None = None) -> int:
        """The token at which `read` of these layers would stop. Raises LayerError, PositionError or SessionClosed."""
        with self.turns:
            self._settle()
            for number in layers:
                validate.layer(self.spec, number)
            asked = self._layers if stop is None else [self._layers[number] for number in layers] or self._layers
            held = min(layer.run.tokens for layer in asked)
            end = held if stop is None else validate.held("stop", stop, held, "as many tokens as the layers hold")
            validate.held("start", start, end, "where the tokens end that are read")
            for number in layers:
                missing = self._layers[number].missing()
                if len(missing[(missing >= start) & (missing < end)]):
                    raise PositionError(f"tokens of layer {number} hold nothing yet; hand in their KV with overlay first")
            return end

    def fork(self) -> "SessionState":
        """Another session over the same tokens. Nothing is copied until one of the two writes."""
        with self.turns:
            self._settle()
            snapshot, tails = self.snapshot.share(), [tail.share() for tail in self.tails]
            terms = replace(self.terms, salt=self.salt)
            return SessionState(self.services, self.spec, snapshot, tails, self.tokens, terms)

    def store(
        self, name: str, tokens: Tokens | None = None, *, chunk: bool = False, retention: Retention = DEFAULT_RETENTION
    ) -> ContextInfo:
        """Keep everything in the session as a context. tokens: the ids of all its tokens, if it has more than it was opened with.
        chunk: whether to store only the tokens behind `start`, as a chunk. retention: how long the context is kept.

        Raises AlreadyExists, InvalidArgument, PositionError (layers of different lengths, or gaps that hold nothing yet) or
        SessionClosed.
        """
        with self.turns:
            self._settle()
            for layer in self._layers:
                layer.check_no_gaps()
            return self.services.publisher.store(self, name, tokens, chunk=chunk, retention=retention)

    def explain(self, layer: int, options: QueryOptions = NO_OPTIONS, analyze: bool = False) -> Plan:
        """The plan of a query. analyze: whether to carry it out for the layer's last query, and add its measured costs. Raises
        LayerError, SessionClosed, InvalidArgument for hints that cannot be, or an analysis before the first query, and
        PositionError for an analysis of a layer without tokens."""
        with self.turns:
            state = self.layer(layer)
            asked = state.resolve(options)
            reads = state.page_reads
            plan = analyze_plan(state, self.spec, asked) if analyze else state.planner.plan(asked)
            state.page_reads = reads  # the analysis had everything in memory
            notes = self._recomputing.notes(layer) + paging_notes(state.pages, reads) + state.audits.notes()
            return replace(plan, notes=notes)

    def set_last_queries(self, queries_by_layer: Mapping[int, Float32]) -> None:
        """Treat the last of these queries, float32 `[q_heads, m, head_dim]` by layer, as the session's last query."""
        for number, queries in queries_by_layer.items():
            self._layers[number].query_samples.last = queries[:, -1:].astype(self.spec.numpy_dtype)

    def query_samples(self) -> dict[int, Float32]:
        """A sample of the queries of each layer that had queries, float32 `[q_heads, m, head_dim]`."""
        kept = ((number, layer.query_samples.all()) for number, layer in enumerate(self._layers))
        return {number: queries for number, queries in kept if queries is not None}

    def stats(self) -> SessionStats:
        """What the session holds and has done. Raises SessionClosed."""
        with self.turns:
            self._check_open()
            for layer in self._layers:
                layer.count_native_steps()
                layer.audits.settle()
            tokens, nbytes = min(layer.run.tokens for layer in self._layers), sum(tail.filled_nbytes for tail in self.tails)
            return self.counters.stats(tokens, self.start, self.reused, nbytes, [layer.audits for layer in self._layers])
