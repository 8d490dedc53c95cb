"""A stored context as a user holds it."""

from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import kvdb.deadlines as deadlines
import kvdb.validate as validate
from kvdb.client.arrays import token_ids
from kvdb.client.reading import read_layers, read_range
from kvdb.client.session import Session
from kvdb.database import Database
from kvdb.errors import SpecMismatch
from kvdb.types import ContextInfo, ModelSpec, PromptPart, Tokens
from query_optimizer.query_options import checked_error_max


class Context:
    """A stored context. In a `with`, the sessions opened through it are closed at the end; the context stays stored."""

    def __init__(self, transport: Database, info: ContextInfo) -> None:
        self._transport = transport
        self.info = info
        self._sessions: list[Session] = []

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def spec(self) -> ModelSpec:
        return self.info.spec

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return self.info.tokens

    def token_ids(self, *, timeout: float | None = None) -> Tokens:
        """The ids of its tokens, int32 `[tokens]`. Raises NotFound when it was dropped."""
        with deadlines.within(timeout):
            return self._transport.token_ids(self.name)

    def read(self, layers: Any, start: int = 0, stop: int | None = None, *, out: Any = None, timeout: float | None = None) -> Any:
        """The KV of its tokens [start, stop), for an engine that keeps a cache of its own; see `Session.read`. What lies on disk
        is brought back, as for a session.

        stop: None for all tokens. Raises what `Session.read` raises, NotFound when it was dropped, and CapacityError.
        """
        span = read_range(start, stop)
        with deadlines.within(timeout):
            return read_layers(layers, out, lambda numbers, buffers: self._transport.read(self.name, numbers, *span, buffers))

    def create_session(
        self,
        tokens: Any,
        *,
        spec: ModelSpec | None = None,
        error_max: float | None = None,
        expected_tokens: int | None = None,
        timeout: float | None = None,
    ) -> Session:
        """A session for a prompt, with this context's spec and salt; see `Client.create_session`.

        spec: the caller's model. error_max: of queries that name nothing. expected_tokens: how many it will ask for.
        Raises what that raises, and SpecMismatch when the
        context is another model's, or one with other weights.
        """
        if spec is not None and validate.spec(spec) != self.spec:
            raise SpecMismatch(
                f"context {self.name!r} holds the KV of {self.spec}, and was opened for {spec}; expected one and the same, "
                "so import the document with this model too"
            )
        with deadlines.within(timeout):
            rest = checked_error_max(error_max), self.info.salt
            expected = validate.expected_tokens(expected_tokens)
            state = self._transport.create_session(self.spec, token_ids(tokens), *rest, expected_tokens=expected)
        session = Session(state, timeout)
        self._sessions.append(session)
        return session

    def drop(self, *, timeout: float | None = None) -> None:
        """Forget the context. Raises NotFound when that was done already."""
        with deadlines.within(timeout):
            self._transport.drop(self.name)

    def close(self) -> None:
        """Close the sessions opened through this handle."""
        with suppress(IndexError):  # there are none, or another thread has closed the last
            while True:
                self._sessions.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Context {self.name!r}: {self.tokens:,} tokens in {self.info.segments} segments>"


def part_of(given: Any) -> PromptPart:
    """A part as the transports take it: a context by its name, or token ids. Raises ShapeError, DtypeError or InvalidArgument."""
    part = given if isinstance(given, PromptPart) else PromptPart(given)
    validate.part(part)
    source = part.source
    if isinstance(source, Context):
        return replace(part, source=source.name)
    if isinstance(source, str):
        return replace(part, source=validate.name(source))
    return replace(part, source=validate.token_ids(token_ids(source)))
