"""How large what is sent to a server may be."""

from kvdb.errors import MessageTooLarge
from kvdb.rpc import kvdb_pb2 as pb

ENVELOPE_BYTES_MAX = 64 << 10
"""Room in a message for everything beside arrays and tokens: names, shapes, a spec."""


class MessageLimits:
    """The limits of one server, as it tells them first.

    target: the server, for messages. message_bytes_max: the largest message that it takes. payload_bytes_max: the largest arrays
    and tokens that fit into one; stream_payload_bytes_max: into a request of a stream, which may be several messages.
    """

    target: str

    def take_limits(self, hello: pb.HelloReply) -> None:
        """Keep what the server says."""
        self.message_bytes_max: int = hello.message_bytes_max
        self.payload_bytes_max = self.message_bytes_max - ENVELOPE_BYTES_MAX
        self.stream_payload_bytes_max: int = hello.request_bytes_max - ENVELOPE_BYTES_MAX

    def check_size(self, what: str, nbytes: int) -> None:
        """Raises MessageTooLarge for more bytes than the server takes in one message."""
        self._check(what, nbytes, self.payload_bytes_max, "one message", "server.message_bytes_max")

    def check_stream_size(self, what: str, nbytes: int) -> None:
        """Raises MessageTooLarge for more bytes than the server takes in one request of a stream."""
        self._check(what, nbytes, self.stream_payload_bytes_max, "one request", "server.request_bytes_max")

    def _check(self, what: str, nbytes: int, nbytes_max: int, where: str, setting: str) -> None:
        if nbytes > nbytes_max:
            raise MessageTooLarge(
                f"{what} has {nbytes:,} bytes; expected at most {nbytes_max:,} in {where} to {self.target}, "
                f"so send fewer tokens at a time or raise {setting}"
            )
