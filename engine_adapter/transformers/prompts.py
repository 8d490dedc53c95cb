"""The rows of a batch as kvdb sees them: only real tokens, one session for each row."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from kvdb.blend.strategies import Recompute
from kvdb.errors import DtypeError, InvalidArgument, ShapeError


@dataclass(frozen=True)
class PromptRow:
    """One row. tokens: int64 `[n]`, without padding; padding: the number of columns without a token; padding_end: the column
    behind the last of these, 0 without any."""

    tokens: torch.Tensor
    padding: int = 0
    padding_end: int = 0

    @property
    def ends_in_padding(self) -> bool:
        """Whether the last column is padding, so that the first new token comes from its query."""
        return 0 < self.padding_end == len(self.tokens) + self.padding

    @property
    def known(self) -> torch.Tensor:
        """The tokens whose keys and values must be there before the last column goes through the model."""
        return self.tokens if self.ends_in_padding else self.tokens[:-1]


class PromptBatch(NamedTuple):
    """A batch, int64 `[rows, columns]`, its mask as transformers takes it, and its rows."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    rows: list[PromptRow]


def prompts_of(input_ids: Any, attention_mask: Any, settings: GenerationConfig) -> PromptBatch:
    """The prompts of the batch that `generate` is given; if no ids are given, each row begins with the token that begins a text.

    Raises what `as_batch` and `rows_of` raise, and InvalidArgument where there is nothing to begin with.
    """
    mask = None if attention_mask is None else torch.as_tensor(attention_mask)
    if input_ids is None:
        if settings.bos_token_id is None:
            raise InvalidArgument(
                "input_ids are a NoneType, and the model has no bos_token_id to begin with; expected token ids, or parts="
            )
        input_ids = torch.full((1 if mask is None else mask.shape[0], 1), settings.bos_token_id)
    ids = as_batch(input_ids)
    mask = inferred_mask(ids, settings) if mask is None else mask
    return PromptBatch(ids, mask, rows_of(ids, mask))


def as_batch(input_ids: Any) -> torch.Tensor:
    """Token ids as int64 `[rows, columns]`. Raises ShapeError, DtypeError or InvalidArgument for anything else."""
    ids = _tensor(input_ids)
    if ids.ndim != 2:
        raise ShapeError(f"input_ids have the shape {tuple(ids.shape)}; expected (rows, tokens)")
    if not ids.numel():
        raise InvalidArgument(f"input_ids have the shape {tuple(ids.shape)}; expected at least one token to go on from")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise DtypeError(f"input_ids have the dtype {ids.dtype}; expected token ids, which are integers")
    return ids.long()


def as_row(input_ids: Any) -> torch.Tensor:
    """Token ids of one sequence, given as `[n]` or `[1, n]`, as int64 `[n]`. Raises what `as_batch` raises."""
    ids = _tensor(input_ids)
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise ShapeError(f"input_ids have the shape {tuple(ids.shape)}; expected one sequence, so store the rows one by one")
    return as_batch(ids.unsqueeze(0) if ids.ndim == 1 else ids)[0]


def inferred_mask(ids: torch.Tensor, settings: GenerationConfig) -> torch.Tensor | None:
    """The mask that `generate` infers when none is given: padding is where the pad token stands, unless that token also ends
    texts.

    ids: `[rows, columns]`; so is the mask, int64, 0 on padding. None where there is no padding.
    """
    pad, ends = settings.pad_token_id, end_tokens(settings)
    if pad is None or pad in ends or not (ids == pad).any():
        return None
    return ids.ne(pad).long()


def end_tokens(settings: GenerationConfig) -> list[int]:
    """The tokens that end a text."""
    ends = settings.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def rows_of(ids: torch.Tensor, mask: torch.Tensor | None) -> list[PromptRow]:
    """The prompts of a batch; mask: 0 where a column is padding, shaped like ids, None for no padding.

    Padding may stand anywhere; a token's position is the number of tokens before it, as transformers counts. Raises ShapeError
    for a mask of another shape, InvalidArgument for a row without tokens.
    """
    if mask is None:
        return [PromptRow(row) for row in ids]
    if mask.shape != ids.shape:
        raise ShapeError(f"attention_mask has the shape {tuple(mask.shape)}; expected {tuple(ids.shape)}, as input_ids have")
    real = mask.to(ids.device).bool()
    prompts = []
    for number, (row, here) in enumerate(zip(ids, real, strict=True)):
        tokens = row[here]
        if not len(tokens):
            raise InvalidArgument(f"row {number} is all padding; expected at least one token to go on from")
        empty = (~here).nonzero()
        prompts.append(PromptRow(tokens, len(row) - len(tokens), int(empty[-1]) + 1 if len(empty) else 0))
    return prompts


def _tensor(input_ids: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"input_ids are a {type(input_ids).__name__}; expected a tensor of token ids ({error})") from None


def one_of(input_ids: Any, parts: Iterable[Any] | None, recompute: float | Recompute | None) -> Any:
    """The one of input_ids and parts that was given. Raises InvalidArgument for both, or for arguments that belong to the
    other."""
    if input_ids is not None and parts is not None:
        raise InvalidArgument("generate was given input_ids and parts=; expected one of the two")
    if parts is None and recompute is not None:
        raise InvalidArgument("generate was given recompute= without parts=; only chunks that stand elsewhere are recomputed")
    return input_ids if parts is None else parts
