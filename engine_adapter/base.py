"""The kit of every adapter: what an engine has from kvdb for one sequence, and the report of a generation over it.

`docs/engines.md` says how an adapter is written with it, and which tests it has to pass.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import kvdb
from kvdb.errors import InvalidArgument

Progress = Callable[[int, int], None]
"""Called as (done, total) tokens while a prompt is prefilled; the first call counts what was stored already."""

Inspect = Callable[[Sequence[kvdb.Session]], None]
"""Called with the sessions of a generation, one for each row, after its last token and before they are closed."""


@dataclass(frozen=True)
class DecodeStats:
    """How much the attention of decode steps read, summed over layers and steps, beside what exact attention would have read, and
    how far answers within an error_max were from it.

    tokens: read by exact attention. scanned: looked at in any form, such as an index's codes. attended: tokens that went into
    the output. nbytes: bytes read, indexes included. nbytes_exact: bytes of the keys and values of all tokens.

    error_audits: how many answers were compared with exact ones. error_median, error_p95, error_max_seen: how far they were from
    these, as in `kvdb.SessionStats`; of several sessions the largest. ways: how many queries of a layer were answered each way.
    """

    tokens: int
    scanned: int
    attended: int
    nbytes: int
    nbytes_exact: int
    error_audits: int = 0
    error_median: float = 0.0
    error_p95: float = 0.0
    error_max_seen: float = 0.0
    ways: Mapping[str, int] = field(default_factory=dict)

    @property
    def attended_share(self) -> float:
        return self.attended / max(self.tokens, 1)

    @property
    def nbytes_share(self) -> float:
        return self.nbytes / max(self.nbytes_exact, 1)

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        return DecodeStats(
            tokens=self.tokens + other.tokens,
            scanned=self.scanned + other.scanned,
            attended=self.attended + other.attended,
            nbytes=self.nbytes + other.nbytes,
            nbytes_exact=self.nbytes_exact + other.nbytes_exact,
            error_audits=self.error_audits + other.error_audits,
            error_median=max(self.error_median, other.error_median),
            error_p95=max(self.error_p95, other.error_p95),
            error_max_seen=max(self.error_max_seen, other.error_max_seen),
            ways=dict(Counter(self.ways) + Counter(other.ways)),
        )


@dataclass(frozen=True)
class Blend:
    """How a prompt was blended from parts.

    reused: tokens whose stored keys and values stayed. recomputed: tokens of chunks that were computed anew, a mean over the
    layers behind the first, whose stored KV is always right. fresh: tokens whose KV was not stored. choice: the ratio that the
    caller or the controller chose, and why. seconds: the time of laying out and recomputing. deviation: how far the stored KV of
    the chunks' tokens was from fresh KV in the check layer, a mean; 0 where nothing moved, None if it was not measured.
    """

    reused: float
    recomputed: float
    fresh: int
    choice: kvdb.Choice
    seconds: float
    deviation: float | None = None

    @property
    def ratio(self) -> float:
        return self.choice.ratio


@dataclass(frozen=True)
class Report:
    """A summary of the last `generate` or `store`.

    reused: prompt tokens found in the database, one number for each row of the given batch. prefilled: prompt tokens that were
    computed. generated: new tokens of each returned sequence, padding included. prefill_seconds: the time until every prompt was
    in the database. first_token_seconds: the time from the call to the first new token, None for a call without new tokens.
    seconds: the time of the whole call. explain: the plan of the first row's next query in the last layer that reads more than a
    window, None for a model that attends itself. decode: how much the steps behind the prompts read, None where there were none,
    or where it is unknown, as with beam search and drafts. blend: how a prompt of parts was blended.
    """

    reused: tuple[int, ...]
    prefilled: tuple[int, ...]
    generated: int
    prefill_seconds: float
    first_token_seconds: float | None
    seconds: float
    explain: kvdb.Plan | None
    decode: DecodeStats | None = None
    blend: Blend | None = None


def check_client(db: Any) -> None:
    """Raises InvalidArgument for anything but an open database, such as its address."""
    if not hasattr(db, "create_session"):
        target = repr(db) if isinstance(db, str) else '"kvdb://host:port"'
        raise InvalidArgument(f"db is {db!r}; expected what kvdb.connect({target}) returns")


class SequenceKv(Protocol):
    """The KV of one sequence in the database, as an engine uses it. A `kvdb.Session` is one, embedded and remote; the methods
    raise what those of `kvdb.Session` raise. `engine_adapter.contexts.ModelContexts` finds, opens and keeps them.

    Every array is in the spec's dtype, keys after RoPE at their positions.
    """

    @property
    def spec(self) -> kvdb.ModelSpec: ...

    @property
    def reused(self) -> int:
        """How many tokens of the prompt were found, so that they need no prefill."""
        ...

    @property
    def start(self) -> int:
        """The position of the first token that `update` hands over."""
        ...

    def read(self, layers: Any, start: int = 0, stop: int | None = None, *, out: Any = None) -> Any:
        """The keys and values of tokens [start, stop), each `[kv_heads, stop - start, head_dim]`: a pair for the number of a
        layer, a list of pairs for several. A block of an engine is read by its range; out: buffers to write into."""
        ...

    def update(self, layer: int, k: Any, v: Any, *, start: int | None = None) -> None:
        """Hand over the KV of the next n tokens of one layer, both `[kv_heads, n, head_dim]`."""
        ...

    def attend(self, layer: int, q: Any, k: Any, v: Any, *, start: int | None = None) -> Any:
        """Hand over the KV of n tokens, and answer their attention: q and the result `[q_heads, n, head_dim]`."""
        ...

    def truncate(self, tokens: int) -> None:
        """Keep the first tokens, such as those before a rejected draft."""
        ...

    def fork(self) -> Self:
        """Another sequence that begins as this one, such as a beam."""
        ...

    def close(self) -> None:
        """Let go of it; what was kept stays."""
        ...
