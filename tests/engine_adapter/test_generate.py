"""`engine.generate` takes and returns what `model.generate` does."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, MinNewTokensLengthLogitsProcessor
from transformers.generation.streamers import BaseStreamer

import kvdb
from engine_adapter.transformers import attach
from kvdb.errors import AlreadyExists, InvalidArgument, Unsupported
from tests.engine_adapter.tiny import build, left_padded, prompts

GREEDY = {"max_new_tokens": 12, "do_sample": False}


def same(attached, model, *given, seed=None, **options):
    """Both ways of asking, and whether the answers are equal."""
    answers = []
    for generate in (attached.generate, model.generate):
        if seed is not None:
            torch.manual_seed(seed)
        answers.append(generate(*given, **options))
    return torch.equal(*(answer if isinstance(answer, torch.Tensor) else answer.sequences for answer in answers))


def test_one_prompt(attached, model):
    assert same(attached, model, prompts(1, 37), **GREEDY)


def test_hints_go_along(attached, model):
    assert same_with_hints(attached, model, kvdb.Hints(rules_off=("short_context",)))
    assert attached.last.explain.rule != "short_context"
    with pytest.raises(InvalidArgument, match="expected one of exact_asked"):
        attached.generate(prompts(1, 37), hints=kvdb.Hints(rules_off=("none",)), **GREEDY)


def same_with_hints(attached, model, hints):
    given = prompts(1, 37)
    return torch.equal(attached.generate(given, hints=hints, **GREEDY), model.generate(given, **GREEDY))


def test_a_prompt_of_one_token(attached, model):
    assert same(attached, model, prompts(1, 1), **GREEDY)


def test_a_single_new_token(attached, model):
    assert same(attached, model, prompts(1, 37), max_new_tokens=1)


def test_inputs_by_the_name_transformers_gives_them(attached, model):
    ids = prompts(1, 9)
    assert torch.equal(attached.generate(inputs=ids, **GREEDY), model.generate(inputs=ids, **GREEDY))


def test_a_left_padded_batch(attached, model):
    ids, mask = left_padded(4, 20)
    assert same(attached, model, ids, attention_mask=mask, pad_token_id=0, **GREEDY)


def test_padding_is_inferred_as_transformers_does(attached, model):
    ids, _ = left_padded(3, 20)
    assert same(attached, model, ids, pad_token_id=0, eos_token_id=1, **GREEDY)
    assert attached.last.prefilled == (20, 17, 14)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"output_logits": True, "return_dict_in_generate": True}])
def test_padding_anywhere(attached, model, options):
    """Plain transformers takes it with a warning: what stands behind padding on the right is asked by the padding itself."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 0]])
    attached.store(name="known", input_ids=prompts(4, 6)[1, :4])
    assert same(attached, model, prompts(4, 6), attention_mask=mask, pad_token_id=0, **options, **GREEDY)
    assert attached.last.reused == (0, 4, 0, 0)
    assert same(attached, model, prompts(1, 6), attention_mask=mask[1:2], pad_token_id=0, **options, **GREEDY)
    assert attached.last.decode is None or attached.last.decode.attended_share == 1


def test_rows_with_padding_anywhere_are_kept_without_it(attached, model, names, db):
    ids, mask = prompts(3, 6), torch.tensor([[1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]])
    answer = attached.generate(ids, attention_mask=mask, pad_token_id=0, keep=["a", "b", "c"], **GREEDY)
    for name, row in (("a", 0), ("b", 1), ("c", 2)):
        kept = torch.cat([ids[row][mask[row] == 1], answer[row, 6:]])
        assert db.get(name).tokens == len(kept) - 1
        attached.generate(kept[None], **GREEDY)
        assert attached.last.reused == (len(kept) - 1,)


def test_nothing_given_begins_with_the_first_token_of_a_text(attached, model):
    assert same(attached, model, bos_token_id=5, **GREEDY)
    assert attached.last.prefilled == (1,)
    assert same(attached, model, bos_token_id=5, attention_mask=torch.ones(2, 1), **GREEDY)


@pytest.mark.parametrize("beams", [2, 5])
def test_beam_search(attached, model, beams):
    ids, mask = left_padded(3, 20)
    assert same(attached, model, ids, attention_mask=mask, pad_token_id=0, eos_token_id=7, num_beams=beams, **GREEDY)


def test_beam_search_that_returns_several(attached, model):
    assert same(attached, model, prompts(2, 20), num_beams=4, num_return_sequences=3, **GREEDY)


def test_beam_sampling_with_equal_seeds(attached, model):
    assert same(attached, model, prompts(2, 20), seed=3, num_beams=3, do_sample=True, max_new_tokens=12)


def test_sampling_with_equal_seeds(attached, model):
    assert same(attached, model, prompts(2, 20), seed=3, do_sample=True, temperature=0.8, top_p=0.9, max_new_tokens=20)


def test_several_samples_of_one_prompt(attached, model):
    assert same(attached, model, prompts(2, 20), seed=5, do_sample=True, num_return_sequences=3, max_new_tokens=12)


def test_rows_that_end_early(attached, model):
    ids = prompts(4, 20)
    third = model.generate(ids, **GREEDY)[1, 22].item()
    assert same(attached, model, ids, eos_token_id=third, pad_token_id=0, **GREEDY)


def test_a_generation_config(attached, model):
    assert same(attached, model, prompts(1, 20), generation_config=GenerationConfig(max_new_tokens=5, num_beams=2))


def test_logits_processors_and_stopping_criteria(attached, model):
    processors = LogitsProcessorList([MinNewTokensLengthLogitsProcessor(20, 8, 7)])
    ids = prompts(2, 20)
    stopping = [MaxLengthCriteria(max_length=30)]
    assert same(attached, model, ids, logits_processor=processors, stopping_criteria=stopping, max_new_tokens=40)
    assert attached.last.generated == 10


def test_guidance_runs_the_model_beside_the_database(attached, model):
    assert same(attached, model, prompts(1, 20), guidance_scale=1.5, **GREEDY)


def test_chunked_prefill_is_the_engines_own(attached, model):
    assert same(attached, model, prompts(1, 50), prefill_chunk_size=7, **GREEDY)


def test_a_streamer_sees_the_same_tokens(attached, model):
    class Collect(BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.seen.append("end")

    ours, theirs = Collect(), Collect()
    attached.generate(prompts(1, 20), streamer=ours, **GREEDY)
    model.generate(prompts(1, 20), streamer=theirs, **GREEDY)
    assert ours.seen == theirs.seen


def test_a_dictionary_with_scores_and_logits(attached, model):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2, **GREEDY}
    got, want = (generate(prompts(2, 20), **options) for generate in (attached.generate, model.generate))
    assert type(got) is type(want)
    assert got.keys() == want.keys()
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-4, rtol=0)


def test_what_is_stored_is_reused_also_within(attached, model):
    ids = prompts(1, 60)
    attached.store(name="document", input_ids=ids[0])
    for length in (60, 45, 20):
        assert same(attached, model, torch.cat([ids[:, :length], prompts(1, 5, seed=9)], 1), **GREEDY)
        assert (attached.last.reused, attached.last.prefilled) == ((length,), (5,))
    assert same(attached, model, ids, **GREEDY)
    assert attached.last.reused == (59,), "the last token is always computed, for its logits"


def test_each_row_reuses_what_is_stored_of_it(attached, model):
    ids, mask = left_padded(3, 30)
    attached.store(name="a", input_ids=ids[0, :10])
    attached.store(name="b", input_ids=ids[2, 6:26])
    assert same(attached, model, ids, attention_mask=mask, pad_token_id=0, **GREEDY)
    assert attached.last.reused == (10, 0, 20)


def test_store_reports_its_progress(attached):
    calls = []
    context = attached.store(name="document", input_ids=prompts(1, 40), progress=lambda *done: calls.append(done))
    assert (context.name, context.tokens) == ("document", 40)
    assert calls == [(0, 40), (16, 40), (32, 40), (40, 40)]
    calls.clear()
    attached.store(name="again", input_ids=prompts(1, 40)[0], progress=lambda *done: calls.append(done))
    assert calls == [(40, 40)]


def test_a_chat_goes_on_from_the_turn_before(attached, model):
    chat = prompts(1, 20)
    for turn in range(3):
        answer = attached.generate(chat, keep=f"turn {turn}", **GREEDY)
        assert torch.equal(answer, model.generate(chat, **GREEDY))
        assert attached.last.reused == (0 if turn == 0 else chat.shape[1] - 6,), "all but the question and one token"
        chat = torch.cat([answer, prompts(1, 5, seed=turn + 1)], dim=1)


def test_rows_that_ended_early_are_kept_without_their_filling(attached, model, names, db):
    ids, mask = left_padded(3, 20)
    plain = model.generate(ids, attention_mask=mask, pad_token_id=0, **GREEDY)
    ends = plain[1, 24].item()
    options = {"eos_token_id": ends, "pad_token_id": 0, **GREEDY}
    answer = attached.generate(ids, attention_mask=mask, keep=["a", "b", None], **options)
    assert names() == ["a", "b"]
    assert 0 < db.get("b").tokens <= 17 + 5
    for name, row, padding in (("a", 0, 0), ("b", 1, 3)):
        stored = db.get(name).tokens
        goes_on = torch.cat([answer[row : row + 1, padding : padding + stored], prompts(1, 4)], dim=1)
        assert same(attached, model, goes_on, **GREEDY)
        assert attached.last.reused == (stored,)


def test_every_sample_can_be_kept(attached, names):
    attached.generate(prompts(1, 8), do_sample=True, num_return_sequences=3, max_new_tokens=6, keep=["a", "b", "c"])
    assert names() == ["a", "b", "c"]


def test_names_to_keep_must_fit(attached, names):
    attached.store(name="taken", input_ids=prompts(1, 8))
    with pytest.raises(AlreadyExists, match="'taken'"):
        attached.generate(prompts(1, 8), keep="taken", **GREEDY)
    with pytest.raises(AlreadyExists, match="'taken'"):
        attached.store(name="taken", input_ids=prompts(1, 8))
    with pytest.raises(InvalidArgument, match="expected 2"):
        attached.generate(prompts(2, 8), keep="one", **GREEDY)
    with pytest.raises(InvalidArgument, match="one name to two"):
        attached.generate(prompts(2, 8), keep=["same", "same"], **GREEDY)
    with pytest.raises(Unsupported, match="beam search"):
        attached.generate(prompts(1, 8), keep="one", num_beams=2, **GREEDY)
    assert names() == ["taken"]


def test_sessions_can_be_looked_at_before_they_are_closed(attached):
    seen = []
    attached.generate(
        prompts(2, 30), inspect=lambda sessions: seen.extend((s.stats().tokens, s.explain(1)) for s in sessions), **GREEDY
    )
    assert [tokens for tokens, _ in seen] == [41, 41]
    assert attached.last.explain == seen[0][1]


def test_the_report(attached):
    attached.generate(prompts(2, 30), **GREEDY)
    report = attached.last
    assert (report.reused, report.prefilled, report.generated) == ((0, 0), (30, 30), 12)
    assert 0 < report.prefill_seconds < report.first_token_seconds < report.seconds
    attached.store(name="x", input_ids=prompts(1, 5))
    assert attached.last.first_token_seconds is None


def test_two_threads_at_once(attached, model):
    batches = [prompts(2, 30, seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda ids: attached.generate(ids, **GREEDY), batches))
    for ids, answer in zip(batches, answers, strict=True):
        assert torch.equal(answer, model.generate(ids, **GREEDY))


def test_lists_of_numbers(attached, model):
    ids, mask = left_padded(2, 9)
    answer = attached.generate(ids.tolist(), mask.tolist(), pad_token_id=0, **GREEDY)
    assert torch.equal(answer, model.generate(ids, attention_mask=mask, pad_token_id=0, **GREEDY))


def test_two_models_on_two_databases(engine):
    from kvdb.client.client import Client
    from kvdb.database import Database

    one, other, ids = build("llama"), build("qwen3"), prompts(1, 20)
    with Client(Database()) as second, attach(one, Client(engine)) as first_engine, attach(other, second) as second_engine:
        for attached, model in ((first_engine, one), (second_engine, other), (first_engine, one)):
            assert same(attached, model, ids, **GREEDY)


def test_two_models_on_one_database_share_nothing(db):
    ids = prompts(1, 20)
    with attach(build(seed=0), db) as one, attach(build(seed=1), db) as other:
        one.store(name="mine", input_ids=ids)
        other.generate(ids, **GREEDY)
        assert other.last.reused == (0,)
