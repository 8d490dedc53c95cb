"""The interface of every adapter: generation over contexts that live in kvdb, and a report of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import kvdb
from kvdb.errors import InvalidArgument

Progress = Callable[[int, int], None]
"""Called as (done, total) tokens while a prompt is prefilled; the first call counts what was stored already."""

Inspect = Callable[[Sequence[kvdb.Session]], None]
"""Called with the sessions of a generation, one a row, after its last token and before they are closed."""


@dataclass(frozen=True)
class DecodeStats:
    """How much the attention of decode steps read, summed over layers and steps, beside what exact attention would have read.

    tokens: read by exact attention. scanned: looked at in any form, such as an index's codes. attended: tokens that went into
    the output. nbytes: bytes read, indexes included. nbytes_exact: bytes of the keys and values of all tokens.
    """

    tokens: int
    scanned: int
    attended: int
    nbytes: int
    nbytes_exact: int

    @property
    def attended_share(self) -> float:
        return self.attended / max(self.tokens, 1)

    @property
    def nbytes_share(self) -> float:
        return self.nbytes / max(self.nbytes_exact, 1)

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        return DecodeStats(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Blend:
    """How a prompt was blended of parts.

    reused: tokens whose stored keys and values stayed. recomputed: tokens of chunks that were computed anew, the mean over the
    layers behind the first, whose stored ones are right anyway. fresh: tokens of which nothing was stored. choice: the ratio that
    the caller or the controller chose, and why. seconds: laying out and recomputing took so long. deviation: how far the chunks'
    tokens in the check layer were from what the model makes of them here, a mean; 0 where nothing moved, None if not measured.
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

    reused: prompt tokens found in the database, one number a row of the batch as it was given. prefilled: prompt tokens that
    were computed. generated: new tokens of each returned sequence, padding included. prefill_seconds: until every prompt was in
    the database. first_token_seconds: from the call to the first new token, None for a call that made none. seconds: the whole
    call. explain: the plan of the first row's next query in the last layer. decode: how much the steps behind the prompts read,
    None where there were none or it cannot be told, as with beam search. blend: how a prompt of parts was blended.
    """

    reused: tuple[int, ...]
    prefilled: tuple[int, ...]
    generated: int
    prefill_seconds: float
    first_token_seconds: float | None
    seconds: float
    explain: kvdb.Plan
    decode: DecodeStats | None = None
    blend: Blend | None = None


def check_client(db: Any) -> None:
    """Raises InvalidArgument for what is no open database, such as its address."""
    if not hasattr(db, "create_session"):
        target = repr(db) if isinstance(db, str) else '"kvdb://host:port"'
        raise InvalidArgument(f"db is {db!r}; expected what kvdb.connect({target}) returns")


class InferenceEngine(Protocol):
    """A model whose KV cache lives in a database. spec: the meaning of its KV. last: the report of its last call."""

    spec: kvdb.ModelSpec
    last: Report | None

    def generate(self, input_ids: Any, **options: Any) -> Any:
        """Takes and returns what the engine's own generation does."""
        ...

    def store(self, *, name: str, input_ids: Any, progress: Progress | None = None) -> kvdb.Context:
        """Prefill what is not stored of the tokens, and keep them under a name."""
        ...
