"""The bytes of all messages that the server holds: received, and not answered yet."""

from threading import Condition, Lock

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
        self._waiting = 0  # streams
        self._lock = Lock()
        self._changed = Condition(self._lock)

    def take(self, nbytes: int) -> int:
        """Count a message until `give_back`. Returns nbytes. Raises CapacityError where there is no room for it."""
        with self._lock:
            if self._held + nbytes > self._bytes_max:
                raise CapacityError(
                    f"the server holds messages of {self._held:,} bytes that wait to be answered, and this one has {nbytes:,}; "
                    f"expected at most {self._bytes_max:,} together, so wait for answers, or raise server.inflight_bytes_max"
                )
            self._held += nbytes
        return nbytes

    def wait(self, nbytes: int) -> int:
        """Count a message of a stream until `give_back`. Where there is no room, the stream waits, and its client with it.

        Returns how many bytes were counted: 0 for a small message.
        """
        if nbytes < SMALL_BYTES:
            return 0
        with self._lock:
            self._waiting += 1
            self._changed.wait_for(lambda: self._held + nbytes <= self._bytes_max)
            self._waiting -= 1
            self._held += nbytes
        return nbytes

    def give_back(self, nbytes: int) -> None:
        """A message of which so many bytes were counted is no more."""
        if nbytes:
            with self._lock:
                self._held -= nbytes
                if self._waiting:
                    self._changed.notify_all()
