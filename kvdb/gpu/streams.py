"""Streams and events where there are none: on the CPU everything that was launched is done, so one code path serves both."""

from typing import Protocol, Self


class Event(Protocol):
    """A mark in a stream's work, as `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether all work before the mark is done."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until it is."""
        ...


class Stream(Protocol):
    """Work of a device in the order in which it was launched, as `torch.cuda.Stream` is one."""

    def record_event(self) -> Event:
        """A mark behind what was launched so far."""
        ...

    def wait_event(self, event: Event) -> None:
        """What is launched from now on begins after the mark. The host does not wait."""
        ...

    def query(self) -> bool: ...

    def synchronize(self) -> None:
        """Wait on the host until all that was launched is done."""
        ...


class Done:
    """A stream on which everything is done at once, and its own event."""

    def record_event(self) -> Self:
        return self

    def wait_event(self, event: Event) -> None:
        assert event.query()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is under way."""
