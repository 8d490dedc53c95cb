"""A session on a server."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

import kvdb.client.remote.messages as messages
import kvdb.deadlines as deadlines
import kvdb.forks as forks
import kvdb.validate as validate
from kvdb.blend.controller import Choice
from kvdb.blend.deviation import score_name
from kvdb.client.remote.connection import Connection
from kvdb.client.remote.open_sessions import OpenSessions
from kvdb.client.remote.reading import read
from kvdb.client.remote.session_stream import SessionStream
from kvdb.client.remote.shared_memory.calls import SharedCalls
from kvdb.errors import DeadlineExceeded, SessionClosed, Unauthenticated, Unavailable
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.calls import OF_SESSION
from kvdb.types import (
    DEFAULT_RETENTION,
    Array,
    ContextInfo,
    Float32,
    KeysValues,
    LayerShape,
    ModelSpec,
    Placed,
    Positions,
    Retention,
    SessionStats,
    Tokens,
)
from query_optimizer.plan import Plan
from query_optimizer.query_options import QueryOptions

STATS_SECONDS = 2.0
"""How long a call that failed waits to learn whether its session is still there."""
# size: one noun, a session on a server and its calls


class RemoteSession:
    """`kvdb.client.transport.SessionTransport` over gRPC. Thread-safe: calls on one session take turns.

    An update, an attention or an attend whose arrays are of the spec's form goes through memory that a server on the same host
    shares. Other calls that read or write KV go over one `Decode` stream. It is opened at the first such call, and again after an
    error or a long silence. More tokens than fit into one request are sent in several; when one fails, those before
    it have taken effect. After Unavailable nothing is known of the call's effect; `stats` says what the session holds.
    """

    def __init__(
        self, connection: Connection, spec: ModelSpec, reply: pb.SessionReply, tokens: Tokens, sessions: OpenSessions
    ) -> None:
        """tokens: the ids it was opened with. sessions: the open sessions of the database; this one adds itself. Raises
        Unavailable for a closed database, and then it is closed."""
        self.spec = spec
        self.tokens = tokens
        self.reused: int = reply.reused
        self.start: int = reply.start
        self.error_max: float = reply.error_max
        self.layout: tuple[Placed, ...] = tuple(map(codec.from_placed, reply.layout))
        self.connection = connection
        self.id = reply.session_id
        self._sessions = sessions
        self._stream = SessionStream(connection)
        self.shared = SharedCalls(connection.lanes, spec, connection.timed)
        self._lock = connection.lock()
        self._open = True
        forks.stays_behind(self, *forks.SESSION)
        try:
            sessions.add(self)
        except Unavailable:
            self.close()
            raise

    @property
    def where(self) -> str:
        """Where it is open, for people."""
        return f"on {self.connection.target}"

    def update(self, layer: int, k: Array, v: Array, start: int | None = None, *, indexer: bool = False) -> None:
        """Append the KV of n tokens to one layer; see `kvdb.session.state.SessionState.update`, whose errors it raises."""
        with self._lock:
            self.check_layer(layer)
            if not indexer and self.shared.update(self.id, layer, k, v, start) is not None:
                return
            for piece, first in self._pieces(layer, start, k, v, indexer=indexer):
                request = pb.DecodeRequest()
                messages.put_update(request.update, self.id, layer, piece[:1] if indexer else piece, first)
                request.update.indexer = indexer
                self._decode(request)

    def attention(self, layer: int, q: Array, options: QueryOptions) -> Array:
        """Attention of one layer's last n tokens; see `kvdb.session.state.SessionState.attention`, whose errors it raises.

        Raises MessageTooLarge for more queries than one request takes; attend to fewer tokens at a time.
        """
        with self._lock:
            self.check_layer(layer)
            if (out := self.shared.attention(self.id, layer, q, options)) is not None:
                return out
            self.connection.check_stream_size("q", q.nbytes)
            request = pb.DecodeRequest()
            messages.put_attention(request.attention, self.id, layer, q, options)
            return writable(self._decode(request))

    def attend(self, layer: int, q: Array, k: Array, v: Array, options: QueryOptions, start: int | None = None) -> Array:
        """`update` and `attention` in one call; see `kvdb.session.state.SessionState.attend`, whose errors it raises."""
        with self._lock:
            self.check_layer(layer)
            if (out := self.shared.attend(self.id, layer, q, k, v, options, start)) is not None:
                return out
            outs = []
            for piece, first in self._pieces(layer, start, q, k, v):
                request = pb.DecodeRequest()
                messages.put_attend(request.attend, self.id, layer, piece, options, first)
                outs.append(writable(self._decode(request)))
            return joined(outs)

    def step(self, layer: int, q: Any, k: Any, v: Any, options: QueryOptions, start: int | None) -> Any | None:
        """`attend` of one token through shared memory; arrays are numpy's or torch's, in main memory, and the answer is as q.
        None where it has to go another way; then nothing was done."""
        with self._lock:
            self.check_layer(layer)
            return self.shared.step(self.id, layer, q, k, v, options, start)

    def attend_selected(
        self, layer: int, q: Array, kv: KeysValues | None, asked: tuple[Float32, Float32], start: int | None = None
    ) -> Array:
        """Attend the tokens that the model selects; see `kvdb.session.selected.attend`, whose errors it raises, and
        MessageTooLarge."""
        with self._lock:
            self.check_layer(layer)
            nbytes = sum(array.nbytes for array in (q, *(kv or ()), *asked))
            self.connection.check_size("the call", nbytes)
            out: Array = self._ask("attend_selected", layer, q, kv, asked, messages.checked_start(start))
            return out

    def overlay(self, layer: int, positions: Positions, k: Array, v: Array) -> None:
        """Overlay tokens before the tail; see `kvdb.session.state.SessionState.overlay`, whose errors it raises."""
        with self._lock:
            self.check_layer(layer)
            validate.positions(positions, validate.keys_values(self._shape(layer), k, v), self.start, layer)
            for request in self._placed_requests("overlay", layer, positions, k=k, v=v):
                self._decode(request)

    def attention_at(self, layer: int, q: Array, positions: Positions) -> Array:
        """Attention of tokens before the tail; see `kvdb.session.state.SessionState.attention_at`, whose errors it raises."""
        with self._lock:
            self.check_layer(layer)
            validate.positions(positions, validate.queries(self._shape(layer), q), self.start, layer)
            requests = self._placed_requests("attention_at", layer, positions, q=q)
            return joined([writable(self._decode(request)) for request in requests])

    def deviation(self, layer: int, positions: Positions, k: Array, v: Array, score: str | None = None) -> Float32:
        """How far fresh KV is from stored KV; see `kvdb.session.state.SessionState.deviation`, whose errors it raises."""
        with self._lock:
            self.check_layer(layer)
            validate.positions(positions, validate.keys_values(self._shape(layer), k, v), self.start, layer)
            outs = []
            for request in self._placed_requests("deviation", layer, positions, k=k, v=v):
                request.deviation.score = "" if score is None else score_name(score)
                outs.append(writable(self._decode(request)))
            return joined(outs)

    def truncate(self, tokens: int) -> None:
        """Keep the first tokens of every layer; see `kvdb.session.state.SessionState.truncate`, whose errors it raises."""
        with self._lock:
            self._check_open()
            request = pb.TruncateRequest(session_id=self.id, tokens=tokens)
            reply: pb.TruncateReply = self.connection.call(request)
            self.truncated(reply, tokens)

    def truncated(self, reply: pb.TruncateReply, tokens: int) -> None:
        """Keep what the server says of the session that it truncated."""
        self.start, self.reused, self.tokens = reply.start, reply.reused, self.tokens[:tokens]
        self.layout = tuple(map(codec.from_placed, reply.layout))

    def state(self, layer: int, position: int | None = None) -> Mapping[str, Array]:
        """The state of a layer; see `kvdb.session.state.SessionState.state`, whose errors it raises."""
        arrays: Mapping[str, Array] = self._ask("state", layer, position)
        return arrays

    def put_state(self, layer: int, arrays: Mapping[str, Array], position: int | None = None) -> None:
        """Keep the state of a layer; see `kvdb.session.state.SessionState.put_state`, whose errors it raises."""
        given = validate.state(self.spec, layer, arrays)
        self.connection.check_size(f"the state of layer {layer}", sum(array.nbytes for array in given.values()))
        self._ask("put_state", layer, given, position)

    def put_sinks(self, layer: int, sinks: Float32) -> None:
        """The logits of a layer's sinks; see `kvdb.session.state.SessionState.put_sinks`, whose errors it raises."""
        self._ask("put_sinks", layer, validate.sinks(self._shape(layer), layer, sinks))

    def read(
        self,
        layers: Sequence[int],
        start: int,
        stop: int | None = None,
        out: Sequence[KeysValues] | None = None,
        *,
        indexer: bool = False,
    ) -> list[KeysValues]:
        """KV read back; see `kvdb.session.state.SessionState.read`, whose errors it raises."""
        with self._lock:
            end = self.stats().tokens if stop is None else stop
            for number in layers:
                self.check_layer(number)
            request = pb.ReadContextRequest(session_id=self.id, layers=layers, start=start, stop=end, indexer=indexer)
            return read(self.connection, self.spec, request, out)

    def fork(self) -> "RemoteSession":
        """Another session over the same tokens. Raises SessionClosed."""
        self._check_open()
        reply = self.connection.call(pb.ForkRequest(session_id=self.id))
        return RemoteSession(self.connection, self.spec, reply, self.tokens, self._sessions)

    def store(
        self, name: str, tokens: Tokens | None = None, *, chunk: bool = False, retention: Retention = DEFAULT_RETENTION
    ) -> ContextInfo:
        """Keep everything in the session as a context; see `kvdb.session.state.SessionState.store`, whose errors it raises."""
        self._check_open()
        request = messages.store(self.id, name, tokens, chunk, retention)
        self.connection.check_size("the list of tokens", len(request.tokens))
        return codec.from_info(self.connection.call(request))

    def explain(self, layer: int, options: QueryOptions, analyze: bool = False) -> Plan:
        """The plan of this layer's next query; see `kvdb.session.state.SessionState.explain`, whose errors it raises."""
        self.check_layer(layer)
        plan: Plan = self._ask("explain", layer, options, analyze)
        return plan

    def plan_recompute(self, seconds: float | None, floor: float, ratio: float | None) -> Choice:
        """How much to recompute; see `kvdb.session.state.SessionState.plan_recompute`, whose errors it raises."""
        choice: Choice = self._ask("plan_recompute", seconds, floor, ratio)
        return choice

    def stats(self) -> SessionStats:
        """What the session holds and has done. Raises SessionClosed."""
        stats: SessionStats = self._ask("stats")
        return stats

    def close(self) -> None:
        """Give everything back. Closing twice does nothing, and neither does closing a session whose server is gone, or lets this
        client in no more."""
        self.connection.tidy(self._close)

    def _close(self) -> None:
        if not self.forget():
            return
        with suppress(Unavailable, Unauthenticated):  # the server's sessions went with it, or this one expires there
            self.connection.call(pb.CloseSessionRequest(session_id=self.id))

    def forget(self) -> bool:
        """End the session here alone; whether it was open, so that the server is to be told."""
        with self._lock:
            was, self._open = self._open, False
            if was:
                self._stream.cancel()
            return was

    def _ask(self, method: str, *values: Any) -> Any:
        """What the session's method returns on the server. Raises what that raises, and SessionClosed."""
        self._check_open()
        call = OF_SESSION[method]
        request: Any = call.request(*values)
        request.session_id = self.id
        return call.value(self.connection.call(request))

    def _decode(self, request: pb.DecodeRequest) -> pb.DecodeReply:
        try:
            reply = self._stream.exchange(request.SerializeToString())
            self.connection.timed(reply.queue_us, reply.engine_us, reply.kernel_us)
            return reply
        except DeadlineExceeded:
            raise
        except Unavailable:
            with suppress(Unavailable), deadlines.within(STATS_SECONDS):
                self.stats()  # raises SessionClosed if the server closed the session, which nobody had used for too long
            raise

    def _shape(self, layer: int, *, indexer: bool = False) -> LayerShape:
        """The shape of what a layer reads. Raises LayerError."""
        return self.spec.shape(validate.place(self.spec, layer, indexer=indexer))

    def _pieces(
        self, layer: int, start: int | None, *arrays: Array, indexer: bool = False
    ) -> Iterator[tuple[tuple[Array, ...], int | None]]:
        """Pieces of the arrays, `[heads, n, head_dim]` each, that fit into a request, and the position where each starts."""
        first = messages.checked_start(start)
        nbytes = sum(array.nbytes for array in arrays)
        if nbytes <= self.connection.stream_payload_bytes_max:
            yield arrays, first
            return
        *queries, k, v = arrays
        shape = self._shape(layer, indexer=indexer)
        n = validate.keys_values(shape, k, v)
        for q in queries:
            validate.same_tokens(validate.queries(shape, q), n)
        for piece in self._cut(nbytes, n):
            yield tuple(array[:, piece] for array in arrays), None if first is None else first + piece.start

    def _placed_requests(self, name: str, layer: int, positions: Positions, **arrays: Array) -> Iterator[pb.DecodeRequest]:
        """Requests of this name for tokens at these positions, as many as their arrays take."""
        nbytes = positions.nbytes + sum(array.nbytes for array in arrays.values())
        fits = nbytes <= self.connection.stream_payload_bytes_max
        for piece in (slice(None),) if fits else self._cut(nbytes, len(positions)):
            request = pb.DecodeRequest()
            call = getattr(request, name)
            call.session_id, call.layer, call.positions = self.id, layer, codec.to_positions(positions[piece])
            for field, array in arrays.items():
                codec.put_array(getattr(call, field), array[:, piece])
            yield request

    def _cut(self, nbytes: int, n: int) -> Iterator[slice]:
        """Slices of n tokens that each fit into a request. nbytes: of all n. Raises MessageTooLarge if one token does not."""
        self.connection.check_stream_size("one token", nbytes // n)
        step = self.connection.stream_payload_bytes_max // (nbytes // n)
        for at in range(0, n, step):
            yield slice(at, at + step)

    def check_layer(self, layer: int) -> None:
        """Raises SessionClosed or LayerError."""
        self._check_open()
        validate.layer(self.spec, layer)

    def _check_open(self) -> None:
        if not self._open:
            raise SessionClosed("the session is closed; open another with create_session")


def writable(reply: pb.DecodeReply) -> Array:
    """The array of a reply."""
    return codec.from_array(reply.out).copy()


def joined(outs: list[Array]) -> Array:
    """The answers to pieces of one request, joined along their tokens."""
    return outs[0] if len(outs) == 1 else np.concatenate(outs, axis=1)
