"""Requests of streams that are larger than a message: the pieces in which they are sent."""

from collections.abc import Iterator

from kvdb.rpc import kvdb_pb2 as pb

PART_HEAD_BYTES_MAX = 64
"""What a message has beside a piece's data."""


def cut(data: bytes, message_bytes_max: int) -> Iterator[pb.RequestPart]:
    """The pieces of a serialized request, each of which fits into a message of that size."""
    step = message_bytes_max - PART_HEAD_BYTES_MAX
    for at in range(0, len(data), step):
        yield pb.RequestPart(nbytes=len(data), data=data[at : at + step])
