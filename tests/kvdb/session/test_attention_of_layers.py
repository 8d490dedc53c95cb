"""Attention of layers of every description, against dense attention in float64, in every way that a session can be asked."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdb
from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig, WindowConfig
from kvdb.errors import InvalidArgument, PositionError
from tests.reference import TOLERANCE, relative_error


def numbers(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(np.float32).astype(kvdb.types.DTYPES[dtype])


def expected(layer, q, k, v, sinks=None):
    """Attention of the last n tokens in float64: `[q_heads, n, value_dim]`."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    v = k[..., : layer.value_dim] if layer.values == "keys" else v.astype(np.float64)
    group, n, tokens = layer.q_heads // layer.kv_heads, q.shape[1], k.shape[1]
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = (layer.key_dim**-0.5 if layer.scale is None else layer.scale) * q @ k.swapaxes(1, 2)
    at, position = np.arange(tokens), np.arange(tokens - n, tokens)[:, None]
    seen = (at <= position) & (at > position - (layer.window or tokens))
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks.astype(np.float64)[:, None, None], (len(q), n, 1))], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights[..., :tokens] @ v


ATTENTIONS = st.builds(
    lambda heads, group, dims, values, **rest: kvdb.Attention(heads * group, heads, *dims, values=values, **rest),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 5, 16]),
    st.sampled_from([(8, 8), (16, 8), (72, 64), (264, 256), (16, 16)]),
    st.sampled_from(["own", "keys"]),
    window=st.none() | st.integers(1, 50),
    sinks=st.booleans(),
    scale=st.none() | st.just(0.3),
)


@given(st.lists(ATTENTIONS, min_size=1, max_size=3), st.sampled_from(["float32", "bfloat16"]), st.data())
@settings(max_examples=40)
def test_every_layer_is_attended_as_it_is_described(layers, dtype, data):
    spec = kvdb.ModelSpec("any", layers=layers, dtype=dtype)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    pieces = data.draw(st.lists(st.sampled_from([1, 1, 1, 3, 20]), min_size=1, max_size=6))
    stored = data.draw(st.integers(0, 70))
    config = Config(storage=StorageConfig(block_size=16, arena_bytes=1 << 20))
    total = stored + sum(pieces)
    kv = [
        (numbers(rng, dtype, one.kv_heads, total, one.key_dim), numbers(rng, dtype, one.kv_heads, total, one.value_dim))
        for one in layers
    ]
    handed = [(k, None if one.values == "keys" else v) for one, (k, v) in zip(layers, kv, strict=True)]
    logits = [rng.standard_normal(one.q_heads).astype(np.float32) for one in layers]
    with kvdb.connect(config=config) as db:
        if stored:
            first = [(k[:, :stored], v if v is None else v[:, :stored]) for k, v in handed]
            db.import_context(spec, range(stored), first, name="a")
        with db.create_session(spec, range(stored)) as session:
            assert session.reused == stored
            for number, one in enumerate(layers):
                if one.sinks:
                    with pytest.raises(InvalidArgument, match=f"layer {number} has sinks"):
                        session.attend(
                            number,
                            numbers(rng, dtype, one.q_heads, 1, one.key_dim),
                            *(x if x is None else x[:, :1] for x in handed[number]),
                        )
                    session.put_sinks(number, logits[number])
            at = stored
            for n in pieces:
                for number, one in enumerate(layers):
                    q = numbers(rng, dtype, one.q_heads, n, one.key_dim)
                    k, v = (x if x is None else x[:, at : at + n] for x in handed[number])
                    out = session.attend(number, q, k, v)
                    right = expected(
                        one, q, kv[number][0][:, : at + n], kv[number][1][:, : at + n], logits[number] if one.sinks else None
                    )
                    assert out.shape == right.shape
                    assert relative_error(out, right) < TOLERANCE[dtype]
                    assert relative_error(session.attention(number, q), right) < TOLERANCE[dtype]
                at += n


@pytest.mark.parametrize("kind", ["flat", "coarse-clusters", "hnsw"])
@pytest.mark.parametrize("values", ["own", "keys"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_latents_are_searched_by_every_kind_that_takes_them(kind, values, sinks):
    layer = kvdb.Attention(8, 1, 72, 64, values=values, sinks=sinks)
    spec, rng, n = kvdb.ModelSpec("latents", layers=[layer, layer], dtype="float32"), np.random.default_rng(3), 3000
    config = Config(
        storage=StorageConfig(block_size=16, arena_bytes=1 << 20),
        optimizer=OptimizerConfig(rules_off=("short_context",), machine_file=""),
        window=WindowConfig(sink_tokens=4, recent_tokens=64),
        indexes=IndexConfig(on_demand="", automatic=False, segment_tokens_min=256),
    )
    kv = [(numbers(rng, "float32", 1, n, 72) * 4, numbers(rng, "float32", 1, n, 64)) for _ in range(2)]
    logits = rng.standard_normal(8).astype(np.float32)
    with kvdb.connect(config=config) as db:
        db.import_context(spec, range(n), [(k, None if values == "keys" else v) for k, v in kv], name="a")
        db.build_index("a", kind)
        with db.create_session(spec, range(n)) as session:
            if sinks:
                session.put_sinks(1, logits)
            k, v = kv[1]
            for step in range(8):
                q = numbers(rng, "float32", 8, 1, 72)
                more = numbers(rng, "float32", 1, 1, 72), numbers(rng, "float32", 1, 1, 64)
                k, v = np.concatenate([k, more[0]], axis=1), np.concatenate([v, more[1]], axis=1)
                out = session.attend(
                    1, q, more[0], None if values == "keys" else more[1], retrieval=kvdb.Dipr(1e-6), hints=kvdb.Hints(index=kind)
                )
                assert relative_error(out, expected(layer, q, k, v, logits if sinks else None)) < 1e-3, step
            plan = session.explain(1, retrieval=kvdb.Dipr(1e-6), hints=kvdb.Hints(index=kind), analyze=True)
            assert kind in str(plan)


def test_a_window_is_read_whole_whatever_is_asked(tmp_path):
    layer = kvdb.Attention(4, 2, 16, window=30)
    spec, rng = kvdb.ModelSpec("w", layers=[layer], dtype="float32"), np.random.default_rng(1)
    k, v, q = (numbers(rng, "float32", heads, 101, 16) for heads in (2, 2, 4))
    with kvdb.connect() as db:
        db.import_context(spec, range(100), [(k[:, 71:100], v[:, 71:100])], name="a")
        with db.create_session(spec, range(100)) as session:
            out = session.attend(0, q[:, 100:], k[:, 100:], v[:, 100:], retrieval=kvdb.TopK(3))
            assert relative_error(out, expected(layer, q[:, 100:], k, v)) < 1e-5
            with pytest.raises(PositionError, match="layer 0 holds tokens from 71 on"):
                session.attention(0, q[:, 99:])
            session.truncate(100)
