"""Prompts laid out of chunks: what is recomputed, what comes out, and what is refused."""

import numpy as np
import pytest
import torch
import transformers

import kvdb
from benchmarks.blend_strategies import First, Random
from engine_adapter.transformers import attach
from kvdb.errors import AlreadyExists, IntegrityError, InvalidArgument, SpecMismatch, Unsupported
from tests.engine_adapter.tiny import build, prompts

SYSTEM, A, B, GAP, QUESTION = (prompts(1, n, seed)[0] for seed, n in enumerate((7, 50, 33, 5, 9)))
WHOLE = torch.cat([SYSTEM, A, GAP, B, A, QUESTION])
STRATEGIES = (None, First, Random)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "llama": {"kind": "llama", "num_hidden_layers": 4},
    "llama3": {"kind": "llama", "num_hidden_layers": 4, "rope_parameters": LLAMA3},
    "yarn": {"kind": "qwen2", "num_hidden_layers": 3, "rope_parameters": YARN},
    "qwen3": {"kind": "qwen3", "num_hidden_layers": 3},
    "mistral": {"kind": "mistral"},
}


@pytest.fixture(scope="module", params=MODELS, ids=list(MODELS))
def any_model(request):
    return build(**MODELS[request.param])


@pytest.fixture
def chunks(attached):
    """The parts of the prompt, from a model of two layers."""
    return parts_of(attached)


def parts_of(engine):
    a, b = engine.store_chunk(name="a", input_ids=A), engine.store_chunk(name="b", input_ids=B)
    return [SYSTEM, a, GAP, b, a, QUESTION]


def logits(engine, parts, recompute):
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    answer = engine.generate(parts=parts, recompute=recompute, **options)
    return answer.sequences[0], answer.logits[0][0]


@pytest.mark.parametrize("recompute", [1.0, kvdb.Recompute(1.0, strategy=First), kvdb.Recompute(1.0, steepness=1.0)])
def test_all_of_it_is_a_full_prefill(any_model, recompute):
    with torch.no_grad():
        right = any_model(WHOLE[None]).logits[0, -1]
    expected = any_model.generate(WHOLE[None], max_new_tokens=3, do_sample=False)[0]
    with kvdb.connect() as db, attach(any_model, db) as engine:
        sequence, given = logits(engine, parts_of(engine), recompute)
        assert torch.equal(sequence, expected)
        assert (given - right).abs().max() <= 1e-4 * right.abs().max().clamp(min=1)
        assert engine.last.blend.recomputed == len(A) + len(B) + len(A)


@pytest.mark.parametrize("recompute", [0.0, kvdb.Recompute(0.0, strategy=First)])
def test_nothing_of_it_is_the_moved_caches_behind_each_other(any_model, recompute):
    """Chunks of the prompt computed apart, at their places: keys of the place, nothing else."""
    with kvdb.connect() as db, attach(any_model, db) as engine:
        a, b = engine.store_chunk(name="a", input_ids=A), engine.store_chunk(name="b", input_ids=B)
        _, given = logits(engine, [a, b, a, QUESTION], recompute)
    cache = transformers.DynamicCache(config=any_model.config)
    begin, pieces = 0, []
    for chunk in (A, B, A):
        alone, end = transformers.DynamicCache(config=any_model.config), begin + len(chunk)
        with torch.no_grad():
            any_model(chunk[None], position_ids=torch.arange(begin, end)[None], past_key_values=alone)
        pieces.append(alone)
        begin = end
    for number in range(any_model.config.num_hidden_layers):
        cache.update(*(torch.cat([getattr(p.layers[number], n) for p in pieces], 2) for n in ("keys", "values")), number)
    with torch.no_grad():
        right = any_model(QUESTION[None], past_key_values=cache).logits[0, -1]
    assert (given - right).abs().max() <= 1e-4 * right.abs().max().clamp(min=1)


def test_on_both_transports(attached, model, chunks):
    expected = model.generate(WHOLE[None], max_new_tokens=3, do_sample=False)[0]
    sequence, _ = logits(attached, chunks, 1.0)
    assert torch.equal(sequence, expected)
    for strategy in STRATEGIES:
        logits(attached, chunks, kvdb.Recompute(0.3, strategy=strategy))
        blend = attached.last.blend
        assert blend.fresh == len(SYSTEM) + len(GAP)
        assert blend.reused + blend.recomputed == len(A) + len(B) + len(A)
        assert blend.ratio == 0.3
    assert attached.last.prefilled == (len(SYSTEM) + len(GAP) + len(QUESTION),)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ratio", [0.1, 0.15, 0.5])
def test_the_asked_share_is_recomputed(strategy, ratio):
    model = build(num_hidden_layers=9)
    with kvdb.connect() as db, attach(model, db) as engine:
        parts = parts_of(engine)
        engine.generate(parts=parts, recompute=kvdb.Recompute(ratio, steepness=0.5, strategy=strategy), max_new_tokens=1)
        assert engine.last.blend.recomputed == pytest.approx(ratio * (2 * len(A) + len(B)), abs=1)


@pytest.mark.parametrize("ratio", [0.01, 0.3])
def test_the_last_layer_may_take_nobody(ratio):
    model = build(num_hidden_layers=3)
    with kvdb.connect() as db, attach(model, db) as engine:
        a, b = engine.store_chunk(name="a", input_ids=A), engine.store_chunk(name="b", input_ids=B)
        engine.generate(parts=[a, b, QUESTION], recompute=kvdb.Recompute(ratio, steepness=1.0), max_new_tokens=1)
        assert engine.last.blend.recomputed == pytest.approx(ratio * len(B), abs=1)


def test_more_recompute_is_nearer_to_full_prefill():
    model = build(num_hidden_layers=4)
    with torch.no_grad():
        right = model(WHOLE[None]).logits[0, -1]
    with kvdb.connect() as db, attach(model, db) as engine:
        parts = parts_of(engine)
        errors = [float((logits(engine, parts, ratio)[1] - right).norm()) for ratio in (0.0, 0.5, 0.9, 1.0)]
    assert errors[0] > errors[2] > errors[3]
    assert errors[1] > errors[3]


def test_the_first_chunk_of_all_is_exact(attached, chunks):
    """Nothing stands before it, so nothing of it is recomputed."""
    _, a, _, b, _, question = chunks
    attached.generate(parts=[a, question], recompute=1.0, max_new_tokens=1)
    assert attached.last.blend.recomputed == 0
    attached.generate(parts=[a, b, question], recompute=1.0, max_new_tokens=1)
    assert attached.last.blend.recomputed == len(B)


def test_the_controller_recomputes_what_the_budget_asks_for(attached, model, chunks):
    shares, deviations = [], set()
    for error_max in (1.0, 0.3, 0.1, 0.03, 0.0):
        sequence, _ = logits(attached, chunks, kvdb.Recompute(error_max=error_max))
        blend = attached.last.blend
        shares.append(blend.ratio)
        deviations.add(blend.deviation)
        assert not blend.choice.by_caller
        assert blend.recomputed == pytest.approx(blend.ratio * (2 * len(A) + len(B)), abs=1)
        assert f"recompute {blend.ratio:.1%}" in str(attached.last.explain)
    assert shares == sorted(shares)
    assert shares[0] < shares[2] < shares[-1] == 1
    assert len(deviations) == 1
    assert torch.equal(sequence, model.generate(WHOLE[None], max_new_tokens=3, do_sample=False)[0])


def test_the_controller_recomputes_nothing_of_chunks_that_do_not_interact():
    """Without attention a token's KV depends on the token alone, wherever it stands."""
    model = build(num_hidden_layers=4)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    with kvdb.connect() as db, attach(model, db) as engine:
        sequence, _ = logits(engine, parts_of(engine), None)
        blend = engine.last.blend
        assert blend.deviation < 1e-5
        assert (blend.ratio, blend.recomputed) == (0, 0)
    assert torch.equal(sequence, model.generate(WHOLE[None], max_new_tokens=3, do_sample=False)[0])


def test_a_floor_and_a_strategy_of_ones_own_beside_the_controller(attached, chunks):
    logits(attached, chunks, kvdb.Recompute(error_max=1.0, floor=0.4))
    assert attached.last.blend.ratio == 0.4
    logits(attached, chunks, kvdb.Recompute(floor=0.2, strategy=First))
    assert attached.last.blend.ratio == 0.2
    assert attached.last.blend.recomputed == pytest.approx(0.2 * (2 * len(A) + len(B)), abs=1)


def test_a_chunk_right_behind_what_it_was_computed_behind_is_exact(attached, model):
    attached.store(name="system", input_ids=SYSTEM)
    a = attached.store_chunk(name="a", input_ids=A, behind=SYSTEM)
    assert attached._db.get("a").tokens == len(A)
    with torch.no_grad():
        right = model(torch.cat([SYSTEM, A, QUESTION])[None]).logits[0, -1]
    _, given = logits(attached, [SYSTEM, a, QUESTION], 0.0)
    assert attached.last.blend.reused == len(SYSTEM) + len(A)
    assert (given - right).abs().max() <= 1e-4 * right.abs().max().clamp(min=1)


def test_a_chunk_that_read_other_tokens_is_no_prefix(attached, model):
    """At the beginning, where what it was computed behind is not, it is recomputed like any other."""
    attached.store(name="system", input_ids=SYSTEM)
    a = attached.store_chunk(name="a", input_ids=A, behind=SYSTEM)
    with torch.no_grad():
        right = model(torch.cat([A, QUESTION])[None]).logits[0, -1]
    _, given = logits(attached, [a, QUESTION], 1.0)
    assert attached.last.blend.recomputed == len(A)
    assert (given - right).abs().max() <= 1e-4 * right.abs().max().clamp(min=1)
    with attached._db.create_session(attached.spec, A) as session:
        assert session.start == 0


def test_chunks_behind_what_is_not_stored_are_refused(attached):
    for stored, known in (([], 0), (SYSTEM[:4], 4)):
        if known:
            attached.store(name="part", input_ids=stored)
        with pytest.raises(InvalidArgument, match=f"of the 7 tokens of behind= {known} are stored; store all of them first"):
            attached.store_chunk(name="a", input_ids=A, behind=SYSTEM)
    assert not any(context.name == "a" for context in attached._db.contexts())


def test_what_was_blended_goes_on_as_a_prefix(attached, model, chunks):
    first = attached.generate(parts=chunks, recompute=1.0, max_new_tokens=4, do_sample=False, keep="chat")
    more = prompts(1, 6, seed=9)[0]
    known = attached._db.get("chat")
    assert known.info.blended
    assert known.tokens == first.shape[1] - 1
    turn = torch.cat([first[0, -1:], more])
    answer = attached.generate(parts=[known, turn], recompute=0.0, max_new_tokens=4, do_sample=False)
    whole = torch.cat([first[0], more])
    assert torch.equal(answer[0], model.generate(whole[None], max_new_tokens=4, do_sample=False)[0])
    assert attached.last.blend.recomputed == 0
    assert attached.last.blend.fresh == 0


def test_a_text_is_computed_once(attached, names):
    steps = []
    attached.store_chunk(name="one", input_ids=A, progress=lambda done, total: steps.append(done))
    assert steps[0] == 0
    steps.clear()
    again = attached.store_chunk(name="two", input_ids=A, progress=lambda done, total: steps.append(done))
    assert steps == [len(A)]
    assert again.info.chunk
    assert names() == ["one", "two"]


def test_beams_and_several_answers(attached, model, chunks):
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    expected = model.generate(WHOLE[None], **options)
    assert torch.equal(attached.generate(parts=chunks, recompute=1.0, **options), expected)


def test_wrong_calls(attached, chunks, names):
    before = names()
    a = chunks[1]
    for recompute in (-0.1, 1.1, float("nan"), True, "much"):
        with pytest.raises(InvalidArgument, match="ratio"):
            attached.generate(parts=chunks, recompute=recompute, max_new_tokens=1)
    with pytest.raises(InvalidArgument, match="last part"):
        attached.generate(parts=[QUESTION, a], max_new_tokens=1)
    with pytest.raises(InvalidArgument, match="one of the two"):
        attached.generate(WHOLE[None], parts=chunks, max_new_tokens=1)
    with pytest.raises(InvalidArgument, match="without parts"):
        attached.generate(WHOLE[None], recompute=0.5, max_new_tokens=1)
    with pytest.raises(AlreadyExists):
        attached.store_chunk(name="a", input_ids=B)
    with pytest.raises(AlreadyExists):
        attached.generate(parts=chunks, keep="a", max_new_tokens=1)
    assert names() == before


def test_chunks_of_another_model_or_text(attached, chunks):
    other = build(seed=5)
    spec = attached.spec
    with attach(other, attached._db) as engine, pytest.raises(SpecMismatch):
        engine.generate(parts=chunks, max_new_tokens=1)
    shape = spec.layers, 2, spec.kv_heads, len(A), spec.head_dim
    noise = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    fake = attached._db.import_chunk(spec, prompts(1, len(A), seed=77)[0], [tuple(kv) for kv in noise], name="noise")
    with pytest.raises(IntegrityError, match="first layer"):
        attached.generate(parts=[chunks[3], fake, QUESTION], recompute=0.5, max_new_tokens=1)


def test_a_model_without_rope_has_no_chunks(db):
    config = transformers.GPT2Config(
        vocab_size=101, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None, n_positions=256
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    try:
        engine = attach(model, db)
        with engine as attached, pytest.raises(Unsupported, match="rotate"):
            attached.store_chunk(name="a", input_ids=A)
    except Unsupported:
        return  # kvdb does not serve it at all


def test_the_model_is_left_as_it_was(attached, model, chunks):
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    attached.generate(parts=chunks, recompute=0.3, max_new_tokens=1)
    spec = attached.spec
    zeros = np.zeros((spec.kv_heads, 8, spec.head_dim), np.float32)
    fake = attached._db.import_chunk(spec, prompts(1, 8, seed=78)[0], [(zeros, zeros)] * spec.layers, name="zeros")
    with pytest.raises(IntegrityError):
        attached.generate(parts=[chunks[1], fake, QUESTION], recompute=0.5, max_new_tokens=1)
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_a_model_whose_frequencies_were_rounded_is_moved_as_it_turns():
    """`model.to(bfloat16)` rounds the frequencies too, which the parameters do not tell."""
    model = build(num_hidden_layers=3, head_dim=16).to(torch.bfloat16)
    far = prompts(1, 700, seed=11)[0]
    with kvdb.connect() as db, attach(model, db) as engine:
        assert "inv_freq" in dict(engine.spec.rope.scaling)
        long, a = engine.store_chunk(name="long", input_ids=far), engine.store_chunk(name="a", input_ids=A)
        _, given = logits(engine, [long, a, QUESTION], 1.0)
        with torch.no_grad():
            right = model(torch.cat([far, A, QUESTION])[None]).logits[0, -1]
        assert (given.float() - right.float()).norm() <= 0.05 * right.float().norm()
    assert kvdb.ModelSpec.from_dict(engine.spec.to_dict()) == engine.spec
    loaded = build(num_hidden_layers=3)
    with kvdb.connect() as db, attach(loaded, db) as engine:
        assert "inv_freq" not in dict(engine.spec.rope.scaling)


def test_the_first_layer_is_right_wherever_a_chunk_stands(any_model):
    """Its keys and values depend on the token alone; those of the layers behind do not."""
    whole = torch.cat([A, B, A])
    fresh = transformers.DynamicCache(config=any_model.config)
    with torch.no_grad():
        any_model(whole[None], past_key_values=fresh)
    with kvdb.connect() as db, attach(any_model, db) as engine:
        a, b = engine.store_chunk(name="a", input_ids=A), engine.store_chunk(name="b", input_ids=B)
        with db.create_session(engine.spec, parts=[a, b, a, QUESTION]) as session:
            everywhere = torch.arange(len(whole))
            kv = [(layer.keys[0], layer.values[0]) for layer in fresh.layers]
            deviations = [session.deviation(n, everywhere, k, v, score="relative") for n, (k, v) in enumerate(kv)]
    assert deviations[0].max() < 1e-4
    assert deviations[1][: len(A)].max() < 1e-4
    assert deviations[1][len(A) :].max() > 0.1
