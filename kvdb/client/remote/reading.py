"""KV read back from a server: one streaming call, whose chunks go straight into the caller's arrays."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import grpc

import kvdb.validate as validate
from kvdb.client.remote.connection import Connection
from kvdb.errors import Unavailable
from kvdb.rpc import kv_chunk
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.calls import OF_REQUEST
from kvdb.rpc.kv_chunk import Chunk
from kvdb.rpc.status import too_late
from kvdb.types import KeysValues, ModelSpec

METHOD = OF_REQUEST[pb.ReadContextRequest].path


def read(
    connection: Connection, spec: ModelSpec, request: pb.ReadContextRequest, out: Sequence[KeysValues] | None
) -> list[KeysValues]:
    """The KV of the request's tokens, layer by layer. out: what to write into, None for new arrays, which are made when the first
    chunk comes, because the server has checked the range by then. Raises what the server raises, and Unavailable where it sends
    anything else than was asked for."""
    n, layers = max(0, request.stop - request.start), list(request.layers)
    pairs = None if out is None else list(out)
    shapes = [spec.shape(validate.place(spec, layer, indexer=request.indexer)) for layer in layers]
    for shape, (k, v) in zip(shapes, pairs or (), strict=pairs is not None):
        validate.buffers(shape, k, v, n)
    received = 0
    with connection.errors_raised(), ExitStack() as ended:
        replies = connection.replies(METHOD, request)
        ended.callback(replies.cancel)
        for chunk in map(kv_chunk.deserialize, _in_time(connection, replies)):
            pairs = [shape.empty(n) for shape in shapes] if pairs is None else pairs
            number, at = divmod(received, max(n, 1))
            if not isinstance(chunk, Chunk) or [chunk.layer] != layers[number : number + 1] or chunk.k.shape[1] > n - at:
                break
            k, v = (array[:, at : at + chunk.k.shape[1]] for array in pairs[number])
            k[:], v[:] = chunk.k, chunk.v
            received += k.shape[1]
    if received != n * len(layers):
        raise Unavailable(f"the server at {connection.target} sent {received} tokens; expected {n} of {len(layers)} layers")
    return [shape.empty(n) for shape in shapes] if pairs is None else pairs


class _Reading:
    """A stream of replies that may be ended for taking too long."""

    def __init__(self, replies: Any) -> None:
        self.replies = replies
        self.expired = False

    def expire(self) -> None:
        self.expired = True
        self.replies.cancel()


def _in_time(connection: Connection, replies: Any) -> Iterator[bytes]:
    """The replies. Raises DeadlineExceeded where one takes too long."""
    reading = _Reading(replies)
    try:
        while True:
            with connection.alarm.within(reading, connection.limits.group("progress")):
                reply = next(replies, None)
            if reply is None:
                return
            yield reply
    except grpc.RpcError:
        if reading.expired:
            raise too_late(connection.target) from None
        raise
