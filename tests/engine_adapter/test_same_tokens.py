"""Decoding over kvdb gives the tokens and the logits of plain transformers."""

from functools import cache

import pytest
import torch

from engine_adapter.models import vault
from engine_adapter.transformers import attach
from tests.engine_adapter.tiny import KINDS, build, left_padded, prompts

OPTIONS = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
LENGTHS = (1, 2, 33, 56, 120)
"""The lengths of prompts: with what is generated, one ends before a block of 64 is full, and two grow past the end of one."""


@cache
def model_of(kind):
    return build(kind)


@cache
def plain(kind, number):
    """The logits of one prompt alone."""
    return model_of(kind).generate(prompts(1, LENGTHS[number], seed=number), **OPTIONS)


def largest_difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one.logits, other.logits, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_logits_of_single_prompts(kind, db):
    with attach(model_of(kind), db, piece_tokens=32) as engine:
        for number, length in enumerate(LENGTHS):
            got = engine.generate(prompts(1, length, seed=number), **OPTIONS)
            assert torch.equal(got.sequences, plain(kind, number).sequences)
            assert largest_difference(got, plain(kind, number)) < 1e-4


@cache
def plain_batch(kind, seed):
    ids, mask = left_padded(4, 56, seed)
    return model_of(kind).generate(ids, attention_mask=mask, pad_token_id=0, **OPTIONS)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_logits_of_a_padded_batch(kind, seed, db):
    ids, mask = left_padded(4, 56, seed)
    with attach(model_of(kind), db, piece_tokens=32) as engine:
        got = engine.generate(ids, attention_mask=mask, pad_token_id=0, **OPTIONS)
    assert torch.equal(got.sequences, plain_batch(kind, seed).sequences)
    assert largest_difference(got, plain_batch(kind, seed)) < 1e-4


def test_tokens_stay_the_same_when_the_prompt_is_stored(db):
    model, ids = model_of("qwen3"), prompts(1, LENGTHS[4], seed=4)
    with attach(model, db) as engine:
        engine.store(name="document", input_ids=ids[0, :70])
        got = engine.generate(ids, **OPTIONS)
        assert engine.last.reused == (70,)
    assert torch.equal(got.sequences, plain("qwen3", 4).sequences)
    assert largest_difference(got, plain("qwen3", 4)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype, db):
    model, ids = build("qwen3").to(dtype), prompts(1, 50)
    options = {**OPTIONS, "max_new_tokens": 1}
    with attach(model, db) as engine:
        got = engine.generate(ids, **options)
    want = build("qwen3").generate(ids, **options)
    plainly = model.generate(ids, **options)
    assert largest_difference(got, want) < 1.5 * largest_difference(plainly, want) + 0.02


def test_layers_that_rotate_in_their_own_way(db):
    """Scaled frequencies, a part of the dimensions only, and scores with a scale of their own do not matter to kvdb."""
    ids, options = prompts(1, 60), {**OPTIONS, "max_new_tokens": 16}
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    for model in (build("llama", rope_parameters=yarn), build("llama", head_dim=8), build("qwen3", head_dim=64)):
        with attach(model, db) as engine:
            assert torch.equal(engine.generate(ids, **options).sequences, model.generate(ids, **options).sequences)


def test_a_trained_model_looks_up_the_same_codes(db, vault_model):
    """Four questions in one batch, about a document that was read once."""
    model, tokenizer = vault_model
    document = vault.document(tokenizer, tokens=800, facts=10, seed=0)
    questions = [document.ids + tokenizer.encode(fact.question, add_special_tokens=False) for fact in document.facts[:4]]
    width = max(map(len, questions))
    ids = torch.tensor([[0] * (width - len(question)) + question for question in questions])
    mask = torch.tensor([[0] * (width - len(question)) + [1] * len(question) for question in questions])
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with attach(model, db) as engine:
        engine.store(name="document", input_ids=document.ids)
        got = engine.generate(ids, **options)
        assert min(engine.last.reused) >= len(document.ids) - 1
    assert torch.equal(got, model.generate(ids, **options))
