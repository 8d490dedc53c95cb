"""Ends an answer where the model has no position for another token."""

from typing import Any

import torch
from transformers import StoppingCriteria


class Full(StoppingCriteria):
    """transformers' own criterion would take the place of the one that `max_new_tokens` makes."""

    def __init__(self, positions: int) -> None:
        self._positions = positions

    def __call__(self, input_ids: torch.Tensor, *_given: Any, **_named: Any) -> torch.Tensor:
        full = input_ids.shape[1] >= self._positions
        return torch.full((input_ids.shape[0],), full, dtype=torch.bool, device=input_ids.device)
