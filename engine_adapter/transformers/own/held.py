"""A cache of the model's own that several calls of `generate` go on with, one behind the other."""

from typing import Any, Self

import torch

from engine_adapter.transformers.own.kept_model import KeptModel
from engine_adapter.transformers.prompts import PromptBatch
from kvdb.errors import InvalidArgument


class OwnCache:
    """Made by `engine.open_cache` of a model that attends itself.

    It holds what the model has read last. A prompt that begins with other tokens is never answered from it. cache: of the model's
    own, None before the first call. held: how many tokens of each row it holds.
    """

    def __init__(self, kept: KeptModel) -> None:
        self._kept = kept
        self._ids: torch.Tensor | None = None  # int64 [rows, columns], padding included
        self._mask: torch.Tensor | None = None
        self.cache: Any = None
        self.held: tuple[int, ...] = ()

    def check_serves(self, kept: KeptModel) -> None:
        """Raises InvalidArgument for another model, or one that was attached anew."""
        if kept is not self._kept:
            raise InvalidArgument("past_key_values= is a cache of another model; take one from this engine's open_cache")

    def goes_on(self, prompts: PromptBatch) -> bool:
        """Whether the prompts begin with what it holds, padding included, and have more. Raises InvalidArgument for another
        number of rows."""
        if self._ids is None or self.cache is None:
            return False
        rows, columns = self._ids.shape
        if prompts.ids.shape[0] != rows:
            raise InvalidArgument(f"past_key_values= holds {rows} rows, the prompt has {prompts.ids.shape[0]}; expected as many")
        if prompts.ids.shape[1] <= columns:
            return False
        mask = torch.ones_like(prompts.ids) if prompts.mask is None else prompts.mask
        real = mask[:, :columns].bool()
        same = bool((prompts.ids[:, :columns] == self._ids).logical_or(~real).all())
        return same and torch.equal(real, self._real())

    def take(self) -> Any:
        """The cache, which whoever takes it goes on with; what fails on the way is not gone on with."""
        cache, self.cache = self.cache, None
        return cache

    def went_on(self, prompts: PromptBatch, sequences: torch.Tensor, cache: Any) -> None:
        """Note what the model has read: all columns but the last, int64 `[rows, n]`."""
        n = sequences.shape[1] - 1
        self._ids, self.cache = sequences[:, :n], cache
        mask = torch.ones_like(prompts.ids) if prompts.mask is None else prompts.mask
        self._mask = torch.nn.functional.pad(mask.to(sequences.device), (0, n - mask.shape[1]), value=1)
        self.held = tuple(int(real) for real in self._mask.sum(1))

    def row(self) -> tuple[Any, int]:
        """The cache of its only row, and how many columns of padding it begins with. Raises InvalidArgument for others."""
        if self._ids is None or len(self._ids) != 1:
            rows = 0 if self._ids is None else len(self._ids)
            raise InvalidArgument(f"export_cache was given {rows} rows; expected a context, its name, or one row of open_cache")
        return self.cache, int(self._ids.shape[1]) - self.held[0]

    def get_seq_length(self) -> int:
        """The number of columns that it holds."""
        return 0 if self._ids is None else int(self._ids.shape[1])

    def close(self) -> None:
        """Let go of it. Closing twice does nothing."""
        self._ids = self._mask = self.cache = None
        self.held = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _real(self) -> torch.Tensor:
        assert self._mask is not None
        return self._mask.bool()
