"""What the decode steps of a generation read, from what its sessions count."""

from collections.abc import Mapping, Sequence

import kvdb
from engine_adapter.base import Reading
from kvdb.types import SessionStats

Counted = Mapping[int, SessionStats]


def count(sessions: Sequence[kvdb.Session]) -> Counted:
    """What each session has done so far, by its id."""
    return {id(session): session.stats() for session in sessions}


def reading_since(before: Counted, sessions: Sequence[kvdb.Session], spec: kvdb.ModelSpec) -> Reading | None:
    """What these sessions read since `before`, one token a step; None when they are others, as after a beam search."""
    if any(id(session) not in before for session in sessions):
        return None
    total = Reading(0, 0, 0, 0, 0)
    for session in sessions:
        then, now = before[id(session)], session.stats()
        steps = now.tokens - then.tokens
        tokens = spec.layers * steps * (then.tokens + 1 + now.tokens) // 2  # step i reads all tokens up to its own
        total += Reading(
            tokens=tokens,
            scanned=now.tokens_scanned - then.tokens_scanned,
            attended=now.tokens_retrieved - then.tokens_retrieved,
            nbytes=now.bytes_read - then.bytes_read,
            nbytes_exact=tokens * spec.token_nbytes,
        )
    return total
