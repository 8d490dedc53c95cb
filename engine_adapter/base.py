"""What an adapter gives its user, whatever the engine: generation over contexts that live in kvdb, and a report of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import kvdb

Progress = Callable[[int, int], None]
"""Called as (done, total) tokens while a prompt is prefilled; the first call counts what was stored already."""

Inspect = Callable[[Sequence[kvdb.Session]], None]
"""Called with the sessions of a generation, one a row, after its last token and before they are closed."""


@dataclass(frozen=True)
class Reading:
    """What attention read in every layer and step, and what exact attention would have.

    tokens: that exact attention reads. scanned: those looked at in whatever form, such as an index's codes. attended: those that
    went into the output. nbytes: read for it, indexes included; nbytes_exact: of the keys and values of all tokens.
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

    def __add__(self, other: "Reading") -> "Reading":
        return Reading(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Blend:
    """How a prompt was blended of parts. reused: tokens whose stored keys and values stayed; recomputed: tokens of chunks that
    were computed anew, the mean over the layers behind the first (whose stored ones are right anyway); fresh: tokens of which
    nothing was stored. choice: the ratio that was asked for or chosen, and why. seconds: of laying out and recomputing."""

    reused: float
    recomputed: float
    fresh: int
    choice: kvdb.Choice
    strategy: str
    seconds: float

    @property
    def ratio(self) -> float:
        return self.choice.ratio


@dataclass(frozen=True)
class Report:
    """What the last `generate` or `store` did.

    reused: prompt tokens found in the database, one number a row of the batch as it was given. prefilled: prompt tokens that
    were computed. generated: new tokens of each returned sequence, padding included. prefill_seconds: until every prompt was in
    the database. first_token_seconds: from the call to the first new token, None where none was asked for. seconds: the whole
    call. explain: the plan of the first row's next query in the last layer. reading: what the steps behind the prompts read,
    None where there were none or it cannot be told, as with beam search. blend: of a prompt that was laid out of parts.
    """

    reused: tuple[int, ...]
    prefilled: tuple[int, ...]
    generated: int
    prefill_seconds: float
    first_token_seconds: float | None
    seconds: float
    explain: kvdb.Plan
    reading: Reading | None = None
    blend: Blend | None = None


class Engine(Protocol):
    """A model whose KV cache lives in a database."""

    spec: kvdb.ModelSpec
    last: Report | None

    def generate(self, input_ids: Any, **options: Any) -> Any:
        """Takes and returns what the engine's own generation does."""
        ...

    def store(self, *, name: str, input_ids: Any, progress: Progress | None = None) -> kvdb.Context:
        """Prefill what is not stored of the tokens, and keep them under a name."""
        ...
