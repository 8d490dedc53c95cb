"""What happens in a database that somebody may want to know: told to sinks, such as a log or counters."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from secrets import token_hex
from time import time
from typing import NamedTuple

Fact = str | int | float


class Kind(StrEnum):
    """The kinds of events, by their names in logs and metrics."""

    STARTED = "server_started"
    DRAINING = "server_draining"
    STOPPED = "server_stopped"
    SESSION_OPENED = "session_opened"
    SESSION_CLOSED = "session_closed"
    SESSION_EXPIRED = "session_expired"
    STORED = "context_stored"
    DROPPED = "context_dropped"
    EVICTED = "context_evicted"
    EXPIRED = "context_expired"
    OFFLOADED = "segment_offloaded"
    INDEX_BUILT = "index_built"
    INDEX_FAILED = "index_failed"
    CHECKSUM_FAILED = "checksum_failed"
    QUOTA = "quota_exceeded"
    REFUSED = "call_refused"
    FAILED = "call_failed"


class Origin(NamedTuple):
    """The caller on whose behalf something happens. tenant, request: "" where nobody says."""

    tenant: str = ""
    request: str = ""


def new_request() -> str:
    """A name for a request whose client gives it none."""
    return token_hex(8)


NOBODY = Origin()
_origin: ContextVar[Origin] = ContextVar("kvdb_origin", default=NOBODY)  # a tuple never changes


def origin() -> Origin:
    """The caller whose call this thread carries out."""
    return _origin.get()


@contextmanager
def originating(by: Origin) -> Iterator[None]:
    """Say whose call this thread carries out while the body runs."""
    before = _origin.get()
    _origin.set(by)
    try:
        yield
    finally:
        _origin.set(before)  # a stream may end in another thread than it began in, where a token could not be given back


@dataclass(frozen=True)
class Event:
    """One thing that happened. facts: what there is to say of it, by name. time: seconds since 1970."""

    kind: Kind
    facts: Mapping[str, Fact]
    origin: Origin = NOBODY
    time: float = field(default_factory=time)


Sink = Callable[[Event], None]
"""Takes events in the thread in which they happen, perhaps with locks held: it is quick, raises nothing and calls nobody."""


class Events:
    """Hands events to sinks; without one, nothing is made of them. Thread-safe."""

    def __init__(self) -> None:
        self._sinks: tuple[Sink, ...] = ()

    def add(self, sink: Sink) -> None:
        """Tell a sink of everything from now on."""
        self._sinks = (*self._sinks, sink)

    def tell(self, kind: Kind, **facts: Fact) -> None:
        """Something happened, in the call that this thread carries out."""
        if self._sinks:
            event = Event(kind, facts, origin())
            for sink in self._sinks:
                sink(event)
