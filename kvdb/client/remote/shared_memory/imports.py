"""An import through shared memory: pieces are copied into the region, and the server copies them into blocks meanwhile."""

from collections.abc import Mapping
from contextlib import suppress

import numpy as np

import kvdb.deadlines as deadlines
import kvdb.forks as forks
import kvdb.validate as validate
from kvdb.client.remote.shared_memory.lane import SharedLane
from kvdb.client.remote.shared_memory.lanes import SharedLanes
from kvdb.errors import KvdbError, SessionClosed
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.shared_records import ARENA_AT, ERROR_ROOM_BYTES, REGION_BYTES, CallKind, SharedRequest, aligned
from kvdb.types import Array, ContextInfo, ModelSpec

PIECE_BYTES = 1 << 20
"""The size of a piece, k and v together; small enough that the server still finds them in a cache that both share."""
SAMPLE_PIECE_BYTES = 4 << 20
_PLACES_AT = aligned(ARENA_AT)
_PLACE_BYTES = PIECE_BYTES + ERROR_ROOM_BYTES
PLACES = (REGION_BYTES - _PLACES_AT) // _PLACE_BYTES


class SharedImport:
    """`kvdb.client.transport.ImportTransport` through shared memory; used from one thread at a time.

    Pieces are sent without waiting for an answer, so that a later `write`, or `commit`, may raise the error of an earlier one.
    """

    def __init__(self, lanes: SharedLanes, lane: SharedLane, spec: ModelSpec, begin: bytes) -> None:
        self.spec = spec
        self._lanes = lanes
        self._lane: SharedLane | None = lane
        self._pieces = 0
        forks.stays_behind(self, *forks.IMPORT)
        try:
            lane.region.write(_PLACES_AT, begin)
            reply = aligned(_PLACES_AT + len(begin))
            self.start: int = pb.ImportBegun.FromString(self._ask(lane, CallKind.IMPORT_BEGIN, len(begin), reply)).start
        except BaseException:
            self._end()
            raise

    @classmethod
    def open(cls, lanes: SharedLanes, spec: ModelSpec, begin: pb.ImportBegin) -> "SharedImport | None":
        """None where the import has to go over gRPC, as that of a model whose layers differ has. Raises what the server
        raises."""
        data = begin.SerializeToString()
        fits = spec.uniform and spec.token_nbytes <= PIECE_BYTES and len(data) + ERROR_ROOM_BYTES + _PLACES_AT < REGION_BYTES
        lane = lanes.take() if fits else None
        return None if lane is None else cls(lanes, lane, spec, data)

    def write(self, layer: int, k: Array, v: Array, *, indexer: bool = False, start: int | None = None) -> None:  # noqa: ARG002  # of windows
        """Send the next tokens of one layer, `[kv_heads, n, head_dim]`, cut along tokens. Raises what the server raised."""
        lane = self._open()
        shape = self.spec.shape(validate.own_place(self.spec, layer, indexer=indexer))
        validate.keys_values(shape, k, v)
        tokens = PIECE_BYTES // self.spec.token_nbytes
        for at in range(0, k.shape[1], tokens):
            while lane.waiting >= PLACES:
                lane.receive(self._lanes.limits.group("progress"))
            self._send(lane, int(layer), k[:, at : at + tokens], v[:, at : at + tokens])

    def sample(self, layer: int, q: Array) -> None:
        """Send queries of one layer, `[q_heads, m, head_dim]`, in as many pieces as they take. Raises what the server raised."""
        lane = self._open()
        validate.queries(self.spec.shape(validate.place(self.spec, layer)), q)
        data = pb.ImportSample(layer=int(layer), q=codec.to_array(q)).SerializeToString()
        self._settle(lane)
        for at in range(0, len(data), SAMPLE_PIECE_BYTES):
            piece = data[at : at + SAMPLE_PIECE_BYTES]
            lane.region.write(_PLACES_AT, piece)
            left = len(data) - at - len(piece)
            self._ask(lane, CallKind.IMPORT_SAMPLE, len(piece), aligned(_PLACES_AT + len(piece)), left)

    def put_state(self, layer: int, arrays: Mapping[str, Array], position: int | None = None) -> None:  # noqa: ARG002  # of others
        """Raises LayerError: no layer of such a model keeps a state."""
        validate.state_layer(self.spec, layer)

    def commit(self) -> ContextInfo:
        """Publish the context. Raises what the server raised; then nothing was stored."""
        lane = self._open()
        self._settle(lane)
        info = codec.from_info(pb.ContextInfo.FromString(self._ask(lane, CallKind.IMPORT_COMMIT, 0, _PLACES_AT)))
        self._end()
        return info

    def abort(self) -> None:
        """Let the server give everything back. After the end of the import, this does nothing."""
        if self._lane is not None:
            self._end()

    def _send(self, lane: SharedLane, layer: int, k: Array, v: Array) -> None:
        place = _PLACES_AT + self._pieces % PLACES * _PLACE_BYTES
        self._pieces += 1
        second = place + PIECE_BYTES // 2
        np.copyto(lane.region.view(place, k.shape, k.dtype), k)
        np.copyto(lane.region.view(second, v.shape, v.dtype), v)
        reply = place + PIECE_BYTES
        request = SharedRequest(lane.generation, lane.number(), CallKind.IMPORT_WRITE, None, k.shape[1], 0, place, second)
        lane.send(request._replace(reply=reply, reply_room=ERROR_ROOM_BYTES, layer=layer))

    def _ask(self, lane: SharedLane, kind: CallKind, message_nbytes: int, reply: int, count: int = 0) -> bytes:
        """Send a request whose message lies at the first place, and wait for its reply. count: the bytes of it still to come."""
        request = SharedRequest(lane.generation, lane.number(), kind, None, count, message=_PLACES_AT)
        room = REGION_BYTES - reply
        seconds = self._lanes.limits.group("store" if kind == CallKind.IMPORT_COMMIT else "attend")
        answer = lane.exchange(request._replace(message_nbytes=message_nbytes, reply=reply, reply_room=room), seconds)
        return lane.region.read(reply, answer.reply_nbytes)

    def _settle(self, lane: SharedLane) -> None:
        """Wait for every answer. Raises the first error of the server, and then the others wait still."""
        while lane.waiting:
            lane.receive(self._lanes.limits.group("progress"))

    def _end(self) -> None:
        """Let the server abort what is under way, and give the lane back."""
        lane, self._lane = self._lane, None
        assert lane is not None
        with deadlines.unbounded():  # or the server would not hear of the end of an import that took too long
            while lane.waiting and not lane.broken:
                with suppress(KvdbError):  # of a piece that nobody wants any more
                    lane.receive(self._lanes.limits.group("progress"))
            with suppress(KvdbError):
                self._ask(lane, CallKind.IMPORT_ABORT, 0, _PLACES_AT)
        self._lanes.give_back(lane)

    def _open(self) -> SharedLane:
        if self._lane is None:
            raise SessionClosed("the import has ended; begin another")
        return self._lane
