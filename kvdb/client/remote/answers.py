"""Answers of a server as arrays that their caller may write to."""

import numpy as np

from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.types import Array


def writable(reply: pb.DecodeReply) -> Array:
    """The array of a reply."""
    return codec.from_array(reply.out).copy()


def joined(outs: list[Array]) -> Array:
    """The answers to pieces of one request, joined along their tokens."""
    return outs[0] if len(outs) == 1 else np.concatenate(outs, axis=1)
