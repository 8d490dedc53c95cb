"""The incoming requests of one stream: they are counted until they are answered, and put together if they come in pieces."""

from kvdb.errors import InvalidArgument, MessageTooLarge
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.server.inflight import InflightBytes


class Incoming:
    """The bytes in flight of one stream. Not thread-safe.

    client: whose stream it is. nbytes_max: the most that a request may have. Where there is no room for a request, the stream
    waits, and its client with it. A request in pieces has all its room from the first of them, so that no two wait for each other
    in the middle.
    """

    def __init__(self, inflight: InflightBytes, client: str, nbytes_max: int) -> None:
        self._inflight = inflight
        self._client = client
        self._nbytes_max = nbytes_max
        self._nbytes = 0  # of the request whose pieces come, 0 for none
        self._pieces = bytearray()
        self._counted = 0

    def count(self, nbytes: int) -> None:
        """Wait until there is room for a request of one message. Raises InvalidArgument between the pieces of another."""
        if self._nbytes:
            raise InvalidArgument("a request came between the pieces of another; expected its next piece")
        self._counted = self._inflight.wait(self._client, nbytes)

    def put_together(self, part: pb.RequestPart) -> bytes | None:
        """The whole request with its last piece, None before. Raises MessageTooLarge or InvalidArgument."""
        if not self._nbytes:
            if not 0 < part.nbytes <= self._nbytes_max:
                raise MessageTooLarge(
                    f"a request has {part.nbytes:,} bytes; expected 1 to {self._nbytes_max:,}, so send fewer tokens at a time or "
                    "raise server.request_bytes_max"
                )
            self._counted = self._inflight.wait(self._client, part.nbytes)
            self._nbytes = part.nbytes
        if part.nbytes != self._nbytes or not 0 < len(part.data) <= self._nbytes - len(self._pieces):
            raise InvalidArgument(
                f"a piece of {len(part.data):,} bytes, of a request of {part.nbytes:,}, follows {len(self._pieces):,} bytes of "
                f"one of {self._nbytes:,}; expected pieces that make up the whole, one behind the other"
            )
        self._pieces += part.data
        if len(self._pieces) < self._nbytes:
            return None
        whole = bytes(self._pieces)
        self._pieces, self._nbytes = bytearray(), 0
        return whole

    def answered(self) -> None:
        """Release the bytes of a request; a request whose pieces are still coming keeps them."""
        if not self._nbytes:
            self.close()

    def close(self) -> None:
        """Give everything back: the stream has ended."""
        self._inflight.give_back(self._client, self._counted)
        self._counted = 0
