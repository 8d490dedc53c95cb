"""The demo's comparison: the same model in plain transformers, which reads the whole document itself."""

from time import perf_counter
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE = 2048


class PlainReader:
    """Plain transformers over one document: prefilled once, and the questions asked one after the other.

    prefill_seconds: how long every question would wait without a KV cache that is kept. The cache is cropped back to the document
    after each question, which is what a private copy of the whole cache for each would come to.
    """

    def __init__(self, model: "PreTrainedModel", document: list[int]) -> None:
        self._model = model
        self._document = document
        self._cache = DynamicCache(config=model.config)
        started = perf_counter()
        with torch.inference_mode():
            for start in range(0, len(document), PIECE):
                model.base_model(
                    input_ids=torch.tensor([document[start : start + PIECE]]), past_key_values=self._cache, use_cache=True
                )
        self.prefill_seconds = perf_counter() - started

    def answer(self, question: list[int], new_tokens: int) -> tuple[list[int], float]:
        """Greedy token ids after the document and the question, and the seconds from the question to the first of them."""
        ids, first_seconds, started = question, 0.0, perf_counter()
        answer: list[int] = []
        with torch.inference_mode():
            while len(answer) < new_tokens:
                logits = self._model(input_ids=torch.tensor([ids]), past_key_values=self._cache, use_cache=True).logits
                answer.append(int(logits[0, -1].argmax()))
                first_seconds = first_seconds or perf_counter() - started
                ids = answer[-1:]
        self._cache.crop(len(self._document) - self._cache.get_seq_length())
        return answer, first_seconds
