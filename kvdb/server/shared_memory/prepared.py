"""The attend of one token that a client asks for again and again: what it uses is found once."""

from time import perf_counter
from typing import NamedTuple

import kvdb._native as _native
from kvdb.server.admission.fair_queue import Work
from kvdb.server.shared_memory.engine import Head, SharedEngine
from kvdb.types import Array


class Places(NamedTuple):
    """The arrays of a request, in place in the region. reply: of the form of q."""

    q: Array
    k: Array
    v: Array
    reply: Array


class PreparedAttend:
    """One session's attend of one layer, from and to the same places. work: what it asks of the engine."""

    __slots__ = ("_admission", "_head", "_name", "_places", "_sessions", "_stepped", "_turns", "_work")

    def __init__(self, engine: SharedEngine, head: Head, places: Places, work: Work) -> None:
        self._turns, self._admission, self._sessions, self._stepped = (
            engine.turns,
            engine.admission,
            engine.sessions,
            engine.stepped,
        )
        self._head = head
        self._name = head.sessions[0]
        self._places = places
        self._work = work

    def answer(self, calls: _native.SharedCalls) -> bool:
        """Carry out the last request of these calls. False where it would have to wait for others; then nothing was done.

        The client hears first, and what follows an answer is done while it goes on. Raises what the engine raises.
        """
        came = perf_counter()
        if not self._turns.take(self._head.turn):
            return False
        try:
            if not self._admission.take(self._work):
                return False
            try:
                self._attend(calls, came)
            finally:
                self._admission.end(self._work)
        finally:
            self._turns.end(self._head.turn)
        self._stepped("attend", perf_counter() - came)
        return True

    def _attend(self, calls: _native.SharedCalls, came: float) -> None:
        q, k, v, reply = self._places
        layer = self._head.layer
        with self._sessions.borrow(self._name) as session:
            began = perf_counter()
            reply[...] = session.attend(layer, q, k, v, self._head.options, calls.start)
            took = perf_counter() - began
            kernel, threads = session.last_kernel(layer)
            busy = threads + self._admission.under_way - 1
            calls.answer(reply.nbytes, (began - came) * 1e6, took * 1e6, kernel * 1e6, busy)
            session.look_ahead(layer)
