"""A lock whose waiters are served in their order."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class Turns:
    """A lock that is handed on in the order in which it was asked for. A `threading.Lock` may let one thread starve others."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._taken = False
        self._waiting: deque[Lock] = deque()

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Wait for one's turn; it ends with the `with`."""
        self._take()
        try:
            yield
        finally:
            self._hand_on()

    def _take(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            gate = Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()  # opened by the holder that hands the lock on
        except BaseException:  # an interrupt; the turn that may have come in the meantime goes to the next
            with self._guard:
                came = gate not in self._waiting
                if not came:
                    self._waiting.remove(gate)
            if came:
                self._hand_on()
            raise

    def _hand_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
