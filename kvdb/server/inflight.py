"""The bytes of all messages that the server holds: received, and not answered yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from kvdb.errors import CapacityError

SMALL_BYTES = 64 << 10


class InflightBytes:
    """A limit for messages in flight, beside the budgets of what is stored. Thread-safe.

    bytes_max: at least as many as the largest message has. Messages of streams under SMALL_BYTES are not counted: a stream holds
    one at a time, and a step of decoding is to cost little.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = 0
        self._changed = Condition()

    def take(self, nbytes: int) -> None:
        """Count a message until `give_back`. Raises CapacityError where there is no room for it."""
        with self._changed:
            if self._held + nbytes > self._bytes_max:
                raise CapacityError(
                    f"the server holds messages of {self._held:,} bytes that wait to be answered, and this one has {nbytes:,}; "
                    f"expected at most {self._bytes_max:,} together, so wait for answers, or raise server.inflight_bytes_max"
                )
            self._held += nbytes

    def give_back(self, nbytes: int) -> None:
        """A message that was counted is no more."""
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()

    @contextmanager
    def counted(self, nbytes: int) -> Iterator[None]:
        """Count a message of a stream while the body runs. Where there is no room, the stream waits, and its client with it."""
        if nbytes < SMALL_BYTES:
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: self._held + nbytes <= self._bytes_max)
            self._held += nbytes
        try:
            yield
        finally:
            self.give_back(nbytes)
