"""When a call of `generate` or `store` reached which point, and when a generation ends."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteria, StoppingCriteriaList


class Times(NamedTuple):
    """When a call reached a point, by `perf_counter`; None for a point that it does not reach."""

    started: float
    prefilled: float
    first_token: float | None = None


class StopWhen(StoppingCriteria):
    """Ends a generation when `says` is true of its tokens so far, int64 `[rows, n]`."""

    def __init__(self, says: Callable[[torch.Tensor], bool]) -> None:
        self._says = says

    def __call__(self, input_ids: torch.Tensor, *_given: Any, **_named: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._says(input_ids), dtype=torch.bool, device=input_ids.device)


class FirstToken:
    """Notes when the first new token of a generation was there."""

    def __init__(self) -> None:
        self.first: float | None = None

    @classmethod
    def among(cls, options: dict[str, Any]) -> "FirstToken":
        """A FirstToken that is added to the criteria in these options, and never ends the generation."""
        clock = cls()
        given = options.get("stopping_criteria") or ()
        options["stopping_criteria"] = StoppingCriteriaList([*given, StopWhen(clock._note)])
        return clock

    def _note(self, _: torch.Tensor) -> bool:
        self.first = self.first or perf_counter()
        return False
