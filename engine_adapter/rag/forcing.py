"""Teacher forcing: an answer that is given is fed token by token, and what the model would have said at each is noted."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import LogitsProcessor

from kvdb.types import Float32


class Forced(LogitsProcessor):
    """Notes the distribution of each new token of a generation of one row.

    tokens: those that come whatever the model says, one a step; None lets it choose as it would.
    """

    def __init__(self, tokens: Sequence[int] | None = None) -> None:
        self._tokens = tokens
        self._rows: list[Float32] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        step = len(self._rows)
        self._rows.append(scores[0].float().log_softmax(-1).cpu().numpy())
        if self._tokens is None:
            return scores
        only = torch.full_like(scores, -torch.inf)
        only[:, self._tokens[step]] = 0
        return only

    @property
    def log_probabilities(self) -> Float32:
        """The logarithm of each token's probability, natural, float32 `[steps, vocabulary]`."""
        return np.stack(self._rows)


def divergence(whole: Float32, blended: Float32) -> float:
    """The Kullback-Leibler divergence of `blended` from `whole`, both log probabilities `[n, vocabulary]`: nats a token, a mean.

    What `whole` gives no probability adds nothing; infinite where `blended` alone rules a token out.
    """
    p = np.exp(whole.astype(np.float64))
    with np.errstate(invalid="ignore"):
        terms = np.where(p > 0, p * (whole.astype(np.float64) - blended), 0)
    return float(terms.sum(axis=1).mean())


def surprise(log_probabilities: Float32, tokens: Sequence[int]) -> float:
    """The negative log-likelihood of tokens `[n]` under log probabilities `[n, vocabulary]`: nats a token, a mean."""
    return -float(np.mean(log_probabilities[np.arange(len(tokens)), np.asarray(tokens)], dtype=np.float64))
