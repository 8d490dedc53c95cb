"""A cache of the engine's goes on over several calls of generate."""

import pytest
import torch
from transformers import DynamicCache

from engine_adapter.transformers import attach
from kvdb.errors import InvalidArgument, NonFiniteError, SessionClosed, Unsupported
from tests.engine_adapter.tiny import build, left_padded, prompts

GREEDY = {"max_new_tokens": 6, "do_sample": False}


def test_a_chat_goes_on(attached, model):
    chat, theirs = prompts(1, 20), DynamicCache(config=model.config)
    with attached.open_cache() as cache:
        for turn in range(4):
            answer = attached.generate(chat, past_key_values=cache, **GREEDY)
            assert torch.equal(answer, model.generate(chat, past_key_values=theirs, **GREEDY))
            assert cache.get_seq_length() == theirs.get_seq_length() == answer.shape[1] - 1
            assert attached.last.reused == (0 if turn == 0 else chat.shape[1] - 6,)
            chat = torch.cat([answer, prompts(1, 5, seed=turn + 1)], dim=1)
    with pytest.raises(SessionClosed):
        attached.generate(chat, past_key_values=cache, **GREEDY)


@pytest.mark.parametrize("shared", [0, 1, 19, 20, 25])
def test_another_prompt_is_computed_from_where_it_differs(attached, model, shared):
    """Plain transformers would answer from what its cache holds, whatever the prompt says."""
    with attached.open_cache() as cache:
        answer = attached.generate(prompts(1, 20), past_key_values=cache, **GREEDY)
        other = torch.cat([answer[:, :shared], (prompts(1, 9, seed=5) + answer[0, shared]) % 101], dim=1)
        other[0, shared] = (answer[0, shared] + 1) % 101
        assert torch.equal(attached.generate(other, past_key_values=cache, **GREEDY), model.generate(other, **GREEDY))
        assert attached.last.reused == (shared,)


def test_a_prompt_within_what_is_held(attached, model):
    with attached.open_cache() as cache:
        attached.generate(prompts(1, 40), past_key_values=cache, **GREEDY)
        shorter = prompts(1, 40)[:, :11]
        assert torch.equal(attached.generate(shorter, past_key_values=cache, **GREEDY), model.generate(shorter, **GREEDY))
        assert attached.last.reused == (10,)


def test_the_first_call_stands_on_what_is_stored(attached):
    attached.store(name="document", input_ids=prompts(1, 20))
    with attached.open_cache() as cache:
        attached.generate(torch.cat([prompts(1, 20), prompts(1, 3, seed=8)], 1), past_key_values=cache, **GREEDY)
        assert attached.last.reused == (20,)


def test_a_batch_whose_rows_differ_and_end_apart(attached, model):
    ids, mask = left_padded(3, 20)
    ends = {"eos_token_id": model.generate(ids, attention_mask=mask, pad_token_id=0, **GREEDY)[1, 22].item(), "pad_token_id": 0}
    with attached.open_cache() as cache:
        answer = attached.generate(ids, attention_mask=mask, past_key_values=cache, **ends, **GREEDY)
        real = torch.cat([mask, (answer[:, 20:] != 0).long()], 1)
        goes_on, mask = torch.cat([answer, prompts(3, 4, seed=4)], 1), torch.cat([real, torch.ones(3, 4, dtype=torch.long)], 1)
        got = attached.generate(goes_on, attention_mask=mask, past_key_values=cache, **ends, **GREEDY)
        assert torch.equal(got, model.generate(goes_on, attention_mask=mask, **ends, **GREEDY))
        assert attached.last.reused == (25, 20, 19), "the second row ended after three tokens"


def test_columns_are_taken_back(attached, model):
    with attached.open_cache() as cache:
        answer = attached.generate(prompts(1, 20), past_key_values=cache, **GREEDY)
        cache.crop(-8)
        assert cache.get_seq_length() == 17
        assert torch.equal(attached.generate(answer, past_key_values=cache, **GREEDY), model.generate(answer, **GREEDY))
        assert attached.last.reused == (17,)


def test_a_loop_of_ones_own(attached, model):
    ids, want = prompts(1, 20), model.generate(prompts(1, 20), **GREEDY)
    with attached.open_cache() as cache, torch.no_grad():
        ids = attached.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
        for _ in range(5):
            logits = model(ids[:, -1:], past_key_values=cache).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(ids, want)
        again = attached.generate(ids, past_key_values=cache, **GREEDY)
        assert torch.equal(again, model.generate(ids, **GREEDY))
        assert attached.last.reused == (20,), "the cache does not know which tokens the loop appended"


def test_drafts_and_names(attached, model, names):
    ids = prompts(1, 9, seed=3).repeat(1, 4)
    with attached.open_cache() as cache:
        for turn in ("one", "two"):
            answer = attached.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, keep=turn, **GREEDY)
            assert torch.equal(answer, model.generate(ids, **GREEDY))
            ids = torch.cat([answer, ids[:, :9]], dim=1)
    assert names() == ["one", "two"]


def test_a_call_that_fails_leaves_a_cache_to_go_on_with(db):
    model = build()
    weight = model.model.layers[1].self_attn.k_proj.weight
    with attach(model, db) as engine, engine.open_cache() as cache, torch.no_grad():
        for length in (20, 30):
            good = weight[0, 0].item()
            weight[0, 0] = float("nan")
            with pytest.raises(NonFiniteError):
                engine.generate(prompts(1, length), past_key_values=cache, **GREEDY)
            weight[0, 0] = good
            got = engine.generate(prompts(1, length), past_key_values=cache, **GREEDY)
            assert torch.equal(got, model.generate(prompts(1, length), **GREEDY))


def test_what_does_not_go_together(attached, db):
    with attached.open_cache() as cache:
        attached.generate(prompts(2, 8), past_key_values=cache, **GREEDY)
        with pytest.raises(InvalidArgument, match="holds 2 rows, the prompt has 1"):
            attached.generate(prompts(1, 8), past_key_values=cache, **GREEDY)
        with pytest.raises(Unsupported, match="several answers"):
            attached.generate(prompts(2, 8), past_key_values=cache, num_beams=2, **GREEDY)
        with pytest.raises(Unsupported, match="parts="):
            attached.generate(parts=[prompts(1, 8)[0]], past_key_values=cache, **GREEDY)
        with attach(build(seed=1), db) as other, pytest.raises(InvalidArgument, match="another model or database"):
            other.generate(prompts(2, 8), past_key_values=cache, **GREEDY)
