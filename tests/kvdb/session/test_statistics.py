"""Statistics of a context, embedded and remote, against dense attention over what its sessions asked."""

import numpy as np
import pytest

import kvdb
from kvdb.errors import NotFound, Unavailable
from kvdb.types import MEASURES
from tests.database import database, small_config

pytestmark = pytest.mark.usefixtures("scan_for_flat")

CUT, STORED, STEPS = 500, 1100, 40
ALPHA = 0.012
SEARCHED = [(16, 496), (500, 1076)]
"""The searched ranges over 500 tokens of one segment and 600 of another: whole blocks outside of the window."""
OBSERVED = [step for step in range(1, STEPS + 1) if step <= 16 or step % 8 == 0]


@pytest.fixture
def engine():
    """A database in which everything is small."""
    with database(config=small_config(("short_context", "diffuse_head"), tail_tokens=0)) as opened:
        yield opened


@pytest.fixture
def kv(db, spec, make_kv):
    """1100 tokens in two segments, of the first of which 500 of 800 are seen, and more to come."""
    first, both = make_kv(spec, 800), make_kv(spec, STORED + STEPS, seed=1)
    db.import_context(spec, first.tokens, first.pairs(), name="first")
    for name in ("k", "v"):
        getattr(both, name)[:, :, :CUT] = getattr(first, name)[:, :, :CUT]
    both.tokens[:CUT] = first.tokens[:CUT]
    both.q *= 6
    assert db.import_context(spec, both.tokens[:STORED], both.pairs(0, STORED), name="document").info.segments == 2
    return both


def step(session, kv, layer, at):
    now = slice(at, at + 1)
    session.attend(layer, kv.q[layer][:, now], kv.k[layer][:, now], kv.v[layer][:, now], retrieval=kvdb.Dipr(ALPHA))


def measured(kv, layer, at, searched):
    """The measures of the query at this position over what was searched of one segment, float64 `[q_heads]` each."""
    keys = kv.k[layer][:, : at + 1].repeat(2, axis=0).astype(np.float64)
    logits = kv.spec.softmax_scale * np.einsum("hd,htd->ht", kv.q[layer][:, at].astype(np.float64), keys)
    top = logits.max(axis=1, keepdims=True)
    chosen = logits >= top + np.log(ALPHA)
    best = logits.argmax(axis=1)
    begin, end = searched
    return {
        "retrieved": chosen[:, begin:end].sum(axis=1) / (end - begin),
        "dense": np.zeros(len(logits)),
        "sharpness": 1 / np.exp(logits - top).sum(axis=1),
        "window_hits": np.array([not any(begin <= at < end for begin, end in SEARCHED) for at in best], float),
    }


def average(values):
    mean = values[0]
    for i, value in enumerate(values, 1):
        mean = mean + (value - mean) / min(i, 16)
    return mean


def test_they_are_what_dense_attention_says_of_the_queries_that_are_observed(db, engine, kv):
    db.build_index("document", "flat")
    with db.create_session(kv.spec, kv.tokens[:STORED]) as session:
        for at in range(STORED, STORED + STEPS):
            step(session, kv, 1, at)
    statistics = db.statistics("document")
    assert statistics.name == "document"
    assert [segment.tokens for segment in statistics.segments] == [800, 600]
    assert [s.segment for s in statistics.segments] == [info.segment for info in db.indexes("document")]
    for segment, searched, embedded in zip(statistics.segments, SEARCHED, engine.statistics("document").segments, strict=True):
        assert segment.queries.tolist() == [[0] * 4, [len(OBSERVED)] * 4]
        shown = [measured(kv, 1, STORED + number - 1, searched) for number in OBSERVED]
        for name in MEASURES:
            got = getattr(segment, name)
            assert (got.shape, got.dtype, got.flags.writeable) == ((2, 4), np.float32, False)
            assert got[1] == pytest.approx(average([one[name] for one in shown]), rel=1e-4, abs=1e-6)
            assert not got[0].any()
            assert got.tobytes() == getattr(embedded, name).tobytes()


def test_a_segment_is_known_to_every_context_that_names_it(db, kv):
    db.build_index("document", "flat")
    with db.create_session(kv.spec, kv.tokens[:STORED]) as session:
        step(session, kv, 0, STORED)
    (alone,) = db.statistics("first").segments
    shared, _ = db.statistics("document").segments
    assert (alone.segment, alone.queries.tolist()) == (shared.segment, [[1] * 4, [0] * 4])
    assert alone.retrieved.tobytes() == shared.retrieved.tobytes()


def test_what_reads_everything_or_asks_several_queries_is_not_observed(db, kv):
    db.build_index("document", "flat")
    with db.create_session(kv.spec, kv.tokens[:STORED]) as session:
        session.attend(0, *(x[0][:, STORED : STORED + 3] for x in (kv.q, kv.k, kv.v)))
        session.attention(0, kv.q[0][:, STORED + 2 : STORED + 3], retrieval=kvdb.Exact())
        session.attention(0, kv.q[0][:, STORED + 1 : STORED + 3], retrieval=kvdb.Dipr(ALPHA))
        session.attention(0, kv.q[0][:, STORED + 2 : STORED + 3], retrieval=kvdb.TopK(5))  # says nothing of what is wanted
        assert not any(segment.queries.any() for segment in db.statistics("document").segments)
        session.attention(0, kv.q[0][:, STORED + 2 : STORED + 3], retrieval=kvdb.Dipr(ALPHA))
    assert [segment.queries.max() for segment in db.statistics("document").segments] == [1, 1]


def test_a_query_that_is_widened_is_observed_as_it_was_asked(db, kv):
    db.build_index("document", "flat")
    with db.create_session(kv.spec, kv.tokens[:STORED]) as session:
        k, v = kv.pairs(STORED, STORED + 1)[0]
        session.attend(0, kv.q[0][:, STORED : STORED + 1], k, v, retrieval=kvdb.Dipr(1.0), max_missed_mass=1e-6)
        assert session.stats().missed_mass_bound_max <= 1e-6
    first, second = db.statistics("document").segments
    assert first.queries.max() == second.queries.max() == 1
    both = first.retrieved[0] * (496 - 16) + second.retrieved[0] * (1076 - 500)
    assert (both <= 1).all()


def test_errors(db, kv):
    with pytest.raises(NotFound, match="no context is named 'none'"):
        db.statistics("none")
    db.close()
    with pytest.raises(Unavailable):
        db.statistics("document")
