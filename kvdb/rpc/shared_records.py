"""What passes through a ring in shared memory: fixed-size requests and answers, and where their arrays lie in the region.

A region is `[rings][arena]`. A request names by offset its message, which is the one that gRPC would carry but without arrays,
its arrays, and the room for the reply. An answer names the error's class, "" for none; the reply's bytes are the array of the
answer, a message, or the error's text. Integers are little-endian.
"""

from enum import IntEnum
from math import inf
from struct import Struct
from typing import NamedTuple

import kvdb._native as _native
from kvdb.errors import InvalidArgument

REGION_BYTES = 8 << 20
ARENA_AT = _native.RING_BYTES
ALIGNMENT = 64
ERROR_ROOM_BYTES = 16 << 10
"""The least room for a reply that a client gives, so that the text of an error fits."""
STATUS_ROOM_BYTES = 512
"""The same for each session of a call whose sessions fail or not by themselves; longer texts of errors are cut."""

HELLO = Struct("<8s16s")
"""What a server says first on the Unix socket: MAGIC, and which server it is."""
MAGIC = b"kvdbshm1"
TOKEN = Struct("<I")
"""What the client says then: the length of its token, before the token."""
TOKEN_BYTES_MAX = 4096
GOODBYE = b"."
"""What a client says before it closes the socket on purpose."""

ABSTRACT = "@"
"""What the path of a socket begins with that lies in no folder (unix(7), abstract socket address)."""

_REQUEST = Struct("<QQIIqQQQQQQQQQdQ8x")  # of 128 bytes, as in kvdb/native/transport/shared_records.h
_ANSWER = Struct("<QQ24sQfffI")  # of 64
_HAS_START = 1


class CallKind(IntEnum):
    """What a request asks for."""

    PING = 0
    UPDATE = 1
    ATTENTION = 2
    ATTEND = 3
    ATTEND_TOGETHER = 4
    ATTENTION_TOGETHER = 5
    IMPORT_BEGIN = 6
    IMPORT_WRITE = 7
    IMPORT_COMMIT = 8
    IMPORT_ABORT = 9
    IMPORT_SAMPLE = 10
    UPDATE_TOGETHER = 11


class SharedRequest(NamedTuple):
    """One request. generation: the region's. number: which request it is, repeated in its answer. kind: a `CallKind`. start: the
    position of the first token, None for none. tokens: how many, or of a
    sample the bytes of its message still to come. layer: of an import's piece; other calls
    name it in their message. q, k, v: where the arrays lie. message, message_nbytes: where the
    message lies. reply, reply_room: where the reply goes, and how many bytes fit. seconds: how long the client
    waits for the answer. request: what the client calls it in logs, 0 for nothing."""

    generation: int
    number: int
    kind: int
    start: int | None = None
    tokens: int = 0
    q: int = 0
    k: int = 0
    v: int = 0
    message: int = 0
    message_nbytes: int = 0
    reply: int = 0
    reply_room: int = 0
    layer: int = 0
    seconds: float = inf
    request: int = 0


class SharedAnswer(NamedTuple):
    """One answer. error: the class of an error, "" for none. reply_nbytes: how many bytes were written where the request says.
    queue_us, engine_us, kernel_us: microseconds that it waited, was carried out, and was in the attention kernel, 0 where nobody
    measured. busy: how many processors the server's answers take, so that a client knows whether it may spin while it waits; 0
    where it does not say."""

    generation: int
    number: int
    error: str = ""
    reply_nbytes: int = 0
    queue_us: float = 0.0
    engine_us: float = 0.0
    kernel_us: float = 0.0
    busy: int = 0

    @property
    def times_us(self) -> tuple[float, float, float]:
        return self.queue_us, self.engine_us, self.kernel_us


def pack_request(request: SharedRequest) -> bytes:
    generation, number, kind, start, *rest = request
    return _REQUEST.pack(generation, number, kind, start is not None and _HAS_START, start or 0, *rest)


def unpack_request(data: bytes) -> SharedRequest:
    generation, number, kind, flags, start, *rest = _REQUEST.unpack(data)
    return SharedRequest(generation, number, kind, start if flags & _HAS_START else None, *rest)


def pack_answer(answer: SharedAnswer) -> bytes:
    generation, number, error, *rest = answer
    return _ANSWER.pack(generation, number, error.encode(), *rest)


def unpack_answer(data: bytes) -> SharedAnswer:
    generation, number, error, *rest = _ANSWER.unpack(data)
    return SharedAnswer(generation, number, error.rstrip(b"\0").decode("ascii", "replace"), *rest)


def address_of(path: str) -> str:
    """The address of a Unix socket, as the system takes it."""
    return "\0" + path[1:] if path.startswith(ABSTRACT) else path


def aligned(offset: int) -> int:
    """The first place from `offset` on where an array may lie."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def check_span(offset: int, nbytes: int) -> None:
    """Raises InvalidArgument for bytes that do not lie in the arena of a region."""
    if offset % ALIGNMENT or not ARENA_AT <= offset <= REGION_BYTES or nbytes > REGION_BYTES - offset:
        raise InvalidArgument(
            f"a request names {nbytes:,} bytes at {offset:,}; expected them between {ARENA_AT:,} and {REGION_BYTES:,}, from a "
            f"multiple of {ALIGNMENT} on"
        )
