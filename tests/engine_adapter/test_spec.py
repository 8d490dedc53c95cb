"""The spec of a model says what its KV cache means, and nothing else."""

import pytest
import torch
import transformers

import kvdb
from engine_adapter.transformers import spec_of
from tests.engine_adapter.tiny import build


def test_it_names_the_shape():
    spec = spec_of(build("qwen3"))
    assert (spec.name, spec.layers, spec.q_heads, spec.kv_heads, spec.head_dim) == ("qwen3", 2, 4, 2, 24)
    assert (spec.dtype, spec.scale, spec.rope) == ("float32", None, kvdb.Rope(theta=10000.0))


def test_it_names_the_dtype():
    assert spec_of(build().to(torch.bfloat16)).dtype == "bfloat16"


def test_it_names_the_rotation():
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 32}
    rope = spec_of(build(rope_parameters=yarn)).rope
    assert (rope.theta, rope.layout) == (5e5, "half")
    assert dict(rope.scaling) == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("config", "fields", "rope"),
    [
        (transformers.GlmConfig, {"head_dim": 16}, kvdb.Rope(theta=1e4, rotary_dims=8, layout="interleaved")),
        (transformers.PhiConfig, {}, kvdb.Rope(theta=1e4, rotary_dims=8, layout="half")),
        (transformers.CohereConfig, {}, kvdb.Rope(theta=5e5, layout="interleaved")),
    ],
)
def test_it_knows_which_dimensions_are_paired(config, fields, rope):
    shape = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.AutoModelForCausalLM.from_config(config(**shape, num_key_value_heads=2, pad_token_id=None, **fields))
    assert spec_of(model).rope == rope


def test_it_names_a_scale_of_the_models_own():
    shape = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.GraniteConfig(**shape, attention_multiplier=0.1)
    assert spec_of(transformers.GraniteForCausalLM(config)).scale == 0.1


def test_equal_weights_have_equal_fingerprints(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert spec_of(loaded) == spec_of(model) == spec_of(build())


def test_other_weights_have_other_fingerprints():
    model = build()
    before = spec_of(model).fingerprint
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    assert before != spec_of(model).fingerprint != spec_of(build(seed=1)).fingerprint


def test_other_settings_have_other_fingerprints():
    assert spec_of(build(rms_norm_eps=1e-5)).fingerprint != spec_of(build(rms_norm_eps=1e-6)).fingerprint


def test_the_head_does_not_count():
    model = build()
    before = spec_of(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert spec_of(model) == before
