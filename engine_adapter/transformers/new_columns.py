"""Hands the model only those columns of its input that its cache does not hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from engine_adapter.transformers.cache import SessionCache

OF_COLUMNS = ("input_ids", "position_ids")
"""Arguments of a model with one column, the last dimension, for each token of its input."""


@contextmanager
def only_new_columns(model: PreTrainedModel, cache: SessionCache) -> Iterator[None]:
    """Within the `with`, leave out of the model's input what this cache, of one row, holds.

    Where drafts are checked, transformers puts the whole prompt through the model at first, whatever the cache holds.
    """

    def drop(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("past_key_values") is not cache:
            return args, kwargs
        end = int(kwargs["position_ids"][0, -1]) + 1 + cache.rows[0].padding  # positions count tokens
        held = max(cache.get_seq_length() - (end - kwargs["input_ids"].shape[-1]), 0)
        left = {name: kwargs[name][..., held:] for name in OF_COLUMNS if kwargs.get(name) is not None}
        return args, {**kwargs, **left}

    hook = model.register_forward_pre_hook(drop, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
