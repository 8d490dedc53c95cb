"""An open session: what it holds, appends to it, queries over it, and how it is given back."""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import RLock
from time import time
from typing import Any, Protocol

import kvdb.catalog.contexts.residency as residency
import kvdb.deadlines as deadlines
import kvdb.forks as forks
import kvdb.session.selected as selected
import kvdb.session.step as steps
import kvdb.validate as validate
from kvdb.blend.controller import Choice
from kvdb.blend.strategies import DEFAULT_RATIO
from kvdb.catalog.compaction.relayout import Relayout
from kvdb.catalog.segments.key_values import read_tokens
from kvdb.catalog.segments.overhead import session_nbytes
from kvdb.catalog.segments.segment_view import Views
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.errors import CapacityError, IntegrityError, PositionError, SessionClosed, Unavailable
from kvdb.events import Kind
from kvdb.session.asked import EndedSession
from kvdb.session.explain_analyze import analyze_plan
from kvdb.session.known_ids import ids_of
from kvdb.session.layer import Layer
from kvdb.session.recompute import Recomputing
from kvdb.session.runner import StepRunner
from kvdb.session.services import SessionServices
from kvdb.session.states import SessionStates
from kvdb.session.terms import NO_TERMS, SessionTerms
from kvdb.storage.block_table import BlockTable
from kvdb.storage.paged_segment import paging_notes, pinned
from kvdb.types import (
    DEFAULT_RETENTION,
    Array,
    ContextInfo,
    Float32,
    KeysValues,
    ModelSpec,
    Placed,
    Positions,
    Retention,
    SessionStats,
    Tokens,
)
from query_optimizer.plan import Plan
from query_optimizer.query_options import NO_OPTIONS, QueryOptions

# size: one noun, an open session
ID_BYTES = 16
NAME_LETTERS = 8


class SessionState:
    """An open session: views of what is stored, a mutable tail for each layer, and the calls on them.

    A call that raises leaves it as it was. Calls on one session take turns, so it is thread-safe. They wait for a layer that is
    still being loaded from disk, which may raise IntegrityError or Unavailable.

    It takes over the `snapshot`, the `tails`, one for each entry of `spec.kept`, and the `states`; `close` releases them. The
    constructor raises Unavailable for a closed database, and CapacityError, and then everything was given back.

    tokens: its known token ids, int32; at least those before the tail. start: the position of the tail's first token. reused: the
    number of tokens before it that were stored when it was opened. label: under which others are told of it, "" for nobody.
    id: whoever knows it may use the session, so it cannot be guessed. tenant: whose it is, "" for whoever runs the database.
    opened: seconds since 1970. terms: with which it was opened, its error_max known. shared: what others find of it while it is
    open, None for nothing.
    """

    def __init__(
        self,
        services: SessionServices,
        spec: ModelSpec,
        snapshot: Snapshot,
        tails: list[BlockTable],
        tokens: Tokens,
        terms: SessionTerms = NO_TERMS,
        states: SessionStates | None = None,
    ) -> None:
        self.spec = spec
        self.snapshot = snapshot
        self.tokens = tokens
        self.salt = terms.salt
        self.label = ""
        self.id = secrets.token_urlsafe(ID_BYTES)
        self.tenant = ""
        self.opened = time()
        self.start = snapshot.layout.length
        self.reused = self.start - len(snapshot.missing(0))
        self.services = services
        self._recomputing = Recomputing(spec, snapshot)
        nbytes = session_nbytes(spec, snapshot.views, len(tokens))
        self._beside = residency.pin_snapshot(snapshot, tails, services.loader, services.budget, nbytes)
        self.error_max = services.config.optimizer.error_max if terms.error_max is None else terms.error_max
        self.terms = replace(terms, error_max=self.error_max)
        self.counters = services.activity.begin()
        for view in snapshot.views:
            view.segment.evidence.adopt(services.habits.of(spec, self.salt), view.segment.number, len(view.segment))
        self._layers = [
            Layer(services, spec, snapshot, number, tail, self.terms, self.counters) for number, tail in enumerate(tails)
        ]
        own = {kept.layer: place for place, kept in enumerate(spec.kept) if kept.what == "kv"}
        self._own = [self._layers[own[number]] if number in own else None for number in range(spec.layers)]
        self.states = SessionStates(spec, services.budget, snapshot.views) if states is None else states
        self.shared: SharedBeginning | None = None
        self.turns = RLock()
        self.due = False
        self._open = True
        forks.stays_behind(self, *forks.SESSION)
        _count_open(self.views, 1)
        try:
            services.handles.add(self)
        except Unavailable:
            self.close()
            raise
        self._hold()
        services.events.tell(Kind.SESSION_OPENED, tokens=len(tokens), reused=self.reused)

    def update(self, layer: int, k: Array, v: Array, start: int | None = None, *, indexer: bool = False) -> None:
        """Append the KV of n tokens to one layer: k (after RoPE) and v, `[kv_heads, n, head_dim]`. indexer: whether they are the
        keys of its indexer, `[1, n, dim]`, and v has no numbers.

        start: the position the caller believes the first of them has; in a layer with a window it may lie behind the next one, if
        no later query sees the tokens between. Raises LayerError, ShapeError, DtypeError,
        NonFiniteError, PositionError, CapacityError or SessionClosed.
        """
        with self.turns:
            state = self.own_layer(layer, indexer=indexer)
            n = validate.keys_values(state.shape, k, v)
            self.append(state, k, v, validate.skipped(state.shape, start, state.run.tokens, n, layer))

    def attention(self, layer: int, q: Array, options: QueryOptions = NO_OPTIONS) -> Array:
        """Attention of one layer's last n tokens over everything before and including each; q and the result are
        `[q_heads, n, head_dim]` in the spec's dtype.

        Raises LayerError, ShapeError, DtypeError, NonFiniteError, SessionClosed, and PositionError for more queries than tokens.
        """
        return steps.attention([self], layer, [q], options)[0]

    def attend(
        self, layer: int, q: Array, k: Array, v: Array, options: QueryOptions = NO_OPTIONS, start: int | None = None
    ) -> Array:
        """`update` and `attention` in one call, for the same n tokens. Raises what they raise, and ShapeError when q, k and v
        are not of the same n; then nothing is appended."""
        with self.turns:
            out: Array | None = self.step(layer, q, k, v, options, start)
            return steps.plan([self], layer, [q], [k], [v], options, [start])[0] if out is None else out

    def attend_selected(
        self, layer: int, q: Array, kv: KeysValues | None, asked: tuple[Float32, Float32], start: int | None = None
    ) -> Array:
        """See `kvdb.session.selected.attend`."""
        return selected.attend(self, layer, q, kv, asked, start)

    def step(self, layer: int, q: Any, k: Any, v: Any, options: QueryOptions, start: int | None) -> Any | None:
        """`attend` of one token by the layer's runner alone; arrays are numpy's or torch's, where the session's tokens lie, and
        the answer is as q. None where more is needed, an argument is wrong, or the session is closed; then nothing was done."""
        with self.turns:
            runner = self.runner(layer)
            return None if runner is None else runner.run(q, k, v, options, start)

    def look_ahead(self, layer: int) -> None:
        """Do what the next step of this layer would begin with, while nobody waits for it."""
        with self.turns:
            self.runner(layer)

    def last_kernel(self, layer: int) -> tuple[float, int]:
        """How many seconds the kernels of the last `attend` of a layer took, and how many threads a native one uses."""
        ns, threads = self._layers[validate.place(self.spec, layer)].runner.last_kernel()
        return ns / 1e9, threads

    def plan_recompute(self, seconds: float | None = None, floor: float = DEFAULT_RATIO, ratio: float | None = None) -> Choice:
        """How much to recompute of what was laid out, from measured rates; EXPLAIN shows it from now on.

        seconds: the time to recompute one token in one layer, None where the caller does not know. floor: the least ratio that
        quality needs. ratio: the ratio that the caller asks for, which is kept. Raises InvalidArgument or SessionClosed.
        """
        with self.turns:
            self._stop()
            return self._recomputing.plan(self.services.loader.rate, seconds, floor, ratio)

    def overlay(self, layer: int, positions: Positions, k: Array, v: Array) -> None:
        """Recomputed KV of tokens before the tail, of one layer: k (after RoPE there) and v, `[kv_heads, n, head_dim]`.

        They replace the stored KV for this session; what is stored stays as it is. positions: int64 `[n]`, ascending, of tokens
        without an overlay in this layer. Raises LayerError, ShapeError, DtypeError, NonFiniteError, PositionError,
        InvalidArgument, CapacityError or SessionClosed.
        """
        with self.turns:
            state = self.layer(layer)
            n = validate.keys_values(state.shape, k, v)
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

    def deviation(self, layer: int, positions: Positions, k: Array, v: Array, score: str | None = None) -> Float32:
        """Measures of how far fresh KV is from the session's KV at these positions, float32 `[2, n]`, of which
        `kvdb.blend.deviation.deviation` makes scores; NaN where nothing is stored.

        k, v: as for `overlay`. score: one of kvdb.blend.deviation.SCORES, None for its default. Raises LayerError, ShapeError,
        DtypeError, PositionError, InvalidArgument for another score, or SessionClosed.
        """
        with self.turns:
            state = self.layer(layer)
            n = validate.keys_values(state.shape, k, v)
            validate.positions(positions, n, self.start, layer)
            return self._recomputing.measure_deviation(state, positions, k, v, score)

    def state(self, layer: int, position: int | None = None) -> Mapping[str, Array]:
        """The state of a layer at a position, None for behind all tokens; see `SessionStates.get`. Raises SessionClosed too."""
        with self.turns:
            self._check_open()
            return self.states.get(layer, self._held() if position is None else position)

    def put_state(self, layer: int, arrays: Mapping[str, Array], position: int | None = None) -> None:
        """Keep the state of a layer at a position, None for behind all tokens; see `SessionStates.put`. Raises PositionError and
        SessionClosed too."""
        with self.turns:
            self._check_open()
            validate.state(self.spec, layer, arrays)
            held = self._held()
            self.states.put(layer, arrays, validate.state_position(held if position is None else position, held))

    def put_sinks(self, layer: int, sinks: Float32) -> None:
        """The logits of a layer's sinks, float32 `[q_heads]`, for its queries from now on. Raises LayerError, InvalidArgument for
        a layer without sinks, ShapeError, DtypeError, NonFiniteError or SessionClosed."""
        with self.turns:
            state = self.layer(layer)
            state.set_sinks(validate.sinks(state.shape, layer, sinks))

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of every layer, and forget those behind; a layer that holds fewer stays as it is.

        It may cut into what was stored, which stays stored: then `start` and `reused` are less from now on. Ids behind `tokens`
        are forgotten too. Raises PositionError for more tokens than any layer holds, CapacityError where recomputed tokens have
        to be copied, Unavailable or SessionClosed, and then the session is as it was.
        """
        with self.turns:
            self._stop()
            longest = max(layer.run.tokens for layer in self._layers)
            validate.held("tokens", tokens, longest, "as many as the session holds")
            for layer in self._layers:
                layer.check_truncated(tokens)
            if tokens < self.start:
                self.cut(tokens)
            if self.shared is not None:
                self.shared.forget()
            for layer in self._layers:
                layer.truncate(max(0, layer.run.tokens - tokens))
            self.states.truncate(tokens)
            self.tokens = self.tokens[:tokens]

    def read(
        self,
        layers: Sequence[int],
        start: int,
        stop: int | None = None,
        out: Sequence[KeysValues] | None = None,
        *,
        indexer: bool = False,
    ) -> list[KeysValues]:
        """The KV of tokens [start, stop) of some layers, in their order, as attention sees it: keys at these positions, and
        recomputed tokens in place of stored ones. stop: None for all tokens that every layer holds.

        out: what to write into and return, None for new arrays. indexer: whether the keys of the layers' indexers are read.
        Raises LayerError, ShapeError, DtypeError, InvalidArgument or SessionClosed, and PositionError for tokens that are not
        there.
        """
        with self.turns:
            end = self.check_read(layers, start, stop, indexer=indexer)
            asked = [self.layer(number, indexer=indexer) for number in layers]
            pairs = [layer.shape.empty(end - start) for layer in asked] if out is None else list(out)
            for layer, (k, v) in zip(asked, pairs, strict=True):
                validate.buffers(layer.shape, k, v, end - start)
            for layer, pair in zip(asked, pairs, strict=True):
                deadlines.check()
                with pinned(layer.pages):
                    read_tokens(self.snapshot, layer.number, layer.tail, start, *pair)
            return pairs

    def check_read(self, layers: Sequence[int], start: int, stop: int | None = None, *, indexer: bool = False) -> int:
        """The token at which `read` of these layers would stop. Raises LayerError, PositionError or SessionClosed."""
        with self.turns:
            self._stop()
            places = [validate.place(self.spec, number, indexer=indexer) for number in layers]
            asked = self._layers if stop is None else [self._layers[place] for place in places] or self._layers
            held = min(layer.run.tokens for layer in asked)
            end = held if stop is None else validate.held("stop", stop, held, "as many tokens as the layers hold")
            validate.held("start", start, end, "where the tokens end that are read")
            for number, place in zip(layers, places, strict=True):
                if start < end and start < (first := self._layers[place].held_from):
                    raise PositionError(f"layer {number} holds tokens from {first} on, which its window sees; read from there on")
            for number, place in zip(layers, places, strict=True):
                missing = self._layers[place].missing()
                if len(missing[(missing >= start) & (missing < end)]):
                    raise PositionError(f"tokens of layer {number} hold nothing yet; hand in their KV with overlay first")
            return end

    def fork(self) -> "SessionState":
        """Another session over the same tokens. Nothing is copied until one of the two writes."""
        with self.turns:
            self._stop()
            states = self.states.share(self.services.budget, self.views)
            snapshot, tails = self.snapshot.share(), [tail.share() for tail in self.tails]
            terms = replace(self.terms, salt=self.salt)
            with ExitStack() as undo:
                undo.callback(states.release)
                twin = SessionState(self.services, self.spec, snapshot, tails, self.tokens, terms, states)
                undo.pop_all()
            for own, other in zip(self._layers, twin._layers, strict=True):
                other.set_sinks(own.sinks)
            return twin

    def store(
        self, name: str, tokens: Tokens | None = None, *, chunk: bool = False, retention: Retention = DEFAULT_RETENTION
    ) -> ContextInfo:
        """Keep everything in the session as a context. tokens: the ids of all its tokens, if it has more than it was opened with.
        chunk: whether to store only the tokens behind `start`, as a chunk. retention: how long the context is kept.

        Raises AlreadyExists, InvalidArgument, PositionError (layers of different lengths, or gaps that hold nothing yet) or
        SessionClosed.
        """
        with self.turns:
            self._stop()
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
            plan = analyze_plan(state, state.shape, asked) if analyze else state.planner.plan(asked)
            state.page_reads = reads  # the analysis had everything in memory
            notes = self._recomputing.notes(state.number) + paging_notes(state.pages, reads) + state.audits.notes()
            return replace(plan, notes=notes + selected.notes(state, self.spec.all_layers[layer], analyze=analyze))

    def set_last_queries(self, queries_by_layer: Mapping[int, Float32]) -> None:
        """Treat the last of these queries, float32 `[q_heads, m, head_dim]` by their place in `ModelSpec.kept`, as the session's
        last query."""
        for number, queries in queries_by_layer.items():
            self._layers[number].query_samples.last = queries[:, -1:].astype(self.spec.numpy_dtype)

    def query_samples(self) -> dict[int, Float32]:
        """A sample of the queries of each layer that had queries, float32 `[q_heads, m, head_dim]`, by its place in
        `ModelSpec.kept`."""
        kept = ((number, layer.query_samples.all()) for number, layer in enumerate(self._layers))
        return {number: queries for number, queries in kept if queries is not None}

    def stats(self) -> SessionStats:
        """What the session holds and has done. Raises SessionClosed."""
        with self.turns:
            self._check_open()
            for layer in self._layers:
                layer.collect()
                layer.audits.settle()
            tokens, nbytes = min(layer.run.tokens for layer in self._layers), sum(tail.filled_nbytes for tail in self.tails)
            return self.counters.stats(tokens, self.start, self.reused, nbytes, [layer.audits for layer in self._layers])

    @property
    def where(self) -> str:
        """Where it is open, for people."""
        return "in this process"

    @property
    def tails(self) -> list[BlockTable]:
        """The tails, one for each entry of `ModelSpec.kept`; the session owns them."""
        return [layer.tail for layer in self._layers]

    @property
    def name(self) -> str:
        """The first letters of its id: enough to tell it from others, and too few to use it."""
        return self.id[:NAME_LETTERS]

    @property
    def views(self) -> Views:
        """The views of stored segments below the session."""
        return self.snapshot.views

    def own_tables(self) -> list[BlockTable]:
        """The tables of its tails and of its overlay, and of what it shares."""
        overlay, shared = self.snapshot.overlay, self.shared
        return [*self.tails, *(() if overlay is None else overlay.tables), *(() if shared is None else shared.tables)]

    @property
    def layout(self) -> tuple[Placed, ...]:
        """The layout of the positions before the tail."""
        return self.snapshot.layout.placed

    def layer(self, number: int, *, indexer: bool = False) -> Layer:
        """One layer, or its indexer, once it is in main memory. The caller holds `turns`. Raises LayerError, SessionClosed,
        IntegrityError or Unavailable."""
        self._check_open()
        return self._layers[validate.place(self.spec, number, indexer=indexer)].ready()

    def own_layer(self, number: int, *, indexer: bool = False) -> Layer:
        """`layer`, of one that keeps keys and values itself. Raises LayerError for any other, and what `layer` raises."""
        validate.own_place(self.spec, number, indexer=indexer)
        return self.layer(number, indexer=indexer)

    def runner(self, layer: int) -> StepRunner | None:
        """The runner of one layer, None for a number that no layer has, and while something else is due first. The caller holds
        `turns`."""
        if self.due or type(layer) is not int or not 0 <= layer < len(self._own):
            return None
        own = self._own[layer]
        if own is None:
            return None
        if own.runner.halted:
            own.resume()
        return own.runner

    def append(self, layer: Layer, k: Array, v: Array, gap: int = 0) -> None:
        """Append keys and values, which were checked before, to a layer; gap: see `Layer.append`. The caller holds `turns`.
        Raises NonFiniteError or CapacityError."""
        self._recomputing.forget()  # recomputing ends where appending begins
        layer.append(k, v, gap)

    def ids(self, tokens: Tokens | None) -> Tokens:
        """The ids of all its tokens; `tokens`, if given, are all of them. Raises PositionError or InvalidArgument."""
        return ids_of({self.start + tail.length for tail in self.tails}, self.tokens, tokens)

    def beginning(self, ids: Tokens, more_than: int) -> Views:
        """Views of what a shared session holds of a prompt's beginning; see `SharedTail.views`. None of one that has ended."""
        with self.turns:
            if self.shared is None or not self._open:
                return ()
            self._stop()
            return self.shared.views(ids, more_than)

    def cut(self, tokens: int) -> None:
        """Forget the tails, and the stored tokens from position `tokens` on; what is stored stays as it is. The caller holds
        `turns` and has stopped all layers. Raises CapacityError or Unavailable, and then nothing was done."""
        snapshot = self.snapshot.cut(tokens)
        self._pin(snapshot)
        for layer in self._layers:
            layer.truncate(layer.tail.length)
        self._rebase(snapshot)
        self.start = tokens
        self.reused = min(self.reused, tokens - len(snapshot.missing(0)))
        self.services.space.settle()

    def try_catch_up(self) -> None:
        """See `Holder.try_catch_up`."""
        if self.turns.acquire(blocking=False):
            try:
                if self.due and self._open:
                    self.services.space.catch_up(self)
            finally:
                self.turns.release()

    def go_over(self, relayout: Relayout) -> None:
        """Stand on the targets in place of the pieces from now on, which hold the same tokens; whatever was prepared is made
        anew. The caller holds `turns`. Where they cannot be brought to main memory, the session goes on with what it holds."""
        views = relayout.views_of_holder(self.views)
        if views == self.views:
            return
        for layer in self._layers:
            layer.stop()
        snapshot = Snapshot.prefix(views).share()
        with suppress(CapacityError, Unavailable, IntegrityError):
            self._pin(snapshot)
            self._rebase(snapshot)

    def close(self) -> None:
        """Give every block back. Closing twice does nothing."""
        with self.turns:
            if self._open:
                self._open = False
                closed = {layer.number: layer.close() for layer in self._layers}
                asked = {number: one for number, one in closed.items() if one is not None}
                self.services.prover.add(self.services, EndedSession(self.spec, self.views, self.terms, asked))
                self._recomputing.forget()
                self.states.release()
                if self.shared is not None:
                    self.shared.close()
                left = self.services.space.let_go(self)
                _let_go(self.snapshot)
                self._beside.release()
                self.services.handles.remove(self)
                self.services.activity.end(self.counters)
                self.services.events.tell(Kind.SESSION_CLOSED, queries=self.counters.queries)
                if left or self.snapshot.overlay is not None:
                    self.services.space.settle()

    def try_count(self) -> None:
        """Count what native code answered by itself, unless a call is under way."""
        if self.turns.acquire(blocking=False):
            try:
                if self._open:
                    with suppress(CapacityError):  # a GPU's, which keeps what it could not hand over
                        for layer in self._layers:
                            layer.collect()
            finally:
                self.turns.release()

    def stage_seconds(self) -> dict[str, float]:
        """The seconds of its calls so far by stage; see `kvdb.types.Activity`."""
        self.try_count()
        return self.counters.seconds()

    def _pin(self, snapshot: Snapshot) -> None:
        """Pin the segments of a snapshot. Raises CapacityError or Unavailable, and then has released it."""
        with ExitStack() as undo:
            undo.callback(snapshot.release)
            residency.pin(snapshot.views, self.services.loader)
            undo.pop_all()

    def _rebase(self, snapshot: Snapshot) -> None:
        """Let every layer read this snapshot, whose segments are pinned. The layers are stopped."""
        before, self.snapshot = self.snapshot, snapshot
        for layer in self._layers:
            layer.rebase(snapshot)
        self._recomputing = Recomputing(self.spec, snapshot)
        self.states.rebase(snapshot.views)
        _count_open(snapshot.views, 1)
        self._hold()
        _let_go(before)

    def _hold(self) -> None:
        """Have space laid out for what a session on a prefix stands on."""
        if self.snapshot.overlay is None:
            self.services.space.hold(self)

    def _held(self) -> int:
        """How many tokens every layer holds."""
        for layer in self._layers:
            layer.collect()
        return min(layer.run.tokens for layer in self._layers)

    def _stop(self) -> None:
        """Stop the runners, and wait for audits under way, which read what all layers hold. Raises SessionClosed, and
        what `Layer.raise_failure` raises."""
        self._check_open()
        for layer in self._layers:
            layer.stop()
            layer.tail.trim()
        for layer in self._layers:
            layer.raise_failure()

    def _check_open(self) -> None:
        """Begin a call with what is due. Raises SessionClosed."""
        if not self._open:
            raise SessionClosed("the session is closed; open another with create_session")
        if self.due:
            self.services.space.catch_up(self)


class SharedBeginning(Protocol):
    """What others find of a session before it is stored, `kvdb.session.sharing.SharedTail`."""

    @property
    def tables(self) -> list[BlockTable]: ...

    def views(self, ids: Tokens, more_than: int) -> Views: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


def _let_go(snapshot: Snapshot) -> None:
    """Give back what a session stood on."""
    _count_open(snapshot.views, -1)
    residency.unpin(snapshot.views)
    snapshot.release()


def _count_open(views: Views, sessions: int) -> None:
    """Tell the segments that so many more sessions are open over them."""
    for view in views:
        view.segment.usage.count_open(sessions)
