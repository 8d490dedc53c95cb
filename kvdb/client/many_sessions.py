"""What a user does with many sessions in one call."""

from collections.abc import Iterable, Sequence
from typing import Any

import kvdb.deadlines as deadlines
import kvdb.validate as validate
from kvdb.client.arrays import to_numpy, token_ids
from kvdb.client.session import Session, transports_of
from kvdb.client.transport import Transport
from kvdb.errors import KvdbError
from kvdb.types import ModelSpec
from query_optimizer.query_options import checked_error_max


class ManySessions:
    """Calls on many sessions of a database. Thread-safe."""

    _transport: Transport

    def create_sessions(
        self,
        spec: ModelSpec,
        prompts: Iterable[Any],
        *,
        error_max: float | None = None,
        salt: str = "",
        expected_tokens: int | None = None,
        timeout: float | None = None,
    ) -> list[Session]:
        """A session for each of many prompts; see `create_session`, whose errors it raises. All are created or none.
        expected_tokens: that each will ask for."""
        given = [token_ids(tokens) for tokens in validate.iterable("prompts", prompts, "token ids of each session")]
        rest = checked_error_max(error_max), validate.salt(salt)
        with deadlines.within(timeout):
            expected = validate.expected_tokens(expected_tokens)
            states = self._transport.create_sessions(validate.spec(spec), given, *rest, expected_tokens=expected)
        return [Session(state, timeout) for state in states]

    def update_sessions(
        self,
        sessions: Iterable[Session],
        layer: int,
        k: Any,
        v: Any,
        *,
        starts: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[KvdbError | None]:
        """Do what `Session.update` does for many sessions of one model, each by itself.

        k (after RoPE), v: `[sessions, kv_heads, n, head_dim]`. starts: one `start` of `Session.update` for each. Returns None for
        each session that was updated, and the error for each other. Raises InvalidArgument or ShapeError for what is no such
        call, and then nothing is done.
        """
        with deadlines.within(timeout):
            return self._transport.update_together(transports_of(sessions), layer, to_numpy(k), to_numpy(v), starts)

    def truncate_sessions(
        self, sessions: Iterable[Session], tokens: Iterable[int], *, timeout: float | None = None
    ) -> list[KvdbError | None]:
        """Do what `Session.truncate` does for many sessions, each by itself, to its own number of tokens.

        Returns None for each session that was truncated, and the error for each other. Raises InvalidArgument or PositionError
        for what is no such call, and then nothing is done.
        """
        kept = [validate.position("tokens", count) for count in validate.iterable("tokens", tokens, "a number for each session")]
        with deadlines.within(timeout):
            return self._transport.truncate_together(transports_of(sessions), kept)

    def close_sessions(self, sessions: Iterable[Session], *, timeout: float | None = None) -> None:
        """Close many sessions; those that are closed already stay so. Raises InvalidArgument for a session of another database,
        and then none is closed."""
        given = list(validate.iterable("sessions", sessions, "what create_session returns"))
        with deadlines.within(timeout):
            if given:
                self._transport.close_together(transports_of(given))
            for session in given:
                session.close()
