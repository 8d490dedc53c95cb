"""Caches of transformers become contexts, and contexts such caches."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from engine_adapter.transformers import attach
from kvdb.client.client import Client
from kvdb.errors import AlreadyExists, IntegrityError, InvalidArgument, NotFound, ShapeError, SpecMismatch, Unsupported
from tests.engine_adapter.tiny import build, prompts

GREEDY = {"max_new_tokens": 8, "do_sample": False}


def filled(model, ids):
    """A cache that the model's own generate filled, and the ids of its tokens."""
    cache = DynamicCache(config=model.config)
    answer = model.generate(ids, past_key_values=cache, **GREEDY)
    return cache, answer[:, :-1]


def test_a_cache_becomes_a_context(attached, model):
    cache, held = filled(model, prompts(1, 30))
    assert attached.import_cache(cache, name="imported", input_ids=held).tokens == 37
    goes_on = torch.cat([held, prompts(1, 4, seed=2)], 1)
    assert torch.equal(attached.generate(goes_on, **GREEDY), model.generate(goes_on, **GREEDY))
    assert attached.last.reused == (37,)
    assert cache.get_seq_length() == 37, "it was only looked at"


def test_a_context_becomes_a_cache(attached, model, db):
    ids = prompts(1, 30)
    context = attached.store(name="document", input_ids=ids)
    goes_on = torch.cat([ids, prompts(1, 4, seed=2)], 1)
    for source in ("document", context, db.get("document")):
        cache = attached.export_cache(source)
        assert torch.equal(model.generate(goes_on, past_key_values=cache, **GREEDY), model.generate(goes_on, **GREEDY))
    assert cache.get_seq_length() == 41


def test_there_and_back(attached, model):
    cache, held = filled(model, prompts(1, 30))
    attached.import_cache(cache, name="imported", input_ids=held)
    back = attached.export_cache("imported")
    for one, other in zip(cache.layers, back.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


def test_a_held_cache_is_copied(attached, model):
    with attached.open_cache() as cache:
        answer = attached.generate(prompts(1, 20), past_key_values=cache, **GREEDY)
        copy = attached.export_cache(cache)
    assert torch.equal(model.generate(answer, past_key_values=copy, **GREEDY), model.generate(answer, **GREEDY))


@pytest.mark.parametrize("tokens", [5, 7, 30])
def test_windows(engine, tokens):
    model = build("gemma3_text", sliding_window=8, head_dim=16, layer_types=["sliding_attention", "full_attention"])
    ids = prompts(1, tokens)
    with attach(model, Client(engine), piece_tokens=16) as attached:
        attached.store(name="document", input_ids=ids)
        goes_on = torch.cat([ids, prompts(1, 4, seed=2)], 1)
        cache = attached.export_cache("document")
        other = (ids + 1) % 101
        with pytest.raises(IntegrityError, match="are not what the model computes"):
            attached.import_cache(cache, name="again", input_ids=other)
        assert [context.name for context in Client(engine).contexts()] == ["document"]
        attached.import_cache(cache, name="again", input_ids=ids)
        assert torch.equal(model.generate(goes_on, past_key_values=cache, **GREEDY), model.generate(goes_on, **GREEDY))


def test_caches_of_something_else_are_refused(attached, model, names):
    cache, held = filled(model, prompts(1, 30))
    other = (held + 1) % 101
    with pytest.raises(IntegrityError, match="are not what the model computes"):
        attached.import_cache(cache, name="x", input_ids=other)
    earlier = held.clone()
    earlier[0, 0] = other[0, 0]
    elsewhere, _ = filled(model, earlier[:, :30])
    elsewhere.crop(30 - elsewhere.get_seq_length())
    with pytest.raises(
        IntegrityError, match="are not what the model computes"
    ):  # the last tokens are right, what they read is not
        attached.import_cache(elsewhere, name="x", input_ids=held[:, :30])
    with pytest.raises(IntegrityError, match="are not what the model computes"):
        attached.import_cache(filled(build(seed=1), prompts(1, 30))[0], name="x", input_ids=held)
    with pytest.raises(InvalidArgument, match="holds 37 tokens, input_ids are 36"):
        attached.import_cache(cache, name="x", input_ids=held[:, 1:])
    with pytest.raises(InvalidArgument, match="StaticCache"):
        attached.import_cache(StaticCache(config=model.config, max_cache_len=8), name="x", input_ids=held)
    with pytest.raises(InvalidArgument, match="0 layers that hold something"):
        attached.import_cache(DynamicCache(), name="x", input_ids=held)
    with pytest.raises(ShapeError, match=r"shape \(2, 2, 37, 16\)"):
        attached.import_cache(filled(model, prompts(2, 30))[0], name="x", input_ids=held)
    with pytest.raises(SpecMismatch, match="bfloat16"):
        attached.import_cache(filled(build().bfloat16(), prompts(1, 30))[0], name="x", input_ids=held)
    assert names() == []
    attached.import_cache(cache, name="x", input_ids=held)
    with pytest.raises(AlreadyExists):
        attached.import_cache(cache, name="x", input_ids=held)


def test_what_cannot_be_exported(attached, db):
    with pytest.raises(NotFound):
        attached.export_cache("absent")
    with pytest.raises(InvalidArgument, match="export_cache was given 7"):
        attached.export_cache(7)
    with attached.open_cache() as cache, pytest.raises(InvalidArgument, match="given 0 rows"):
        attached.export_cache(cache)
    with attach(build(seed=1), db) as other:
        other.store(name="other", input_ids=prompts(1, 8))
    with pytest.raises(SpecMismatch, match="what is to be exported"):
        attached.export_cache("other")


def test_continuous_batching_says_what_to_call(attached):
    with pytest.raises(Unsupported, match="PagedAttentionCache.*engine.generate"):
        attached.generate_batch([[1, 2, 3]], max_new_tokens=3)
