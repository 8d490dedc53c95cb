"""Answers that are fed to a prompt, and how far two distributions of their tokens are apart."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import LogitsProcessorList

from engine_adapter.rag.forcing import Forced, divergence, surprise

PROMPT = torch.tensor([[5, 9, 3, 17, 8]])
FED = [7, 2, 30, 30, 11]


def log_softmax(logits):
    return torch.from_numpy(np.asarray(logits, np.float64)).log_softmax(-1).numpy()


LOGITS = arrays(np.float32, (3, 5), elements=st.floats(-8, 8, width=32))


def test_fed_tokens_come_and_distributions_are_those_of_one_pass(model):
    forced = Forced(FED)
    out = model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        do_sample=False,
        max_new_tokens=len(FED),
        logits_processor=LogitsProcessorList([forced]),
    )
    assert out[0, PROMPT.shape[1] :].tolist() == FED
    with torch.no_grad():
        logits = model(out).logits[0, PROMPT.shape[1] - 1 : -1]
    np.testing.assert_allclose(forced.log_probabilities, log_softmax(logits), atol=1e-4)


def test_what_only_notes_changes_nothing(model):
    settings = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False, "max_new_tokens": 4}
    said = Forced()
    noted = model.generate(PROMPT, logits_processor=LogitsProcessorList([said]), **settings)
    assert noted.tolist() == model.generate(PROMPT, **settings).tolist()
    assert said.log_probabilities.argmax(1).tolist() == noted[0, PROMPT.shape[1] :].tolist()


@given(LOGITS, LOGITS)
def test_divergence_is_never_negative_and_zero_for_the_same(one, other):
    p, q = log_softmax(one), log_softmax(other)
    expected = sum(np.exp(a) * (a - b) for a, b in zip(p.ravel(), q.ravel(), strict=True)) / len(p)
    assert divergence(p, q) == pytest.approx(expected, abs=1e-9)
    assert divergence(p, q) > -1e-9
    assert divergence(p, p) == 0


@given(LOGITS, st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_surprise_is_the_mean_negative_log_likelihood(logits, tokens):
    p = log_softmax(logits)
    assert surprise(p, tokens) == pytest.approx(-np.mean([p[i, token] for i, token in enumerate(tokens)]), abs=1e-6)


def test_tokens_that_are_ruled_out():
    sure = np.array([[0.0, -np.inf]], np.float32)
    even = np.log(np.array([[0.5, 0.5]], np.float32))
    assert divergence(sure, even) == pytest.approx(np.log(2))
    assert divergence(sure, sure) == 0
    assert divergence(even, sure) == np.inf
