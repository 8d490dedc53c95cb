"""Searches over quantized segments: indexes are built of what is stored, and find and read what that says."""

from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest

import kvdb
from indexes.base import Queries
from indexes.blocks import Blocks
from indexes.registry import KINDS, build
from indexes.retrieval import Dipr, Exact, TopK
from kvdb.client.client import Client
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import CpuBudget
from kvdb.storage.cpu import CpuTier
from tests.database import database, searching_config
from tests.reference import attention, relative_error

SPEC = kvdb.ModelSpec("small", 1, 4, 2, 64, "bfloat16", rope=kvdb.Rope(10000.0))
TOKENS = 1500
FORMATS = ["int8", "int8-int4", "int4"]


@lru_cache(maxsize=4)
def layers(name):
    """The same tokens twice, as indexes read them: quantized, and as raw blocks of what the quantized ones hold, in float32."""
    rng = np.random.default_rng(3)
    k, v = rng.standard_normal((2, SPEC.kv_heads, TOKENS, SPEC.head_dim)).astype(ml_dtypes.bfloat16)
    budget, plain = CpuBudget(None), BlockLayout.of(SPEC.shape(0), 64)
    layout = plain.in_format(name)
    table = BlockTable(CpuTier(plain.nbytes, 1 << 20, budget), plain)
    table.append(k, v)
    quantized = table.encoded(CpuTier(layout.nbytes, 1 << 20, budget), layout)
    blocks = quantized.keys(TOKENS)
    heads = range(SPEC.kv_heads)
    raw = Blocks.of(np.stack([blocks.keys(head) for head in heads]), np.stack([blocks.values(head) for head in heads]))
    return quantized, blocks, raw, v


@pytest.mark.parametrize("name", FORMATS)
def test_indexes_read_what_is_stored(name):
    quantized, blocks, raw, v = layers(name)
    assert relative_error(raw.values(1), v[1]) == pytest.approx(quantized.rounding.value_error, rel=0.02)
    k, _ = quantized.read(0, TOKENS)
    assert relative_error(raw.keys(0), k[0]) <= 2**-8  # which reads them in bfloat16
    assert np.array_equal(blocks.stored_keys(0, 5, 90), k[0, 5:90])
    assert blocks.token_nbytes * SPEC.kv_heads == pytest.approx(quantized.layout.token_nbytes, rel=0.1)


@pytest.mark.parametrize("retrieval", [TopK(40), Dipr(0.05), Exact()], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_indexes_find_what_the_stored_keys_say(kind, retrieval):
    _, blocks, raw, _ = layers("int8")
    q = np.random.default_rng(4).standard_normal((4, 2, SPEC.head_dim)).astype(np.float32)
    queries = Queries.of(q, SPEC.kv_heads, SPEC.softmax_scale, TOKENS)
    found, expected = (build(kind, one, None).search(queries, retrieval) for one in (blocks, raw))
    if kind != "hnsw":  # whose walk takes another way for another rounding
        assert np.array_equal(found.offsets, expected.offsets)
    for row in range(8):
        got, want = (set(one.ids[one.offsets[row] : one.offsets[row + 1]].tolist()) for one in (found, expected))
        assert len(got & want) >= 0.9 * max(len(want), 1)
    scores = np.einsum("d,td->t", q[0, 0], raw.keys(0))
    assert np.allclose(found.scores[: found.offsets[1]], scores[found.ids[: found.offsets[1]]], atol=1e-3)


@pytest.mark.parametrize("kind", ["flat", "coarse-clusters", "quantized"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_session_answers_from_what_its_search_finds(make_kv, name, kind):
    kv = make_kv(SPEC, TOKENS + 2)
    few = np.s_[:, :, 500:520]
    kv.k[few], kv.q[..., 0] = kv.k[few] / 4, 24  # some keys get nearly all of the weight
    kv.k[..., 0] = 0
    kv.k[:, :, 500:520, 0] = 4
    with database(config=searching_config()) as engine, Client(engine) as db:
        doc = db.import_context(SPEC, kv.tokens[:TOKENS], kv.pairs(0, TOKENS), name="doc", format=name)
        db.build_index("doc", kind)
        assert db.verify("doc").indexes == 1
        with db.create_session(SPEC, kv.tokens[:TOKENS]) as session:
            k, v = doc.read(0)
            for i in (TOKENS, TOKENS + 1):  # the second may be one call of native code
                new = [x[0][:, i : i + 1] for x in (kv.q, kv.k, kv.v)]
                out = session.attend(0, *new, retrieval=kvdb.TopK(32), hints=kvdb.Hints(kind))
                k, v = np.concatenate([k, new[1]], axis=1), np.concatenate([v, new[2]], axis=1)
                expected, _ = attention(new[0], k, v, SPEC.softmax_scale)
                assert relative_error(out, expected) <= 5e-2
            assert session.stats().tokens_retrieved < TOKENS
