"""The same model without kvdb: it reads the whole prompt, and answers greedily."""

from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from engine_adapter.rag.answers import Tokenizer, text_of
from engine_adapter.rag.check import FullAnswer
from engine_adapter.rag.forcing import Forced


class _FirstToken(BaseStreamer):
    """Notes when the first new token came."""

    def __init__(self) -> None:
        self.calls = 0
        self.first = 0.0

    def put(self, _value: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call is of the prompt
            self.first = perf_counter()

    def end(self) -> None:
        """Nothing is left to note."""


def full_answer(model: PreTrainedModel, tokenizer: Tokenizer, ids: torch.Tensor, **options: Any) -> FullAnswer:
    """Prefill and decode a prompt, int64 `[n]`. options: of `model.generate`."""
    clock, said = _FirstToken(), Forced()
    prompt = ids.unsqueeze(0).to(model.device)
    started = perf_counter()
    out = model.generate(  # type: ignore[operator]  # transformers does not type it
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        streamer=clock,
        logits_processor=LogitsProcessorList([said]),
        **options,
    )
    tokens = out[0, len(ids) :].tolist()
    return FullAnswer(text_of(tokenizer, tokens), tuple(tokens), clock.first - started, said.log_probabilities)
