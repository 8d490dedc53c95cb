"""The demo's comparison: the same model in plain transformers, which reads the whole document itself."""

from time import perf_counter
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from engine_adapter.base import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE = 2048


class PlainReader:
    """Plain transformers over one document: it is prefilled once, and then answers one question after the other.

    prefill_seconds: how long each question would wait for the document without a KV cache that is kept. After each question the
    cache is cropped back to the document, so that the next one finds the same cache.
    """

    def __init__(self, model: "PreTrainedModel", document: list[int], progress: Progress) -> None:
        """progress: called with the number of tokens prefilled so far and of all tokens."""
        self._model = model
        self._document = document
        self._cache = DynamicCache(config=model.config)
        started = perf_counter()
        with torch.inference_mode():
            for start in range(0, len(document), PIECE):
                model.base_model(
                    input_ids=torch.tensor([document[start : start + PIECE]], device=model.device),
                    past_key_values=self._cache,
                    use_cache=True,
                )
                progress(min(start + PIECE, len(document)), len(document))
        self.prefill_seconds = perf_counter() - started

    def answer(self, question: list[int], new_tokens: int) -> tuple[list[int], float]:
        """Greedy token ids after the document and the question, and the seconds from the question to the first of them."""
        ids, first_seconds, started = question, 0.0, perf_counter()
        answer: list[int] = []
        with torch.inference_mode():
            while len(answer) < new_tokens:
                logits = self._model(
                    input_ids=torch.tensor([ids], device=self._model.device), past_key_values=self._cache, use_cache=True
                ).logits
                answer.append(int(logits[0, -1].argmax()))
                first_seconds = first_seconds or perf_counter() - started
                ids = answer[-1:]
        self._cache.crop(len(self._document) - self._cache.get_seq_length())
        return answer, first_seconds
