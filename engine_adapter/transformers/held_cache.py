"""A cache that several calls of `generate` go on with, one behind the other."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

import kvdb
from engine_adapter.transformers.cache import MakeLayer, Row, SessionCache
from engine_adapter.transformers.prompts import PromptRow
from kvdb.errors import InvalidArgument, Unsupported
from query_optimizer.query_options import NO_OPTIONS

Cache = TypeVar("Cache")
Fill = Callable[[kvdb.Session, torch.Tensor, int], None]
"""Called as (session, tokens, start): computes tokens [start, n) into the session."""


class HeldCache(SessionCache):
    """Made by `engine.open_cache`; `engine.generate(..., past_key_values=cache)` fills it and goes on with it.

    It knows the tokens that its sessions hold. A prompt that begins with other tokens is never answered from them: each row keeps
    what its prompt shares with it, takes back what lies behind, and computes the rest.
    """

    def __init__(self, spec: kvdb.ModelSpec, db: kvdb.Client, make: MakeLayer) -> None:
        super().__init__(spec, [], 0, NO_OPTIONS, db, make)
        self._held: list[torch.Tensor] = []  # int64 [n] of each row: tokens that its session is known to hold, from the first

    def check_serves(self, spec: kvdb.ModelSpec, db: kvdb.Client, rows: int) -> None:
        """Raises InvalidArgument for another model or database, or another number of rows than it holds."""
        if spec != self._batch.spec or db is not self._batch.db:
            raise InvalidArgument(
                "past_key_values= is a cache of another model or database; take one from this engine's open_cache"
            )
        if self._held and rows != len(self._held):
            raise InvalidArgument(f"past_key_values= holds {len(self._held)} rows, the prompt has {rows}; expected as many")

    def go_to(
        self, prompts: list[PromptRow], options: kvdb.QueryOptions, fill: Fill, expected_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Hold all of each prompt but its last column. Returns how many tokens of each were not computed. expected_tokens: of the
        answers, None where nobody knows.

        Each row keeps the tokens that it shares with its prompt; without any, it stands on what the database has stored. Raises
        what `fill` and the database raise; every row then holds a beginning of its prompt, and can be gone on with.
        """
        columns = {len(prompt.tokens) + prompt.padding for prompt in prompts}
        assert len(columns) == 1, "the rows of a batch have as many columns"
        self._batch.options = options
        self._batch.waiting = None  # of a call that failed
        reused = []
        with ExitStack() as undo:
            if not self._held:
                undo.callback(self._forget)
            for i, prompt in enumerate(prompts):
                begin = self._stand_on(i, prompt, expected_tokens)
                fill(self._batch.rows[i].session, prompt.known, begin)
                self._held[i] = prompt.known
                reused.append(begin)
            undo.pop_all()
        self._set_length(columns.pop() - 1)
        return tuple(reused)

    def went_on(self, prompts: list[PromptRow], answers: torch.Tensor) -> None:
        """Note what the model has read: the prompts, and the tokens behind them, int64 `[rows, n]`."""
        pairs = zip(prompts, answers, strict=True)
        self._held = [torch.cat([prompt.tokens, answer.to(prompt.tokens.device)]) for prompt, answer in pairs]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self._held = [held[: length - row.padding] for held, row in zip(self._held, self._batch.rows, strict=True)]

    def _select(self, indices: list[int]) -> None:
        super()._select(indices)
        self._held = [self._held[index] for index in indices]

    def _forget(self) -> None:
        """Close the sessions, and begin without rows."""
        self.close()
        self._batch.rows, self._held = [], []

    def _stand_on(self, i: int, prompt: PromptRow, expected_tokens: int | None) -> int:
        """Make row i hold what it shares with its prompt, and no more. Returns the number of these tokens."""
        batch, known = self._batch, prompt.known
        common = shared_tokens(self._held[i], known) if i < len(self._held) else 0
        if common:
            session = batch.rows[i].session
            session.truncate(common)
        else:
            assert batch.db is not None
            session = batch.db.create_session(batch.spec, known, expected_tokens=expected_tokens)
            common = session.start
        row = row_of(session, prompt)
        if i == len(self._held):
            batch.rows.append(row)
            self._held.append(known[:common])
        else:
            if session is not batch.rows[i].session:
                batch.rows[i].session.close()
            batch.rows[i], self._held[i] = row, known[:common]
        return common


def row_of(session: kvdb.Session, prompt: PromptRow) -> Row:
    """The row of a batch in which a session holds all of a prompt but its last column."""
    columns = len(prompt.tokens) + prompt.padding
    return Row(session, prompt.padding, prompt.padding_end, columns - 1 if prompt.ends_in_padding else None)


def shared_tokens(one: torch.Tensor, other: torch.Tensor) -> int:
    """The number of tokens with which both begin, int64 `[n]` and `[m]`."""
    n = min(len(one), len(other))
    differ = one[:n].to(other.device).ne(other[:n]).nonzero()
    return int(differ[0]) if len(differ) else n


def cache_in(generation: dict[str, Any], kind: type[Cache]) -> Cache | None:
    """The cache of this kind among the arguments of `generate`, which is taken out of them. Raises Unsupported for another."""
    cache = generation.pop("past_key_values", None)
    if cache is not None and not isinstance(cache, kind):
        raise Unsupported(
            f"past_key_values= is a {type(cache).__name__}; expected what engine.open_cache returns, or store the tokens of this "
            "one with engine.import_cache, and leave it out"
        )
    return cache
