"""Streams and events, and their stand-in on the CPU, where everything that was launched is done at once."""

from time import perf_counter
from typing import Any, Protocol, Self


class DeviceEvent(Protocol):
    """A mark in a stream, as `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether everything before the mark is done."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until everything before the mark is done."""
        ...


class DeviceStream(Protocol):
    """A device runs what is launched on a stream in that order, as `torch.cuda.Stream` does."""

    def record_event(self, event: Any = None) -> DeviceEvent:
        """A mark behind everything that was launched so far. event: a mark that is moved there, None for a new one."""
        ...

    def wait_event(self, event: DeviceEvent) -> None:
        """Let everything that is launched from now on begin after the mark. The host does not wait."""
        ...

    def query(self) -> bool: ...

    def synchronize(self) -> None:
        """Wait on the host until everything that was launched is done."""
        ...


class ImmediateStream:
    """A stream on which everything is done at once. It is its own event."""

    def record_event(self, event: Any = None) -> Self:  # noqa: ARG002  # the protocol's
        return self

    def wait_event(self, event: DeviceEvent) -> None:
        assert event.query()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is under way."""


class Stopwatch(Protocol):
    """Measures what is launched between its two marks, without the host waiting."""

    def start(self, stream: DeviceStream) -> None: ...

    def stop(self, stream: DeviceStream) -> None: ...

    def seconds(self) -> float:
        """What was measured last, once the device is done with it; 0 before the first time."""
        ...


class ImmediateStopwatch:
    """Measures what is done at once."""

    def __init__(self) -> None:
        self._began = self._took = 0.0

    def start(self, stream: DeviceStream) -> None:  # noqa: ARG002  # the protocol's
        self._began = perf_counter()

    def stop(self, stream: DeviceStream) -> None:  # noqa: ARG002  # the protocol's
        self._took = perf_counter() - self._began

    def seconds(self) -> float:
        return self._took
