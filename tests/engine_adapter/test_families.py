"""Every family of today's models: what `engine.generate` answers over kvdb is what the model's own generate answers."""

from functools import cache

import pytest
import torch

import kvdb
from engine_adapter.transformers import attach
from engine_adapter.transformers.own.kept_model import KeptModel
from kvdb.errors import IntegrityError, InvalidArgument
from tests.engine_adapter.families import FAMILIES, build, family
from tests.engine_adapter.tiny import left_padded, prompts

GREEDY = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
PIECES = {"piece_tokens": 12, "state_tokens": 12}
TOKENS = 45
STORED = 40


@cache
def plain(name, beams=1):
    return family(name).generate(prompts(1, TOKENS), num_beams=beams, **GREEDY)


@cache
def plain_batch(name):
    ids, mask = left_padded(3, TOKENS)
    return family(name).generate(ids, attention_mask=mask, **GREEDY)


def check(got, want):
    assert torch.equal(got.sequences, want.sequences)
    for one, other in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.fixture(params=FAMILIES)
def name(request):
    return request.param


@pytest.fixture
def attached(name, db):
    with attach(family(name), db, **PIECES) as engine:
        yield engine


def reused_of(attached, tokens):
    """How many of the first tokens of what is stored can be gone on from: all, or those before the last state."""
    has_states = any(isinstance(group.description, kvdb.State) for group in attached.spec.groups)
    return tokens // PIECES["state_tokens"] * PIECES["state_tokens"] if has_states else tokens


def test_nothing_is_stored(name, attached):
    check(attached.generate(prompts(1, TOKENS), **GREEDY), plain(name))
    assert attached.last.reused == (0,)


def test_a_whole_prefix_is_stored(name, attached):
    attached.store(name="document", input_ids=prompts(1, TOKENS)[:, :STORED])
    check(attached.generate(prompts(1, TOKENS), **GREEDY), plain(name))
    assert attached.last.reused == (STORED,)


def test_a_prefix_ends_inside_of_what_is_stored(name, attached):
    other = torch.cat([prompts(1, TOKENS)[:, :30], prompts(1, 20, seed=7)], 1)
    attached.store(name="document", input_ids=other)
    check(attached.generate(prompts(1, TOKENS), **GREEDY), plain(name))
    assert attached.last.reused[0] >= reused_of(attached, 30)


def test_a_restart(name, tmp_path):
    """What is stored is found by another process: in another database over the same folder."""
    folder = str(tmp_path / "store")
    with kvdb.connect(folder) as db, attach(family(name), db, **PIECES) as engine:
        engine.store(name="document", input_ids=prompts(1, TOKENS)[:, :STORED])
    with kvdb.connect(folder) as db, attach(family(name), db, **PIECES) as engine:
        check(engine.generate(prompts(1, TOKENS), **GREEDY), plain(name))
        assert engine.last.reused == (STORED,)


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v32", "deepseek_v4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_handed_back_is_what_was_stored_bit_by_bit(name, dtype, db):
    model, ids = build(name).to(dtype), prompts(1, STORED)
    with attach(model, db, **PIECES) as engine:
        engine.store(name="document", input_ids=ids)
        handed = engine.export_cache("document")
    kept = KeptModel(model)
    own = kept.fresh()
    for begin in range(0, STORED, PIECES["piece_tokens"]):
        kept.decode(ids[0, begin : min(begin + PIECES["piece_tokens"], STORED)], own)
    for parts, others in zip(kept.taken(handed, 0), kept.taken(own, 0), strict=True):
        for part, other in zip(parts, others, strict=True):
            for one, two in zip(*(item.values() if isinstance(item, dict) else item for item in (part, other)), strict=True):
                assert one is two is None or torch.equal(one, two)


def test_a_batch_with_padding(name, attached):
    ids, mask = left_padded(3, TOKENS)
    attached.store(name="document", input_ids=ids[1, 3:STORED])
    check(attached.generate(ids, attention_mask=mask, **GREEDY), plain_batch(name))


def test_beams(name, attached):
    attached.store(name="document", input_ids=prompts(1, TOKENS)[:, :STORED])
    got = attached.generate(prompts(1, TOKENS), num_beams=3, **GREEDY)
    assert torch.equal(got.sequences, plain(name, 3).sequences)
    assert attached.last.reused == (STORED,)


def next_turn(name):
    """The ids of a second turn, and the answer of transformers' own cache, which went on from the first."""
    first = family(name).generate(prompts(1, TOKENS), **GREEDY)
    ids = torch.cat([first.sequences, prompts(1, 6, seed=3)], 1)
    return ids, family(name).generate(ids, past_key_values=first.past_key_values, **GREEDY)


def test_an_answer_is_kept_and_gone_on_with(name, attached):
    ids, want = next_turn(name)
    answer = attached.generate(prompts(1, TOKENS), keep="turn", **GREEDY).sequences
    got = attached.generate(ids, **GREEDY)
    assert attached.last.reused == (answer.shape[1] - 1,)
    check(got, want)


def test_a_chat_goes_on_in_an_open_cache(name, attached):
    ids, want = next_turn(name)
    with attached.open_cache() as cache:
        answer = attached.generate(prompts(1, TOKENS), past_key_values=cache, **GREEDY).sequences
        got = attached.generate(ids, past_key_values=cache, **GREEDY)
        assert attached.last.reused == (answer.shape[1] - 1,)
        check(got, want)
        check(attached.generate(prompts(1, TOKENS), past_key_values=cache, **GREEDY), plain(name))
        if cache.get_seq_length():
            copy = attached.export_cache(cache)
            assert copy.get_seq_length() == cache.get_seq_length()


def test_a_context_is_exported_and_a_cache_imported(name, attached):
    model, ids = family(name), prompts(1, TOKENS)
    attached.store(name="document", input_ids=ids[:, :STORED])
    cache = attached.export_cache("document")
    check(model.generate(ids, past_key_values=cache, **GREEDY), plain(name))
    first = model.generate(ids, **GREEDY)
    attached.import_cache(first.past_key_values, name="imported", input_ids=first.sequences[:, :-1])
    longer, want = next_turn(name)
    check(attached.generate(longer, **GREEDY), want)
    assert attached.last.reused == (first.sequences.shape[1] - 1,)


SOME = ["gpt_oss", "mistral_large4", "deepseek_v4", "qwen3_next", "inkling2"]
"""One of each kind of layers: windows, latents with indexers, streams, states, and both."""


@pytest.mark.parametrize("name", SOME)
def test_the_rows_of_a_batch_are_kept_and_gone_on_with(name, attached):
    """Each row is a context of its own, whatever stands before it, and however early it ended."""
    model, (ids, mask) = family(name), left_padded(3, TOKENS)
    ends = {**GREEDY, "eos_token_id": int(plain_batch(name).sequences[1, TOKENS + 2])}
    names = ["first", "second", None]
    got = attached.generate(ids, attention_mask=mask, keep=names, **ends).sequences
    assert torch.equal(got, model.generate(ids, attention_mask=mask, **ends).sequences)
    for i, kept in enumerate(names[:2]):
        end = next((n + 1 for n in range(TOKENS, got.shape[1] - 1) if got[i, n] == ends["eos_token_id"]), got.shape[1] - 1)
        tokens = got[i : i + 1, 3 * i : end]
        ids_of_turn = torch.cat([tokens, prompts(1, 6, seed=3)], 1)
        want = model.generate(ids_of_turn, **GREEDY)
        assert torch.equal(attached.generate(ids_of_turn, **GREEDY).sequences, want.sequences)
        assert attached.last.reused == (tokens.shape[1],), kept


@pytest.mark.parametrize("name", SOME)
def test_several_answers_to_one_prompt(name, attached):
    attached.store(name="document", input_ids=prompts(1, TOKENS)[:, :STORED])
    options = {**GREEDY, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(1)
    got = attached.generate(prompts(1, TOKENS), keep=["a", None, "c"], **options)
    torch.manual_seed(1)
    assert torch.equal(got.sequences, family(name).generate(prompts(1, TOKENS), **options).sequences)
    ids = torch.cat([got.sequences[2:], prompts(1, 6, seed=3)], 1)
    attached.generate(ids, max_new_tokens=2, do_sample=False)  # without a pad token, which an answer may hold
    assert attached.last.reused == (ids.shape[1] - 7,)


@pytest.mark.parametrize("name", SOME)
def test_a_text_of_one_token_and_one_of_two(name, attached):
    for length in (1, 2, 3):
        check(attached.generate(prompts(1, length), **GREEDY), family(name).generate(prompts(1, length), **GREEDY))
    ids, mask = left_padded(3, 7)
    got = attached.generate(ids, attention_mask=mask, **GREEDY)
    check(got, family(name).generate(ids, attention_mask=mask, **GREEDY))


@pytest.mark.parametrize("name", SOME)
def test_what_a_cache_brings_is_gone_on_with_at_its_end_alone(name, attached):
    """States are those behind the last token, and windows have let go of what is before: no beginning of it counts as a hit."""
    model = family(name)
    first = model.generate(prompts(1, TOKENS), **GREEDY)
    held = first.sequences[:, :-1]
    attached.import_cache(first.past_key_values, name="imported", input_ids=held)
    ids = torch.cat([held[:, :30], prompts(1, 6, seed=3)], 1)
    check(attached.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
    bounded = any(not isinstance(layer, kvdb.Attention) or layer.window for layer in attached.spec.all_layers)
    assert attached.last.reused == (0 if bounded and name != "mistral_large4" else 30,)


@pytest.mark.parametrize("name", SOME)
def test_a_cache_of_another_text_is_refused(name, attached, names):
    first = family(name).generate(prompts(1, TOKENS), **GREEDY)
    with pytest.raises(IntegrityError, match="are not what the model computes"):
        attached.import_cache(first.past_key_values, name="x", input_ids=(first.sequences[:, :-1] + 1) % 101)
    with pytest.raises(InvalidArgument, match="holds 52 tokens, input_ids are 51"):
        attached.import_cache(first.past_key_values, name="x", input_ids=first.sequences[:, :-2])
    assert names() == []
