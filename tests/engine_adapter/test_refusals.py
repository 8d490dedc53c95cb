"""What kvdb cannot do is refused by a typed error that names it, and the database stays as it was."""

import re

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvdb
from engine_adapter.transformers import attach
from engine_adapter.transformers.answerable import refused
from engine_adapter.transformers.own.engine import OwnEngine
from kvdb.config import ServerConfig
from kvdb.errors import DtypeError, InvalidArgument, NonFiniteError, ShapeError, Unavailable, Unsupported
from kvdb.server.serve import Server
from tests.engine_adapter.families import family
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


@pytest.mark.parametrize(
    ("config", "fields", "named"),
    [
        (transformers.Gemma3TextConfig, {"head_dim": 16, "use_bidirectional_attention": True}, "attends to later tokens"),
        (transformers.MambaConfig, {}, "layer 0 .*LinearAttentionLayer.* no layer .* keeps tokens"),
        (transformers.LlamaConfig, {"head_dim": 12}, "layer 0, a DynamicLayer, .*key_dim is 12"),
        (transformers.LlamaConfig, {"rope_parameters": DYNAMIC}, "RoPE of type 'dynamic'"),
        (
            transformers.ModernBertDecoderConfig,
            {"local_attention": 64, "pad_token_id": 0},
            "ModernBertDecoder.* calls its decoder.*Linear",
        ),
        (transformers.BertConfig, {"is_decoder": True, "add_cross_attention": True}, "cross attention"),
    ],
)
def test_models(config, fields, named, db):
    model = transformers.AutoModelForCausalLM.from_config(config(**{**SMALL, **fields})).eval()
    with pytest.raises(Unsupported, match=named), attach(model, db):
        pass
    assert model.config._attn_implementation != "kvdb"


@pytest.mark.parametrize(
    ("config", "fields", "why"),
    [
        (transformers.DiffLlamaConfig, {"head_dim": 16}, "layer 0 .*attention more than once"),
        (transformers.OPTConfig, {"ffn_dim": 32, "word_embed_proj_dim": 64}, "layer 0 scales its scores by 1.0"),
        (transformers.DogeConfig, {}, "layer 0 has a mask of its own"),
        (transformers.JetMoeConfig, {"kv_channels": 16, "num_local_experts": 4}, "layer 0 .* hand the keys"),
        (transformers.BloomConfig, {}, "AttentionInterface"),
    ],
)
def test_models_whose_attention_is_not_kvdbs_attend_themselves(config, fields, why, db):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**{**SMALL, **fields})).eval()
    assert re.search(why, str(refused(model)))
    attends_itself(model, db)


def attends_itself(model, db):
    """What is stored of its cache is handed back to it."""
    ids, options = prompts(1, 30), {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    with attach(model, db) as engine:
        assert isinstance(engine, OwnEngine)
        engine.store(name="document", input_ids=ids[:, :25])
        assert torch.equal(engine.generate(ids, **options), model.generate(ids, **options))
        assert engine.last.reused == (25,)


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
    assert "layer 1 does not hand the keys" in str(refused(model))
    attends_itself(model, db)


def test_layers_that_scale_differently(db):
    model = build()
    model.model.layers[1].self_attn.scaling = 0.7
    assert "layer 1 scales its scores by 0.7" in str(refused(model))
    attends_itself(model, db)


def test_what_a_model_that_attends_itself_cannot_do(db, names):
    with attach(family("qwen3_next"), db) as engine:
        ids = prompts(1, 8)
        for given, named in (
            ({"retrieval": kvdb.Exact()}, "attends itself, .*leave options out"),
            ({"prompt_lookup_num_tokens": 3}, "attends itself, and drafts"),
            ({"past_key_values": DynamicCache()}, "past_key_values= is a DynamicCache"),
        ):
            with pytest.raises(Unsupported, match=named):
                engine.generate(ids, max_new_tokens=2, keep="kept", **given)
        with pytest.raises(Unsupported, match="states.*chunks cannot be moved"):
            engine.generate(parts=[ids[0]], max_new_tokens=2)
        with pytest.raises(Unsupported, match="states.*chunks cannot be moved"):
            engine.store_chunk(name="x", input_ids=ids)
    with pytest.raises(InvalidArgument, match="not attached"):
        engine.generate(ids, max_new_tokens=2)
    assert names() == []


def test_a_layer_that_keeps_more_than_its_cache_shows(db, monkeypatch):
    """A model that remembers tokens elsewhere is refused, because it would go on otherwise from what is handed back."""
    model = family("qwen3_next")
    embed = model.model.embed_tokens
    seen = []

    def remembering(ids):
        seen.append(int(ids.sum()))
        return torch.nn.functional.embedding(ids, embed.weight) * (1 + len(seen))

    monkeypatch.setattr(embed, "forward", remembering)
    with pytest.raises(Unsupported, match="answers otherwise from a cache that was stored and handed back"), attach(model, db):
        pass
