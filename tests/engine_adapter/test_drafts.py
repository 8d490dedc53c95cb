"""Drafts of several tokens are checked at once, and rejected ones are taken back from the session."""

import pytest
import torch

from kvdb.errors import Unsupported
from tests.engine_adapter.tiny import build, left_padded, prompts

GREEDY = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(scope="module")
def repeating():
    """A prompt that says the same again and again, so that some drafts from it are taken and some are not."""
    return prompts(1, 9, seed=3).repeat(1, 4)


def test_drafts_from_the_prompt(attached, model, repeating):
    want = model.generate(repeating, **GREEDY)
    for tokens in (1, 10):
        assert torch.equal(attached.generate(repeating, prompt_lookup_num_tokens=tokens, **GREEDY), want)
    assert attached.last.decode is None, "a step answers several tokens, and some of them are taken back"


@pytest.mark.parametrize("seed", [0, 1])
def test_an_assistant(attached, model, seed):
    """The same weights draft what the model says, others what it does not."""
    assistant = build(seed=seed)
    assert torch.equal(
        attached.generate(prompts(1, 21), assistant_model=assistant, **GREEDY), model.generate(prompts(1, 21), **GREEDY)
    )


def test_an_assistant_with_equal_seeds(attached, model):
    options = {"assistant_model": build(seed=1), "do_sample": True, "max_new_tokens": 20}
    answers = []
    for generate in (attached.generate, model.generate):
        torch.manual_seed(7)
        answers.append(generate(prompts(1, 21), **options))
    assert torch.equal(*answers)


def test_what_was_drafted_and_rejected_is_not_kept(attached, model, repeating):
    ends = model.generate(repeating, **GREEDY)[0, 45].item()
    options = {"prompt_lookup_num_tokens": 5, "eos_token_id": ends, "pad_token_id": 0, **GREEDY}
    answer = attached.generate(repeating, keep="turn", **options)
    assert torch.equal(answer, model.generate(repeating, **options))
    goes_on = torch.cat([answer, prompts(1, 4)], dim=1)
    assert torch.equal(attached.generate(goes_on, **GREEDY), model.generate(goes_on, **GREEDY))
    assert attached.last.reused == (answer.shape[1] - 1,)


def test_left_padding(attached, model):
    ids, mask = (rows[1:] for rows in left_padded(2, 20))
    options = {"attention_mask": mask, "pad_token_id": 0, **GREEDY}
    got = attached.generate(ids, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(got, model.generate(ids, **options))


def test_two_prompts_are_refused_before_anything_is_computed(attached, names):
    with pytest.raises(Unsupported, match="one prompt at a time"):
        attached.generate(prompts(2, 20), prompt_lookup_num_tokens=3, keep=["a", "b"], **GREEDY)
    assert names() == []
