"""One call on many sessions, which is done or not for each by itself."""

from collections.abc import Callable, Sequence

import kvdb.deadlines as deadlines
from kvdb.errors import InvalidArgument, KvdbError


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
