"""Layers with a sliding window see what transformers lets them see, and their sessions hold the whole context."""

import pytest
import torch
import transformers

from engine_adapter.transformers import attach
from kvdb.client.client import Client
from kvdb.errors import Unsupported
from tests.engine_adapter.tiny import build, left_padded, prompts

WINDOW = 8
GREEDY = {"max_new_tokens": 12, "do_sample": False}
KINDS = {
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {"sliding_window": WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.fixture(scope="module", params=KINDS)
def windowed(request):
    return build(request.param, **KINDS[request.param])


@pytest.fixture
def attached(windowed, engine):
    """The model, attached to an embedded database: a window is the same everywhere, but for what is read of a session."""
    with attach(windowed, Client(engine), piece_tokens=5) as attached:
        yield attached


@pytest.fixture
def everywhere(windowed, db):
    """The model, attached to an embedded and to a remote database."""
    with attach(windowed, db, piece_tokens=5) as attached:
        yield attached


def same(engine, model, *given, **options):
    return torch.equal(engine.generate(*given, **options), model.generate(*given, **options))


def test_prompts_of_every_length_around_the_window(attached, windowed):
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 3, "do_sample": False}
    for length in range(1, 2 * WINDOW + 3):
        got, want = (generate(prompts(1, length), **options) for generate in (attached.generate, windowed.generate))
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=0)


def test_the_window_is_neither_larger_nor_smaller(windowed):
    """A model with another window answers otherwise, so the tests above can tell one token more or less."""
    for wrong in (WINDOW - 1, WINDOW + 1):
        other = build(windowed.config.model_type, **{**KINDS[windowed.config.model_type], "sliding_window": wrong})
        other.load_state_dict(windowed.state_dict())
        logits = [model(prompts(1, 20)).logits for model in (windowed, other)]
        assert (logits[0][0, -1] - logits[1][0, -1]).abs().max() > 1e-2


def test_a_stored_context_is_gone_on_with(everywhere, windowed):
    ids, want = prompts(1, 30), windowed.generate(prompts(1, 30), **GREEDY)
    for stored in (3, WINDOW - 1, WINDOW, WINDOW + 1, 21):
        everywhere.store(name=f"document {stored}", input_ids=ids[0, :stored])
        assert torch.equal(everywhere.generate(ids, **GREEDY), want)
        assert everywhere.last.reused == (stored,)


def test_the_whole_context_is_stored(attached, windowed, engine):
    ids = prompts(1, 40)
    attached.store(name="document", input_ids=ids)
    with Client(engine).create_session(attached.spec, ids[0]) as session:
        got = session.read([0, 1])
    full = transformers.DynamicCache()  # knows of no windows
    with torch.no_grad():
        windowed.model(ids, past_key_values=full, use_cache=True, attention_mask=_mask(windowed, ids))
    for (k, v), layer in zip(got, full.layers, strict=True):
        torch.testing.assert_close(torch.from_numpy(k), layer.keys[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(torch.from_numpy(v), layer.values[0], atol=1e-5, rtol=1e-4)


def _mask(model, ids):
    """The masks of a whole prompt, by layer kind where the model has several."""
    at = torch.arange(ids.shape[1])
    full = at[None, :] <= at[:, None]
    window = full & (at[None, :] > at[:, None] - WINDOW)
    masks = {"full_attention": full[None, None], "sliding_attention": window[None, None]}
    return masks if model.config.model_type == "gemma3_text" else masks["sliding_attention"]


def test_batches_beams_and_samples(attached, windowed):
    ids, mask = left_padded(3, 20)
    options = {"attention_mask": mask, "pad_token_id": 0, **GREEDY}
    assert same(attached, windowed, ids, **options)
    assert same(attached, windowed, ids, num_beams=3, **options)
    answers = []
    for generate in (attached.generate, windowed.generate):
        torch.manual_seed(2)
        answers.append(generate(prompts(2, 20), do_sample=True, num_return_sequences=2, max_new_tokens=9))
    assert torch.equal(*answers)


def test_drafts(attached, windowed):
    ids = prompts(1, 9, seed=3).repeat(1, 3)
    want = windowed.generate(ids, **GREEDY)
    for drafts in ({"prompt_lookup_num_tokens": 2}, {"prompt_lookup_num_tokens": 12}, {"assistant_model": build(seed=1)}):
        assert torch.equal(attached.generate(ids, **drafts, **GREEDY), want)


def test_a_cache_that_is_gone_on_with(everywhere, windowed):
    chat = prompts(1, 20)
    with everywhere.open_cache() as cache:
        for turn in range(3):
            answer = everywhere.generate(chat, past_key_values=cache, **GREEDY)
            assert torch.equal(answer, windowed.generate(chat, **GREEDY))
            cache.crop(-turn)
            chat = torch.cat([answer, prompts(1, 3, seed=turn)], dim=1)
        chat[0, 15] = (chat[0, 15] + 1) % 101
        assert torch.equal(everywhere.generate(chat, past_key_values=cache, **GREEDY), windowed.generate(chat, **GREEDY))
        assert everywhere.last.reused == (15,)


def test_full_layers_alone_are_asked(attached, windowed):
    full = 1 if windowed.config.model_type == "gemma3_text" else 0
    asked = []
    attached.generate(prompts(1, 20), inspect=lambda sessions: asked.append(sessions[0].stats().queries), **GREEDY)
    assert asked == [full * (4 + 12)], "four pieces of the prompt, and the steps"
    decode = attached.last.decode
    assert (decode is None) == (not full)
    assert decode is None or decode.tokens == sum(range(20, 32))


def test_padding_within_a_prompt_is_refused(attached, engine):
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    with pytest.raises(Unsupported, match="padding behind its first token"):
        attached.generate(prompts(1, 6), attention_mask=mask, pad_token_id=0, keep="x", **GREEDY)
    assert engine.contexts() == []


def test_chunks_are_not_moved(attached, engine):
    with pytest.raises(Unsupported, match="sliding windows"):
        attached.store_chunk(name="x", input_ids=prompts(1, 8))
    with pytest.raises(Unsupported, match="sliding windows"):
        attached.generate(parts=[prompts(1, 8)[0]], **GREEDY)
    assert engine.contexts() == []


def test_layers_that_rotate_differently_are_not_moved(engine):
    model = build("gemma3_text", **{**KINDS["gemma3_text"], "layer_types": ["full_attention"] * 2})
    with attach(model, Client(engine)) as attached:
        assert dict(attached.spec.rope.scaling)["rope_kinds"] == ("full_attention", "full_attention")
        assert same(attached, model, prompts(1, 20), **GREEDY)
        with pytest.raises(Unsupported, match="several RoPEs"):
            attached.store_chunk(name="x", input_ids=prompts(1, 8))
