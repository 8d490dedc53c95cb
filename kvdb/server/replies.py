"""The reply of a unary call that gave its thread back, sent together with its status.

gRPC's public API has such a call stream its one reply: the reply goes out, the thread waits until it is written, and the status
follows. A second write and the wait for the first cost a short call about a tenth of its round trip (`benchmarks/README.md`). A
plain unary call hands both to gRPC at once, by a function that is not public; it is used here. Where the installed gRPC lacks it,
or where it fails, calls are answered through the public API from then on.
"""

from collections.abc import Callable

import grpc

try:
    import grpc._server as private
except ImportError:
    private = None  # type: ignore[assignment]

FAILURES = (AttributeError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors that a private part raises when it has changed."""


class Replies:
    """Sends replies. together: whether a reply goes with its status."""

    def __init__(self) -> None:
        self.together = hasattr(private, "_status")

    def send(self, context: grpc.ServicerContext, send: Callable[[bytes | None], None], reply: bytes) -> None:
        """End a call well. send: what gRPC gave the call to send its reply with, and None at the end."""
        if self.together:
            try:
                private._status(context._rpc_event, context._state, reply)  # type: ignore[attr-defined]
                return
            except FAILURES:
                self.together = False
        send(reply)
        send(None)
