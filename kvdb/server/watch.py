"""A thread that calls functions regularly."""

from collections.abc import Callable, Sequence
from threading import Event, Thread


class PeriodicCalls:
    """Calls each of `looks` every `seconds` seconds, from `start` to `stop`."""

    def __init__(self, seconds: float, looks: Sequence[Callable[[], None]]) -> None:
        self._seconds = seconds
        self._looks = looks
        self._stop = Event()
        self._thread = Thread(target=self._run, name="kvdb-server-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Wait for the last look to end. One that was never started is stopped too."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            for look in self._looks:
                look()
