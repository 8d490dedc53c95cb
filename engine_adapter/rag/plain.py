"""The same model without kvdb: it reads the whole prompt, and answers greedily."""

from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from engine_adapter.rag.answers import Tokenizer, text_of
from engine_adapter.rag.check import FullAnswer
from engine_adapter.rag.forcing import Forced
from engine_adapter.transformers.timing import FirstToken


def full_answer(model: PreTrainedModel, tokenizer: Tokenizer, ids: torch.Tensor, **options: Any) -> FullAnswer:
    """Prefill and decode a prompt, int64 `[n]`. options: of `model.generate`."""
    clock, said = FirstToken.among(options), Forced()
    prompt = ids.unsqueeze(0).to(model.device)
    started = perf_counter()
    out = model.generate(  # type: ignore[operator]  # transformers does not type it
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, logits_processor=LogitsProcessorList([said]), **options
    )
    tokens, first = out[0, len(ids) :].tolist(), clock.first or started
    return FullAnswer(text_of(tokenizer, tokens), tuple(tokens), first - started, said.log_probabilities)
