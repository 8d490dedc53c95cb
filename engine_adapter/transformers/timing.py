"""When a call of `generate` or `store` reached which point."""

from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteria, StoppingCriteriaList


class Times(NamedTuple):
    """When a call reached a point, by `perf_counter`; None for a point that it does not reach."""

    started: float
    prefilled: float
    first_token: float | None = None


class FirstToken(StoppingCriteria):
    """A stopping criterion that never stops; it notes when the first new token was there."""

    def __init__(self) -> None:
        self.first: float | None = None

    @classmethod
    def among(cls, options: dict[str, Any]) -> "FirstToken":
        """A FirstToken that is added to the criteria in these options."""
        clock = cls()
        options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), clock])
        return clock

    def __call__(self, input_ids: torch.Tensor, *_given: Any, **_named: Any) -> torch.Tensor:
        self.first = self.first or perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
