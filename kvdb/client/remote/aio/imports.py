"""An import on a server, for asyncio: one streaming call. Unless it ends with a commit, nothing is stored."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

import kvdb.validate as validate
from kvdb.client.remote.aio.connection import AsyncConnection
from kvdb.client.remote.imports import METHOD
from kvdb.errors import Unavailable
from kvdb.rpc import kv_chunk
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.kv_chunk import CHUNK_BYTES, Chunk
from kvdb.types import Array, ModelSpec


class AsyncImport:
    """An import under way; see `kvdb.client.remote.imports.RemoteImport`."""

    def __init__(self, connection: AsyncConnection, spec: ModelSpec, call: Any) -> None:
        self._connection = connection
        self._spec = spec
        self._call = call

    async def write(self, layer: int, k: Array, v: Array) -> None:
        """Send the next tokens of one layer, `[kv_heads, n, head_dim]`, cut along tokens. Raises what the server raised."""
        validate.layer(self._spec, layer)
        validate.keys_values(self._spec, k, v)
        self._connection.check_size("one token of a layer", self._spec.token_nbytes)
        tokens = max(1, min(CHUNK_BYTES, self._connection.payload_bytes_max) // self._spec.token_nbytes)
        for at in range(0, k.shape[1], tokens):
            chunk = Chunk(layer, k[:, at : at + tokens], v[:, at : at + tokens])
            await self._connection.in_time("progress", self._call.write(kv_chunk.serialize(chunk)))

    async def exchange(self, request: pb.ImportRequest, group: str) -> pb.ImportReply:
        """Send a request and wait for its reply. Raises what the server raised. group: of its time."""
        await self._connection.in_time("progress", self._call.write(kv_chunk.serialize(request)))
        reply = await self._connection.in_time(group, self._call.read())
        if reply is grpc.aio.EOF:
            raise Unavailable(f"the server at {self._connection.target} ended the import; connect again")
        assert isinstance(reply, pb.ImportReply)
        return reply


@asynccontextmanager
async def importing(connection: AsyncConnection, spec: ModelSpec) -> AsyncIterator[AsyncImport]:
    """An import, which ends with the body."""
    method: Any = connection.channel.stream_stream(METHOD, response_deserializer=pb.ImportReply.FromString)
    with connection.errors_raised():
        call = method(metadata=connection.metadata)
    try:
        yield AsyncImport(connection, spec, call)
    finally:
        call.cancel()
