"""Attaching changes a model for the time of the `with`, and then it is as it was."""

import copy

import pytest
import torch
from transformers import CLIPVisionConfig, DynamicCache, LlavaConfig, LlavaForConditionalGeneration

from engine_adapter.transformers import attach
from kvdb.errors import InvalidArgument
from tests.engine_adapter.tiny import build, left_padded, prompts

GREEDY = {"max_new_tokens": 8, "do_sample": False}


def state(model):
    return model.config._attn_implementation, type(model.config._attn_implementation), model.config.to_dict(), list(vars(model))


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_the_model_is_as_it_was(db, before):
    model = build(attn_implementation=before)
    model.set_attn_implementation(before)
    as_it_was = copy.deepcopy(state(model))
    with attach(model, db) as engine:
        assert model.config._attn_implementation == "kvdb"
        engine.generate(prompts(1, 8), **GREEDY)
    assert state(model) == as_it_was


def test_the_model_is_as_it_was_after_an_error(model, db):
    as_it_was = copy.deepcopy(state(model))
    with pytest.raises(ZeroDivisionError), attach(model, db):
        raise ZeroDivisionError
    assert state(model) == as_it_was


def test_only_the_text_decoder_of_a_multimodal_model_changes(db):
    text = build().config
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=100)).eval()
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})

    def implementations():
        return [config._attn_implementation for config in (model.config, model.config.text_config, model.config.vision_config)]

    want = model.generate(prompts(2, 20), **GREEDY)
    with attach(model, db) as engine:
        assert implementations() == ["sdpa", "kvdb", "eager"]
        assert torch.equal(engine.generate(prompts(2, 20), **GREEDY), want)
    assert implementations() == ["sdpa", "sdpa", "eager"]


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_calls_of_the_model_itself_go_on_as_before(db, before):
    model = build()
    model.set_attn_implementation(before)
    ids, mask = left_padded(3, 20)

    def calls():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            first = model(ids[:, :12], attention_mask=mask[:, :12], past_key_values=cache).logits
            second = model(ids[:, 12:], attention_mask=mask, past_key_values=cache).logits
            alone = model(ids[:1], use_cache=False).logits
        return first, second, alone, model.generate(ids, attention_mask=mask, pad_token_id=0, num_beams=2, **GREEDY)

    without = calls()
    with attach(model, db) as engine:
        engine.generate(ids, attention_mask=mask, pad_token_id=0, **GREEDY)
        attached = calls()
    torch.testing.assert_close(attached, without, atol=0, rtol=0)


def test_training_goes_on_as_before(db):
    model = build(attention_dropout=0.5).train()
    ids = prompts(2, 10)

    def loss():
        torch.manual_seed(0)
        value = model(ids, labels=ids).loss
        value.backward()
        return value.item()

    without = loss()
    with attach(model, db):
        assert loss() == without


def test_attaching_draws_no_random_numbers(db):
    model = build(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    torch.manual_seed(0)
    wanted = torch.rand(4)
    torch.manual_seed(0)
    with attach(model, db):
        assert torch.equal(torch.rand(4), wanted)
        assert [module.training for module in model.modules()] == before


def test_one_model_is_attached_once_at_a_time(model, db):
    with attach(model, db) as engine:
        with pytest.raises(InvalidArgument, match="attached to a database already"), attach(model, db):
            pass
        engine.generate(prompts(1, 4), **GREEDY)


def test_models_that_share_a_config(db):
    one = build()
    other = type(one)(one.config).eval()
    ids = prompts(1, 10)
    want = [model.generate(ids, **GREEDY) for model in (one, other)]
    first, second = attach(one, db), attach(other, db)
    engines = [first.__enter__(), second.__enter__()]
    assert [engine.generate(ids, **GREEDY).tolist() for engine in engines] == [answer.tolist() for answer in want]
    first.__exit__(None, None, None)
    assert torch.equal(one.generate(ids, **GREEDY), want[0])
    assert torch.equal(engines[1].generate(ids, **GREEDY), want[1])
    with pytest.raises(InvalidArgument, match="not attached"):
        engines[0].generate(ids, **GREEDY)
    second.__exit__(None, None, None)
    assert type(one.config._attn_implementation) is str


def test_an_implementation_that_was_changed_meanwhile(db):
    model = build()
    with attach(model, db) as engine:
        model.set_attn_implementation("eager")
        with pytest.raises(InvalidArgument, match="not attached"):
            engine.generate(prompts(1, 4), **GREEDY)
    assert model.config._attn_implementation == "sdpa"


def test_an_engine_ends_with_its_with(model, db):
    with attach(model, db) as engine:
        pass
    with pytest.raises(InvalidArgument, match="not attached"):
        engine.generate(prompts(1, 4), **GREEDY)
    with pytest.raises(InvalidArgument, match="not attached"):
        engine.store(name="x", input_ids=prompts(1, 4))


def test_an_attached_models_config_can_be_copied_and_saved(model, db, tmp_path):
    with attach(model, db):
        copied = copy.deepcopy(model.config)
        assert (copied._attn_implementation, copied._attn_implementation.before) == ("kvdb", "sdpa")
        model.config.save_pretrained(tmp_path)
    assert "kvdb" not in (tmp_path / "config.json").read_text()


def test_a_piece_holds_at_least_one_token(model, db):
    with pytest.raises(InvalidArgument, match="piece_tokens is 0"), attach(model, db, piece_tokens=0):
        pass
