"""What kvdb cannot do is refused by a typed error that names it, and the database stays as it was."""

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvdb
from engine_adapter.transformers import attach
from kvdb.config import ServerConfig
from kvdb.errors import DtypeError, InvalidArgument, NonFiniteError, ShapeError, Unavailable, Unsupported
from kvdb.server.serve import Server
from tests.engine_adapter.tiny import build, prompts

SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
    "hidden_size_per_layer_input": 16,
}
LATENT = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16}


@pytest.mark.parametrize(
    ("config", "fields", "named"),
    [
        (transformers.Llama4TextConfig, {"num_local_experts": 2}, "layer 0 .* chunked_attention"),
        (transformers.Gemma3TextConfig, {"head_dim": 16, "use_bidirectional_attention": True}, "attends to later tokens"),
        (transformers.Gemma2Config, {"head_dim": 16, "layer_types": ["full_attention"] * 2}, "soft cap .*50"),
        (
            transformers.GptOssConfig,
            {"num_local_experts": 2, "layer_types": ["full_attention"] * 2},
            "layer 0 .* attention sinks",
        ),
        (transformers.DeepseekV3Config, LATENT, "multi-head latent attention"),
        (transformers.MambaConfig, {}, "layer 0 .*LinearAttentionLayer"),
        (transformers.BloomConfig, {}, "AttentionInterface"),
        (transformers.LlamaConfig, {"head_dim": 12}, "head_dim 12"),
        (transformers.LlamaConfig, {"rope_parameters": DYNAMIC}, "RoPE of type 'dynamic'"),
        (transformers.Gemma4TextConfig, GEMMA4, "layer 1 .* has head_dim 64, layer 0 has 32"),
        (transformers.DiffLlamaConfig, {"head_dim": 16}, "layer 0 .*attention more than once"),
        (
            transformers.ModernBertDecoderConfig,
            {"local_attention": 64, "pad_token_id": 0},
            "ModernBertDecoder.* no attention layers .*Linear",
        ),
        (transformers.OPTConfig, {"ffn_dim": 32, "word_embed_proj_dim": 64}, "layer 0 scales its scores by 1.0"),
        (transformers.DogeConfig, {}, "layer 0 has a mask of its own"),
        (transformers.JetMoeConfig, {"kv_channels": 16, "num_local_experts": 4}, "layer 0 .* hand the keys"),
        (transformers.BertConfig, {"is_decoder": True, "add_cross_attention": True}, "cross attention"),
    ],
)
def test_models(config, fields, named, db):
    model = transformers.AutoModelForCausalLM.from_config(config(**{**SMALL, **fields})).eval()
    with pytest.raises(Unsupported, match=named), attach(model, db):
        pass
    assert model.config._attn_implementation != "kvdb"


def test_encoder_decoders(db):
    config = transformers.BartConfig(vocab_size=101, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32)
    with pytest.raises(Unsupported, match="cross attention"), attach(transformers.BartForConditionalGeneration(config), db):
        pass


def test_models_without_a_head(db, model):
    with pytest.raises(Unsupported, match="cannot generate"), attach(model.model, db):
        pass


def test_double_precision(db):
    with pytest.raises(Unsupported, match="float64"), attach(build().double(), db):
        pass


def test_dropout_in_training(db):
    model = build(attention_dropout=0.1).train()
    with attach(model, db) as engine, pytest.raises(Unsupported, match="training mode with dropout"):
        engine.generate(prompts(1, 8), max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"assistant_early_exit": 1}, "assistant_early_exit=1; its drafts"),
        ({"prompt_lookup_num_tokens": 3, "num_return_sequences": 2, "do_sample": True}, "drafts .* several rows"),
        (
            {"prompt_lookup_num_tokens": 3, "attention_mask": (torch.arange(8) < 6).long()[None]},
            "drafts .* ends in padding",
        ),
        ({"penalty_alpha": 0.5, "top_k": 4}, "contrastive_search"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"past_key_values": DynamicCache()}, "past_key_values="),
        ({"inputs_embeds": torch.zeros(1, 8, 64)}, "inputs_embeds="),
        ({"position_ids": torch.arange(8)[None]}, "position_ids="),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"output_hidden_states": True}, "output_hidden_states=True"),
        ({"token_healing": True}, "token_healing=True"),
        ({"max_tokens": 4}, r"max_tokens=.* did you mean max_new_tokens=\?"),
        ({"retreival": kvdb.Exact()}, r"retreival=.* did you mean retrieval=\?"),
    ],
)
def test_options(attached, names, options, named):
    with pytest.raises(Unsupported, match=named):
        attached.generate(prompts(1, 8), max_new_tokens=2, keep="kept", **options)
    assert names() == []


def test_prompts_longer_than_the_models_positions(db, names):
    model = build(max_position_embeddings=32)
    with attach(model, db) as engine:
        engine.generate(prompts(1, 32), max_new_tokens=1)
        for call in (
            lambda: engine.generate(prompts(1, 33), max_new_tokens=1),
            lambda: engine.generate(parts=[prompts(1, 33)[0]], max_new_tokens=1),
            lambda: engine.store(name="x", input_ids=prompts(1, 33)),
            lambda: engine.store_chunk(name="x", input_ids=prompts(1, 33)),
        ):
            with pytest.raises(InvalidArgument, match="33 tokens; the model has 32 positions"):
                call()
        engine.generate(prompts(1, 40), attention_mask=(torch.arange(40) >= 8).long()[None], max_new_tokens=1)
    assert names() == []


def test_positions_that_rope_stretches(db):
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
    with attach(build(max_position_embeddings=32, rope_parameters=yarn), db) as engine:
        engine.generate(prompts(1, 64), max_new_tokens=1)
        with pytest.raises(InvalidArgument, match="the model has 64 positions"):
            engine.generate(prompts(1, 65), max_new_tokens=1)


def test_prompts_that_are_none(attached):
    with pytest.raises(InvalidArgument, match="row 0 is all padding"):
        attached.generate(prompts(1, 4), attention_mask=torch.zeros(1, 4))
    with pytest.raises(ShapeError, match=r"\(1, 3\); expected \(1, 4\)"):
        attached.generate(prompts(1, 4), attention_mask=torch.ones(1, 3))
    with pytest.raises(ShapeError, match=r"expected \(rows, tokens\)"):
        attached.generate(prompts(1, 4)[0])
    with pytest.raises(InvalidArgument, match="at least one token"):
        attached.generate(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(DtypeError, match="float32"):
        attached.generate(torch.zeros(1, 4))
    with pytest.raises(InvalidArgument, match="NoneType"):
        attached.generate(max_new_tokens=3)
    with pytest.raises(ShapeError, match="one by one"):
        attached.store(name="x", input_ids=prompts(2, 4))


def test_keys_that_are_no_numbers(db, names):
    model = build()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with attach(model, db) as engine:
        with pytest.raises(NonFiniteError):
            engine.store(name="x", input_ids=prompts(1, 40))
        with pytest.raises(NonFiniteError):
            engine.generate(prompts(3, 40), max_new_tokens=2)
    assert names() == []


def test_an_error_in_the_middle_of_decoding(attached, names):
    def fail(_batch, ids):
        if len(ids) > 11:
            raise ZeroDivisionError
        return list(range(101))

    with pytest.raises(ZeroDivisionError):
        attached.generate(prompts(2, 8), max_new_tokens=9, num_beams=2, prefix_allowed_tokens_fn=fail)
    assert names() == []


def test_an_error_in_the_callback(attached, names):
    def fail(done, _total):
        if done:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        attached.store(name="x", input_ids=prompts(1, 40), progress=fail)
    assert names() == []


def test_a_server_that_dies(engine, model):
    server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
    server.start()
    with kvdb.connect(server.target) as db, attach(model, db, piece_tokens=16) as attached:
        with pytest.raises(Unavailable, match="does not answer"):
            attached.store(name="x", input_ids=prompts(1, 40), progress=lambda done, _: done and server.stop(grace=0))
        with pytest.raises(Unavailable, match="does not answer"):
            attached.generate(prompts(1, 8), max_new_tokens=2)
    assert engine.contexts() == []


def test_layers_whose_keys_never_reach_the_attention_function(db, monkeypatch):
    """Such a layer would be answered from its new tokens alone, so it must not go unnoticed, however few the tokens."""
    model = build()
    layer = model.model.layers[1].self_attn
    forward = type(layer).forward

    def copying(self, *given, past_key_values=None, **named):
        class Copying:
            def update(self, k, v, number):
                k, v = past_key_values.update(k, v, number)
                return k.clone(), v

        return forward(self, *given, past_key_values=Copying(), **named)

    monkeypatch.setattr(layer, "forward", copying.__get__(layer))
    with pytest.raises(Unsupported, match="layer 1 does not hand the keys"), attach(model, db):
        pass


def test_layers_that_scale_differently(db):
    model = build()
    model.model.layers[1].self_attn.scaling = 0.7
    with pytest.raises(Unsupported, match="layer 1 scales its scores by 0.7"), attach(model, db):
        pass
