"""A few tokens that go through a model, to see what its layers leave in a cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from engine_adapter.transformers.support import text_config

TRIAL_TOKENS = 3


def filled_by_trial(model: PreTrainedModel) -> Any:
    """A cache of the model's own that has read TRIAL_TOKENS tokens."""
    cache = DynamicCache(config=text_config(model))
    ids = torch.arange(TRIAL_TOKENS, device=model.device)[None]
    with evaluating(model), torch.no_grad():
        model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """No part of the model is in training mode for the time of the `with`, so that no dropout draws random numbers."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
