"""Which segments have copies, and whose slots are whose."""

import gc
from contextlib import closing

import pytest

from indexes.retrieval import Exact
from query_optimizer.query_options import QueryOptions
from tests.conftest import Kv
from tests.kvdb.gpu.conftest import imported, opened, spec_of, step, ways
from tests.racing import race

EXACT = QueryOptions(Exact())
STORED = 130


@pytest.fixture
def cramped(make_engine):
    """An engine with room for one document and a half, with a reserve for tails, and two documents in it."""
    spec = spec_of(layers=2)
    nbytes = make_engine()._blocks.gpu_tier(spec).layout.nbytes
    engine = make_engine(nbytes * 2 * (9 + 5))
    texts = [Kv(spec, STORED + 8, seed=i) for i in range(2)]
    for i, kv in enumerate(texts):
        imported(engine, kv, f"document {i}", STORED)
    return engine, texts


def on_gpu(engine, session):
    return engine.gpu.mirror(session.snapshot.views[0].segment) is not None


def test_what_nobody_uses_makes_room(cramped):
    engine, texts = cramped
    one = opened(engine, texts[0], STORED)
    assert on_gpu(engine, one)
    step(one, texts[0], STORED, EXACT)
    two = opened(engine, texts[1], STORED)
    assert not on_gpu(engine, two)  # the first is in use
    one.close()
    three = opened(engine, texts[1], STORED)
    assert on_gpu(engine, three)
    again = opened(engine, texts[0], STORED)
    mirror = engine.gpu.mirror(again.snapshot.views[0].segment)
    assert mirror.slots.shape == (2, 4)  # of 9 blocks in each layer the last ones
    assert mirror.first == 5
    engine.check_integrity()
    for session in (two, three, again):
        session.close()
    assert engine.gpu.memory(texts[0].spec).free_nbytes < 9 * 16 * texts[0].spec.token_nbytes  # kept until others want the room


def test_a_dropped_document_gives_its_room(cramped):
    engine, texts = cramped
    session = opened(engine, texts[0], STORED)
    engine.drop("document 0")
    step(session, texts[0], STORED, EXACT)
    session.close()
    other = opened(engine, texts[1], STORED)
    assert on_gpu(engine, other)
    other.close()


def test_slots_of_tails_come_back(make_engine):
    kv = Kv(spec_of(layers=2), STORED + 40)
    engine = make_engine()
    imported(engine, kv, "document", STORED)
    tier = engine._blocks.gpu_tier(kv.spec)
    session = opened(engine, kv, STORED)
    free = tier.free
    step(session, kv, STORED, EXACT)
    twin = session.fork()
    step(twin, kv, STORED + 1, EXACT)
    assert tier.free < free
    engine.check_integrity()
    session.close()
    twin.close()
    assert tier.free == free


def test_memory_is_told_to_the_byte(make_engine):
    kv = Kv(spec_of(layers=2), STORED + 8)
    engine = make_engine()
    imported(engine, kv, "document", STORED)
    session = opened(engine, kv, STORED)
    before = engine.gpu.device.tracked_nbytes
    step(session, kv, STORED, EXACT)
    step(session, kv, STORED + 1)
    assert engine.gpu.device.tracked_nbytes > before  # tables, work space and results
    on_device = [stats for stats in engine.tiers() if stats.name.startswith("gpu")]
    assert sum(stats.nbytes for stats in on_device) == engine.gpu.device.tracked_nbytes
    slab = next(stats for stats in on_device if stats.name == "gpu")
    tier = engine._blocks.gpu_tier(kv.spec)
    assert slab.nbytes == tier.slots * tier.layout.nbytes
    assert slab.blocks_used == 2 * 9 + len(session._layers[0]._tail.copy.slots)  # copies, and the tail of one layer
    session.close()
    del session
    gc.collect()
    kept = engine.gpu._scratch.partial.take(0).untyped_storage().nbytes()  # for the next session
    assert engine.gpu.device.tracked_nbytes == before + kept


def test_an_explained_plan_says_where(cramped):
    engine, texts = cramped
    session = opened(engine, texts[0], STORED)
    step(session, texts[0], STORED)
    assert {tier for _, tier, _ in ways(session)} == {"gpu"}
    text = str(session.explain(0, analyze=True))
    assert "Tier: gpu" in text
    assert "actual" in text
    session.close()


def test_slots_are_counted_while_sessions_come_and_go(make_engine):
    kv = Kv(spec_of(), 8)
    engine, tails = make_engine(), []
    with closing(engine.create_session(kv.spec, kv.tokens)) as session:
        (table,) = session.tails
        race(engine.gpu.owned, lambda: tails.append(engine.gpu.mirror_tail(kv.spec, table)))
        assert all(not len(tail.slots) for tail in tails)
