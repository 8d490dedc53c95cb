"""What an open session holds: views of what is stored, and a mutable tail for each layer; and how it is given back."""

import secrets
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import RLock
from time import time
from typing import Protocol

import kvdb.catalog.residency as residency
import kvdb.forks as forks
import kvdb.validate as validate
from kvdb.catalog.overhead import session_nbytes
from kvdb.catalog.relayout import Relayout
from kvdb.catalog.segment_view import Views
from kvdb.catalog.snapshot import Snapshot
from kvdb.errors import CapacityError, IntegrityError, SessionClosed, Unavailable
from kvdb.events import Kind
from kvdb.session.asked import EndedSession
from kvdb.session.known_ids import ids_of
from kvdb.session.layer import Layer
from kvdb.session.native_steps import NativeSteps
from kvdb.session.recompute import Recomputing
from kvdb.session.services import SessionServices
from kvdb.session.terms import NO_TERMS, SessionTerms
from kvdb.storage.block_table import BlockTable
from kvdb.types import Array, ModelSpec, Placed, Tokens

ID_BYTES = 16
NAME_LETTERS = 8


class SharedBeginning(Protocol):
    """What others find of a session before it is stored, `kvdb.session.sharing.SharedTail`."""

    @property
    def tables(self) -> list[BlockTable]: ...

    def views(self, ids: Tokens, more_than: int) -> Views: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class OpenSession:
    """What an open session holds. It takes over the `snapshot` and the `tails`, one for each layer; `close` releases them.

    tokens: its known token ids, int32; at least those before the tail. start: the position of the tail's first token. reused: the
    number of tokens before it that were stored when it was opened. label: under which others are told of it, "" for nobody.
    id: whoever knows it may use the session, so it cannot be guessed. tenant: whose it is, "" for whoever runs the database.
    opened: seconds since 1970.
    terms: with which it was opened, its error_max known. shared: what others find of it while it is open, None for nothing.
    Thread-safe: calls on one session take turns.
    The constructor raises Unavailable for a closed database, and CapacityError, and then everything was given back."""

    def __init__(
        self,
        services: SessionServices,
        spec: ModelSpec,
        snapshot: Snapshot,
        tails: list[BlockTable],
        tokens: Tokens,
        terms: SessionTerms = NO_TERMS,
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

    @property
    def where(self) -> str:
        """Where it is open, for people."""
        return "in this process"

    @property
    def tails(self) -> list[BlockTable]:
        """The tails, one for each layer; the session owns them."""
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

    def layer(self, number: int) -> Layer:
        """One layer, once it is in main memory. The caller holds `turns`. Raises LayerError, SessionClosed, IntegrityError or
        Unavailable."""
        self._check_open()
        validate.layer(self.spec, number)
        return self._layers[number].ready()

    def native_steps(self, layer: int) -> NativeSteps | None:
        """The native steps of one layer, None for a number that no layer has, and while something else is due first. The caller
        holds `turns`."""
        if self.due or type(layer) is not int or not 0 <= layer < len(self._layers):
            return None
        own = self._layers[layer]
        if own.native_steps.halted:
            own.go_further()
        return own.native_steps

    def append(self, layer: Layer, k: Array, v: Array) -> None:
        """Append keys and values, which were checked before, to a layer. The caller holds `turns`. Raises NonFiniteError or
        CapacityError."""
        self._recomputing.forget()  # recomputing ends where appending begins
        layer.append(k, v)

    def ids(self, tokens: Tokens | None) -> Tokens:
        """The ids of all its tokens; `tokens`, if given, are all of them. Raises PositionError or InvalidArgument."""
        return ids_of({self.start + tail.length for tail in self.tails}, self.tokens, tokens)

    def beginning(self, ids: Tokens, more_than: int) -> Views:
        """Views of what a shared session holds of a prompt's beginning; see `SharedTail.views`. None of one that has ended."""
        with self.turns:
            if self.shared is None or not self._open:
                return ()
            self._settle()
            return self.shared.views(ids, more_than)

    def cut(self, tokens: int) -> None:
        """Forget the tails, and the stored tokens from position `tokens` on; what is stored stays as it is. The caller holds
        `turns` and has settled all layers. Raises CapacityError or Unavailable, and then nothing was done."""
        snapshot = self.snapshot.cut(tokens)
        self._pin(snapshot)
        for layer in self._layers:
            layer.take_back(layer.tail.length)
        self._stand_on(snapshot)
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
            layer.settle()
        snapshot = Snapshot.prefix(views).share()
        with suppress(CapacityError, Unavailable, IntegrityError):
            self._pin(snapshot)
            self._stand_on(snapshot)

    def _pin(self, snapshot: Snapshot) -> None:
        """Pin the segments of a snapshot. Raises CapacityError or Unavailable, and then has released it."""
        with ExitStack() as undo:
            undo.callback(snapshot.release)
            residency.pin(snapshot.views, self.services.loader)
            undo.pop_all()

    def _stand_on(self, snapshot: Snapshot) -> None:
        """Let every layer read this snapshot, whose segments are pinned. The layers are settled."""
        before, self.snapshot = self.snapshot, snapshot
        for layer in self._layers:
            layer.stand_on(snapshot)
        self._recomputing = Recomputing(self.spec, snapshot)
        _count_open(snapshot.views, 1)
        self._hold()
        _let_go(before)

    def _hold(self) -> None:
        """Have space laid out for what a session on a prefix stands on."""
        if self.snapshot.overlay is None:
            self.services.space.hold(self)

    def close(self) -> None:
        """Give every block back. Closing twice does nothing."""
        with self.turns:
            if self._open:
                self._open = False
                closed = {layer.number: layer.close() for layer in self._layers}
                asked = {number: one for number, one in closed.items() if one is not None}
                self.services.prover.add(self.services, EndedSession(self.spec, self.views, self.terms, asked))
                self._recomputing.forget()
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
                            layer.count_native_steps()
            finally:
                self.turns.release()

    def stage_seconds(self) -> dict[str, float]:
        """The seconds of its calls so far by stage; see `kvdb.types.Activity`."""
        self.try_count()
        return self.counters.seconds()

    def _settle(self) -> None:
        """Take over from native steps, and wait for audits under way, which read what all layers hold. Raises SessionClosed, and
        what `Layer.raise_failure` raises."""
        self._check_open()
        for layer in self._layers:
            layer.settle()
            layer.tail.trim()
        for layer in self._layers:
            layer.raise_failure()

    def _check_open(self) -> None:
        """Begin a call with what is due. Raises SessionClosed."""
        if not self._open:
            raise SessionClosed("the session is closed; open another with create_session")
        if self.due:
            self.services.space.catch_up(self)


def _let_go(snapshot: Snapshot) -> None:
    """Give back what a session stood on."""
    _count_open(snapshot.views, -1)
    residency.unpin(snapshot.views)
    snapshot.release()


def _count_open(views: Views, sessions: int) -> None:
    """Tell the segments that so many more sessions are open over them."""
    for view in views:
        view.segment.usage.count_open(sessions)
