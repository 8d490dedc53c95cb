"""Plans of a session's layer: which blocks hold sinks, and when a plan is made anew."""

import numpy as np
import pytest

import kvdb
from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig, WindowConfig
from kvdb.database import Database
from query_optimizer.query_options import QueryOptions

BLOCK, SINKS = 16, 40
NOTHING = QueryOptions()


@pytest.fixture
def engine():
    config = Config(
        storage=StorageConfig(block_size=BLOCK, arena_bytes=1 << 20),
        optimizer=OptimizerConfig(rules_off=("short_context",), machine_file=""),
        window=WindowConfig(SINKS, 16),
        indexes=IndexConfig(on_demand="", automatic=False, segment_tokens_min=64, tail_tokens=64),
    )
    with Database(config) as database:
        yield database
        database.check_integrity()


def store(engine, kv, name, start, end):
    writing = engine.begin_import(kv.spec, kv.tokens[:end], name)
    for layer, (k, v) in enumerate(kv.pairs(writing.start, end)):
        writing.write(layer, k, v)
    writing.commit()
    engine.build_index(name, "flat")


def prepared(session):
    return session.layer(0).planner.prepare(1, NOTHING)


def attend(session, kv, begin, end):
    now = slice(begin, end)
    return session.attend(0, kv.q[0][:, now], kv.k[0][:, now], kv.v[0][:, now])


def test_sinks_are_the_blocks_of_the_first_tokens_over_several_views(engine, spec, make_kv):
    """A first segment of 20 tokens in two blocks, of which the second is filled in part; then one of 400."""
    kv = make_kv(spec, 420)
    store(engine, kv, "short", 0, 20)
    store(engine, kv, "long", 20, 420)
    session = engine.create_session(spec, kv.tokens)
    partition = prepared(session).partition
    assert partition.sinks == ((0, 2), (2, 4))  # 20 tokens, and 20 more of the second segment in two blocks
    run = session.layer(0).run
    sinks, (behind, _) = partition.sink_blocks(run), partition.fixed_window_behind_sinks(run)
    assert sinks.counts.sum() == 20 + 32
    window, _ = partition.fixed_window(run)
    assert sorted([*sinks.addresses, *behind.addresses]) == sorted(window.addresses)
    session.close()


def test_sinks_of_a_tail_are_not_searched(engine, spec, make_kv):
    kv = make_kv(spec, 300)
    session = engine.create_session(spec, np.zeros(0, np.int32))
    attend(session, kv, 0, 299)
    for _ in range(3):
        attend(session, kv, 299, 300)
        session.layer(0).truncate(1)
    assert prepared(session).partition.sinks == ((0, 3),)
    (searched,) = prepared(session).partition.searched
    assert searched.span.begin == 3 * BLOCK
    session.close()


def test_a_plan_is_made_anew_when_anything_that_it_depends_on_changes(engine, spec, make_kv):
    """Each of two changes alone, and both at once."""
    kv = make_kv(spec, 600)
    store(engine, kv, "doc", 0, 300)
    session = engine.create_session(spec, kv.tokens[:300])
    before = prepared(session)
    assert prepared(session) is before
    engine.build_index("doc", "coarse-bounds")
    after = prepared(session)
    assert after is not before
    assert "coarse-bounds" in str(session.explain(0, QueryOptions(hints=kvdb.Hints(index="coarse-bounds"))))
    session.close()
