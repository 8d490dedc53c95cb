"""The bytes of all requests that the server holds: received, and not answered yet."""

from threading import Condition, Lock

from kvdb.errors import CapacityError

SMALL_BYTES = 64 << 10


def client_share(bytes_max: int) -> int:
    """The number of `nbytes` bytes that one client may have: all but a quarter, so that it cannot keep the others out."""
    return bytes_max - bytes_max // 4


class InflightBytes:
    """A limit for requests in flight, beside the budgets of what is stored. Thread-safe.

    bytes_max: of all clients; `client_share` of it is at least as large as the largest request. Requests of streams under
    SMALL_BYTES are not counted: a stream holds one at a time, and a step of decoding is to cost little.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._client_max = client_share(bytes_max)
        self._held = 0
        self._of_client: dict[str, int] = {}
        self._waiting = 0  # streams
        self._changed = Condition(Lock())

    def take(self, client: str, nbytes: int) -> int:
        """Count a client's request until `give_back`. Returns nbytes. Raises CapacityError where there is no room for it."""
        with self._changed:
            if not self._fits(client, nbytes):
                raise CapacityError(
                    f"the server holds requests of {self._held:,} bytes that wait to be answered, "
                    f"{self._of_client.get(client, 0):,} of them this client's, and this one has {nbytes:,}; expected at most "
                    f"{self._bytes_max:,} together and {self._client_max:,} of one client, so wait for answers, or raise "
                    "server.inflight_bytes_max"
                )
            self._count(client, nbytes)
        return nbytes

    def wait(self, client: str, nbytes: int) -> int:
        """Count a request of a stream until `give_back`. Where there is no room, the stream waits, and its client with it.

        Returns the number of counted bytes: 0 for a small request.
        """
        if nbytes < SMALL_BYTES:
            return 0
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._fits(client, nbytes))
            self._waiting -= 1
            self._count(client, nbytes)
        return nbytes

    def give_back(self, client: str, nbytes: int) -> None:
        """Release the counted bytes of a client's request."""
        if nbytes:
            with self._changed:
                self._count(client, -nbytes)
                if self._waiting:
                    self._changed.notify_all()

    def _fits(self, client: str, nbytes: int) -> bool:
        return self._held + nbytes <= self._bytes_max and self._of_client.get(client, 0) + nbytes <= self._client_max

    def _count(self, client: str, nbytes: int) -> None:
        self._held += nbytes
        counted = self._of_client.get(client, 0) + nbytes
        if counted:
            self._of_client[client] = counted
        else:
            self._of_client.pop(client, None)
