"""A session that searches, by every kind of index, embedded and remote: heads that need few tokens get the right output."""

import numpy as np
import pytest

import kvdb
from benchmarks.workloads import Shape, generate
from indexes.registry import KINDS
from tests.reference import attention, relative_error

TOKENS, STEPS, ALPHA = 6144, 6, 0.01
SPEC = kvdb.ModelSpec("sharp", layers=1, q_heads=8, kv_heads=2, head_dim=64, dtype="bfloat16")
SPARE = {"flat", "hnsw"}
RETRIEVALS = {"dipr": kvdb.Dipr(ALPHA), "top_k": kvdb.TopK(150), "top_p": kvdb.TopP(0.98)}


@pytest.fixture(scope="module")
def work():
    return generate("sharp", Shape(TOKENS, kv_heads=2, group=4, head_dim=64), queries=STEPS, query_samples=32)


@pytest.fixture(scope="module")
def step(work):
    """The keys and values of the steps, which lie in the window, and the exact output of each."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, STEPS, 64)).astype(work.k.dtype) for _ in range(2))
    out = []
    for i in range(STEPS):
        keys, values = (np.concatenate([old, new[:, : i + 1]], axis=1) for old, new in ((work.k, k), (work.v, v)))
        out.append(attention(work.queries[:, i : i + 1], keys, values, SPEC.softmax_scale)[0])
    return k, v, out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", RETRIEVALS)
def test_few_tokens_are_read_and_the_output_is_right(db, work, step, kind, asked):
    k, v, exact = step
    ids = np.arange(TOKENS)
    with db.import_context(
        SPEC, ids, [(np.asarray(work.k), np.asarray(work.v))], name="long", queries=[work.query_samples.astype(work.k.dtype)]
    ) as context:
        (info,) = db.build_index("long", kind)
        assert (info.kind, info.tokens, info.layers) == (kind, TOKENS, 1)
        assert db.verify("long").indexes == 1
        with context.create_session(ids) as session:
            for i in range(STEPS):
                now = slice(i, i + 1)
                q = work.queries[:, now].astype(work.k.dtype)
                out = session.attend(0, q, k[:, now], v[:, now], retrieval=RETRIEVALS[asked], hints=kvdb.Hints(index=kind))
                assert relative_error(out, exact[i]) <= 0.05
            stats = session.stats()
            assert stats.rules == {"hinted": STEPS}
            assert f"Index Search using {kind}" in str(session.explain(0, hints=kvdb.Hints(index=kind)))
    assert stats.missed_mass <= stats.missed_mass_bound
    assert stats.missed_mass_bound_max <= 1
    if kind in SPARE:  # pages give up on so short a context where their bounds are wide
        assert 320 < stats.tokens_retrieved / STEPS < TOKENS / 4
        assert 0 < stats.missed_mass / STEPS < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_asked_for_holds(db, work, step, kind):
    k, v, exact = step
    ids = np.arange(TOKENS)
    db.import_context(
        SPEC, ids, [(np.asarray(work.k), np.asarray(work.v))], name="long", queries=[work.query_samples.astype(work.k.dtype)]
    )
    db.build_index("long", kind)
    with db.create_session(SPEC, ids) as session:
        out = session.attend(
            0, work.queries[:, :1].astype(work.k.dtype), k[:, :1], v[:, :1], max_missed_mass=1e-3, hints=kvdb.Hints(index=kind)
        )
        assert session.stats().missed_mass_bound_max <= 1e-3
    assert relative_error(out, exact[0]) <= 0.01
    db.drop("long")
