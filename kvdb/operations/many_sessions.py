"""Calls on many sessions at once, each of which is done or not by itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import kvdb.deadlines as deadlines
import kvdb.validate as validate
from kvdb.errors import InvalidArgument, KvdbError
from kvdb.session.open_handles import OpenHandles, counted_call
from kvdb.session.state import SessionState
from kvdb.types import Array, ModelSpec, Tokens


class ManySessions(ABC):
    """The calls of a database on many of its sessions. The database sets what they work on. Thread-safe."""

    handles: OpenHandles

    @counted_call
    def create_sessions(
        self,
        spec: ModelSpec,
        prompts: Sequence[Tokens],
        error_max: float | None = None,
        salt: str = "",
        *,
        expected_tokens: int | None = None,
    ) -> list[SessionState]:
        """A session for each prompt, see `kvdb.database.Database.create_session`; all or none. Raises what that raises."""
        with ExitStack() as undo:
            sessions = []
            for i, tokens in enumerate(deadlines.each(prompts)):
                with validate.numbered(i):
                    sessions.append(self.create_session(spec, tokens, error_max, salt, expected_tokens=expected_tokens))
                undo.callback(sessions[-1].close)
            undo.pop_all()
        return sessions

    @counted_call
    def update_together(
        self, sessions: Sequence[object], layer: int, k: Array, v: Array, starts: Sequence[int] | None = None
    ) -> list[KvdbError | None]:
        """`SessionState.update` of each session; k, v: `[sessions, kv_heads, n, head_dim]`. Returns None for each that was done,
        and the error of the others. Raises InvalidArgument or ShapeError, and then nothing was done."""
        own = self._own(sessions)
        validate.starts(starts, len(own))
        for what, array in (("k", k), ("v", v)):
            validate.stacked(what, array, len(own))
        first = [None] * len(own) if starts is None else starts
        return [attempted(lambda i=i: own[i].update(layer, k[i], v[i], first[i])) for i in range(len(own))]  # type: ignore[misc]

    @counted_call
    def truncate_together(self, sessions: Sequence[object], tokens: Sequence[int]) -> list[KvdbError | None]:
        """`SessionState.truncate` of each session to its number of tokens. Returns None for each that was done, and the error of
        the others. Raises InvalidArgument, and then nothing was done."""
        own = self._own(sessions)
        check_counts(tokens, len(own))
        return [attempted(lambda i=i: own[i].truncate(tokens[i])) for i in range(len(own))]  # type: ignore[misc]

    @counted_call
    def close_together(self, sessions: Sequence[object]) -> None:
        """Close each session. Raises InvalidArgument for a session of another database; then none is closed."""
        for session in self._own(sessions):
            session.close()

    @abstractmethod
    def create_session(
        self,
        spec: ModelSpec,
        tokens: Tokens,
        error_max: float | None = None,
        salt: str = "",
        *,
        expected_tokens: int | None = None,
    ) -> SessionState:
        """One session."""

    @abstractmethod
    def _own(self, sessions: Sequence[object]) -> list[SessionState]:
        """Raises InvalidArgument for a session of another database, or one that is given twice."""


def attempted(act: Callable[[], None]) -> KvdbError | None:
    """Do something; the error that it raises, None for none."""
    try:
        deadlines.check()
        act()
    except KvdbError as error:
        return error
    return None


def check_counts(tokens: Sequence[int], sessions: int) -> None:
    """Raises InvalidArgument unless there is a number for each session."""
    if len(tokens) != sessions:
        raise InvalidArgument(f"{len(tokens)} numbers of tokens are given for {sessions} sessions; expected one for each")
