"""Errors as OpenAI's clients know them."""

from typing import Any, NamedTuple

from pydantic import ValidationError

from engine_adapter.rag_server.requests import ASKS_FOR_NOTHING
from kvdb.errors import (
    AlreadyExists,
    CapacityError,
    InvalidArgument,
    KvdbError,
    MessageTooLarge,
    NotFound,
    PositionError,
    SessionClosed,
    SpecMismatch,
    Unavailable,
    Unsupported,
)

POSITIONS = "max_position_embeddings"
"""What the message of a prompt names that is too long for the model."""


class Failure(NamedTuple):
    """status: of HTTP. kind, code, param: as in OpenAI's errors."""

    status: int
    message: str
    kind: str
    code: str | None = None
    param: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class Refused(KvdbError):
    """A request is answered with a failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Busy(Refused):
    """Too much waits for the model."""

    def __init__(self, waiting: int) -> None:
        super().__init__(
            Failure(429, f"{waiting} requests are under way or waiting; ask again later", "rate_limit_error", "busy")
        )


class Stopping(Refused):
    """The server ends."""

    def __init__(self) -> None:
        super().__init__(Failure(503, "the server is stopping; ask again later, or another", "server_error", "stopping"))


STATUSES: tuple[tuple[type[KvdbError], int, str, str], ...] = (
    (NotFound, 404, "invalid_request_error", "not_found"),
    (MessageTooLarge, 413, "invalid_request_error", "too_large"),
    (CapacityError, 503, "server_error", "full"),
    (AlreadyExists, 409, "invalid_request_error", "conflict"),
    (SpecMismatch, 409, "invalid_request_error", "other_model"),
    (InvalidArgument, 400, "invalid_request_error", "invalid_value"),
    (PositionError, 400, "invalid_request_error", "invalid_value"),
    (Unsupported, 400, "invalid_request_error", "unsupported"),
    (Unavailable, 503, "server_error", "unavailable"),
    (SessionClosed, 503, "server_error", "unavailable"),
)
"""From the most special on; what is not listed is 500."""


def failure_of(error: KvdbError) -> Failure:
    """How an error is answered."""
    if isinstance(error, Refused):
        return error.failure
    if isinstance(error, InvalidArgument) and POSITIONS in str(error):
        return Failure(400, str(error), "invalid_request_error", "context_length_exceeded", "messages")
    for kind, status, name, code in STATUSES:
        if isinstance(error, kind):
            return Failure(status, str(error), name, code)
    return Failure(500, str(error), "server_error", "internal")


def invalid(error: ValidationError) -> Refused:
    """A body that is not what is expected, by the first thing that is wrong with it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(map(str, first["loc"])) or None
    if first["type"] == "extra_forbidden":
        return _not_served(param, "leave it out")
    for name, value in ASKS_FOR_NOTHING.items():
        if param is not None and (param == name or param.startswith(f"{name}.")):
            return _not_served(name, f"leave it out, or send {value}")
    said = f"{param}: {first['msg']}" if param else str(first["msg"])
    return Refused(Failure(400, said, "invalid_request_error", "invalid_value", param))


def _not_served(param: str | None, instead: str) -> Refused:
    said = f"{param} is not served by kvdb; {instead}"
    return Refused(Failure(400, said, "invalid_request_error", "unsupported", param))
