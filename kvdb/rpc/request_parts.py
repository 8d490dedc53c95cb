"""Cuts requests of streams that are larger than a message into pieces."""

from collections.abc import Iterator

from kvdb.rpc import kvdb_pb2 as pb

PART_HEAD_BYTES_MAX = 64
"""The most bytes of a message beside its piece of data."""


def cut(data: bytes, message_bytes_max: int) -> Iterator[pb.RequestPart]:
    """The pieces of a serialized request, each of which fits into a message of that size."""
    step = message_bytes_max - PART_HEAD_BYTES_MAX
    for at in range(0, len(data), step):
        yield pb.RequestPart(nbytes=len(data), data=data[at : at + step])
