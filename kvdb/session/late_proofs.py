"""Proofs that are made when nobody waits: what ended sessions asked is asked again, while no other session steps."""

import atexit
import logging
from collections.abc import Callable
from contextlib import ExitStack
from threading import Condition, Thread
from time import sleep
from weakref import WeakSet

import kvdb.catalog.contexts.residency as residency
from kvdb.attention.device import DeviceFailed
from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.snapshot import Snapshot
from kvdb.errors import KvdbError, Unavailable
from kvdb.hardware.priority import work_in_background
from kvdb.indexing.background_time import BackgroundTime
from kvdb.session.asked import EndedSession
from kvdb.session.counters import SessionCounters
from kvdb.session.layer import Layer
from kvdb.session.services import SessionServices
from kvdb.storage.budget import CpuBudget

log = logging.getLogger(__name__)
WAITING_MAX = 4
"""The number of ended sessions whose queries are kept until there is time for them."""
ROUNDS_MAX = 4
"""So often queries are compared anew because another index is there: as many kinds are wished for, one after the other."""
LOOK_SECONDS = 0.02
"""How often it is looked whether sessions step."""

Waiting = tuple[SessionServices, EndedSession]


class LateProofs:
    """Compares the ways of layers for queries of sessions that have ended, in a thread that ends when nothing waits for it.
    Thread-safe.

    budget: what lacks main memory gets that of the queries. time: tells whether sessions step. built: whether no index is being
    built, which comes first.
    """

    def __init__(self, budget: CpuBudget, time: BackgroundTime, built: Callable[[], bool]) -> None:
        self._time = time
        self._built = built
        self._changed = Condition()
        self._waiting: list[Waiting] = []
        self._held: list[Segment] = []
        self._thread: Thread | None = None
        self._stopping = False
        budget.register(self._trim, first=True)
        _open.add(self)

    def add(self, services: SessionServices, ended: EndedSession) -> None:
        """Compare what this session asked, as soon as there is time. Where too many wait for that, the oldest is forgotten."""
        with self._changed:
            if not ended.asked or self._stopping:
                ended.close()
                return
            try:
                services.handles.add(ended)
            except Unavailable:
                ended.close()
                return
            self._waiting.append((services, ended))
            if self._thread is None:
                self._thread = Thread(target=self._work, name="kvdb-proofs", daemon=True)  # `_end` waits for it
                self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits for its turn. Returns whether that came within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def held_segments(self) -> list[Segment]:
        """The segments that a comparison holds now."""
        return list(self._held)

    def close(self) -> None:
        """Stop behind the comparison under way."""
        with self._changed:
            self._stopping = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        work_in_background()
        while (first := self._first()) is not None:
            services, ended = first
            try:
                for _ in range(ROUNDS_MAX):
                    self._prove(services, ended)
            except (KvdbError, DeviceFailed) as error:
                log.info("queries of a session that ended are not compared: %s", error)
            finally:
                self._remove(first)

    def _prove(self, services: SessionServices, ended: EndedSession) -> None:
        """Compare the ways of every layer that has any left. Raises what `_prove_layer` raises."""
        for number in list(ended.asked):
            if not self._await_turn(ended):
                return
            self._prove_layer(services, ended, number)

    def _first(self) -> Waiting | None:
        """What is to be done next; None ends the thread."""
        with self._changed:
            if not self._waiting:
                self._thread = None
                return None
            return self._waiting[0]

    def _remove(self, done: Waiting) -> None:
        services, ended = done
        ended.close()
        services.handles.remove(ended)
        with self._changed:
            self._waiting.remove(done)
            self._changed.notify_all()

    def _prove_layer(self, services: SessionServices, ended: EndedSession, number: int) -> None:
        """Compare the ways of one layer, unless what it read was freed or left main memory. Its queries stay where an index is
        built now by which more could be compared. Raises Unavailable, CapacityError or IntegrityError."""
        with ExitStack() as undo:
            undo.enter_context(ended.turns)
            asked = ended.asked.get(number)
            if asked is None:
                return
            undo.callback(self._held.clear)
            for view in ended.stood_on:
                if not (view.segment.whole and view.segment.try_retain()):
                    raise Unavailable("what it stood on is gone")
                undo.callback(view.segment.release)
                self._held.append(view.segment)
            residency.pin(ended.stood_on, services.loader)
            undo.callback(residency.unpin, ended.stood_on)
            snapshot = Snapshot.prefix(ended.stood_on)
            layer = Layer(services, ended.spec, snapshot, number, asked.tail, ended.terms, SessionCounters())
            undo.callback(layer.let_go)
            if not layer.prove(asked, lambda: not self._stopping and not self._time.stepping()):
                undo.callback(asked.release)
                undo.callback(ended.asked.pop, number)

    def _await_turn(self, ended: EndedSession) -> bool:
        """Wait until no session steps and no index is built. Returns False where it is no longer to be done."""
        while not self._stopping and any(kept is ended for _, kept in self._waiting[-WAITING_MAX:]):
            if self._built() and not self._time.stepping():
                return True
            sleep(LOOK_SECONDS)
        return False

    def _trim(self, _: int) -> None:
        """Forget what waits."""
        for ended in [ended for _, ended in self._waiting]:
            if ended.turns.acquire(blocking=False):
                ended.close()
                ended.turns.release()


_open: WeakSet[LateProofs] = WeakSet()


def _end() -> None:
    """Nobody has closed these databases, and the process ends."""
    for proofs in list(_open):
        proofs.close()


atexit.register(_end)
