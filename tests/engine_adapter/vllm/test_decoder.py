"""Layers in vLLM's form, run on some tokens: their KV is that of transformers with the same weights."""

import numpy as np
import pytest
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvdb
from engine_adapter.recompute import Pass, SelectedTokens
from engine_adapter.transformers import attach
from engine_adapter.transformers.recompute import recompute
from engine_adapter.vllm.decoder import Decoder
from kvdb.blend.strategies import Recompute
from kvdb.errors import Unsupported
from tests.engine_adapter.tiny import build, prompts
from tests.reference import TOLERANCE, relative_error

SYSTEM, A, B, GAP = (prompts(1, n, seed)[0] for seed, n in enumerate((7, 50, 33, 5)))


class Attention(nn.Module):
    """As vLLM's own is called; what it would answer is never asked for."""

    def __init__(self, head_size):
        super().__init__()
        self.head_size = head_size

    def forward(self, query, key, value):
        raise AssertionError("kvdb answers")


class SelfAttention(nn.Module):
    def __init__(self, own, rotary):
        super().__init__()
        self.own, self.rotary = own, rotary
        self.attn = Attention(own.head_dim)

    def forward(self, positions, hidden_states):
        form = (1, len(positions), -1, self.own.head_dim)
        q, k, v = (p(hidden_states).view(form).transpose(1, 2) for p in (self.own.q_proj, self.own.k_proj, self.own.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(hidden_states[None], positions[None]))
        q, k, v = (each[0].transpose(0, 1).flatten(1) for each in (q, k, v))
        return self.own.o_proj(self.attn(q, k, v))


class Layer(nn.Module):
    """It writes into what it is given, as vLLM's norm does."""

    def __init__(self, own, rotary):
        super().__init__()
        self.own = own
        self.self_attn = SelfAttention(own.self_attn, rotary)

    def forward(self, positions, hidden_states, residual):
        residual = hidden_states.clone() if residual is None else residual.add_(hidden_states)
        hidden_states.copy_(self.own.input_layernorm(residual))
        residual = residual + self.self_attn(positions, hidden_states)
        return self.own.mlp(self.own.post_attention_layernorm(residual)), residual


class Model(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.embed_input_ids = own.embed_tokens
        self.layers = nn.ModuleList(Layer(layer, own.rotary_emb) for layer in own.layers)


class LlamaForCausalLM(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.model = Model(own.model)

    @property
    def attentions(self):
        return {name: module for name, module in self.named_modules() if isinstance(module, Attention)}


@pytest.fixture(scope="module")
def model():
    return build(kind="llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def shaped(model):
    return LlamaForCausalLM(model)


def read(session):
    return [np.stack(session.read(layer)) for layer in range(session.spec.layers)]


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_what_is_recomputed_is_what_transformers_recomputes(model, shaped, ratio):
    with kvdb.connect() as db, attach(model, db) as engine:
        a, b = engine.store_chunk(name="a", input_ids=A), engine.store_chunk(name="b", input_ids=B)
        parts = [SYSTEM, a, GAP, b, a]
        with db.create_session(engine.spec, parts=parts) as right, db.create_session(engine.spec, parts=parts) as own:
            expected = recompute(model, right, Recompute.of(ratio))
            selection = SelectedTokens(own, Recompute.of(ratio))
            Decoder(shaped.attentions).recompute(Pass(own, selection))
            done = selection.result(own, 0.0)
            for fresh, there in zip(read(own), read(right), strict=True):
                assert relative_error(fresh, there) < TOLERANCE["float32"]
    assert (done.reused, done.recomputed, done.fresh) == (expected.reused, expected.recomputed, expected.fresh)


def test_a_document_is_computed_alone(model, shaped, monkeypatch):
    monkeypatch.setattr("engine_adapter.vllm.decoder.PIECE_TOKENS", 20)
    with kvdb.connect() as db, attach(model, db) as engine:
        engine.store(name="right", input_ids=A)
        with db.create_session(engine.spec, A, salt="own") as own, db.create_session(engine.spec, A) as right:
            Decoder(shaped.attentions).prefill(own, A)
            assert right.reused == len(A)
            for fresh, there in zip(read(own), read(right), strict=True):
                assert relative_error(fresh, there) < TOLERANCE["float32"]


def test_its_attention_is_the_models_own_again(model, shaped):
    with kvdb.connect() as db, attach(model, db) as engine, db.create_session(engine.spec, A) as session:
        Decoder(shaped.attentions).prefill(session, A)
    with pytest.raises(AssertionError, match="kvdb answers"):
        next(iter(shaped.attentions.values()))(None, None, None)


def test_models_that_are_not_known_are_refused(shaped):
    with pytest.raises(Unsupported, match="none of"):
        Decoder({"model.layers.0.self_attn.attn": Attention(16)})
    windowed = shaped.attentions
    attention = next(iter(windowed.values()))
    attention.sliding_window = 64
    try:
        with pytest.raises(Unsupported, match="window"):
            Decoder(windowed)
    finally:
        del attention.sliding_window
