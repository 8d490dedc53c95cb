"""How much the decode steps of a generation read, from the counters of its sessions."""

from collections import Counter
from collections.abc import Mapping, Sequence

import kvdb
from engine_adapter.base import DecodeStats
from engine_adapter.transformers.cache import Row
from kvdb.types import SessionStats

Counted = Mapping[int, SessionStats]


def counters_of(sessions: Sequence[kvdb.Session]) -> Counted:
    """The counters of each session, by its id."""
    return {id(session): session.stats() for session in sessions}


def decode_stats(before: Counted, rows: Sequence[Row], spec: kvdb.ModelSpec, layers: int) -> DecodeStats | None:
    """How much the rows' sessions read since `before`, with one token for each step; None if the sessions changed, as after a
    beam search. layers: how many layers ask them; None is also the answer for none."""
    if not layers or any(id(row.session) not in before for row in rows):
        return None
    total = DecodeStats(0, 0, 0, 0, 0)
    for row in rows:
        then, now = before[id(row.session)], row.session.stats()
        steps = now.tokens - then.tokens
        tokens = layers * steps * (then.tokens + 1 + now.tokens) // 2  # step i reads all tokens up to its own
        if row.unstored is not None:
            tokens += layers * then.tokens  # the first step stored nothing
        total += DecodeStats(
            tokens=tokens,
            scanned=now.tokens_scanned - then.tokens_scanned,
            attended=now.tokens_retrieved - then.tokens_retrieved,
            nbytes=now.bytes_read - then.bytes_read,
            nbytes_exact=tokens * spec.token_nbytes,
            error_audits=now.error_audits - then.error_audits,
            error_median=now.error_median,
            error_p95=now.error_p95,
            error_max_seen=now.error_max_seen,
            ways=Counter(now.ways) - Counter(then.ways),
        )
    return total
