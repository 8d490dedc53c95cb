"""A card that runs out of memory or disappears in the middle: the query is answered by the CPU, and the session goes on."""

import logging

import pytest
import torch

from indexes.retrieval import Exact
from query_optimizer.query_options import QueryOptions
from tests.conftest import Kv
from tests.kvdb.gpu.conftest import imported, opened, spec_of, step, ways
from tests.kvdb.gpu.test_answers import close

EXACT = QueryOptions(Exact())
STORED = 150
ERRORS = {
    "out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "lost": RuntimeError("CUDA error: an illegal memory access was encountered"),
}


@pytest.fixture
def documents(make_engine):
    kv = Kv(spec_of(), STORED + 8)
    engines = make_engine(), make_engine(0)
    for engine in engines:
        imported(engine, kv, "document", STORED)
    return engines, kv


@pytest.mark.parametrize("where", ["launch", "wait"])
@pytest.mark.parametrize("kind", sorted(ERRORS))
def test_the_cpu_takes_over_in_mid_query(documents, monkeypatch, caplog, kind, where):
    engines, kv = documents
    there, here = (opened(engine, kv, STORED) for engine in engines)
    close(step(there, kv, STORED, EXACT), step(here, kv, STORED, EXACT))

    def fail(*arguments, **named):
        raise ERRORS[kind]

    with monkeypatch.context() as broken:
        target = "kvdb.gpu.step_launches.decode" if where == "launch" else "kvdb.gpu.streams.ImmediateStream.synchronize"
        broken.setattr(target, fail)
        with caplog.at_level(logging.WARNING):
            close(step(there, kv, STORED + 1, EXACT), step(here, kv, STORED + 1, EXACT))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("layer 0 is answered by the CPU alone:")
    assert engines[0].gpu.device.lost == (kind == "lost")
    caplog.clear()
    for i in range(2, 5):
        close(step(there, kv, STORED + i, EXACT), step(here, kv, STORED + i, EXACT))
    assert not caplog.records
    assert {tier for _, tier, _ in ways(there, EXACT)} == {"cpu"}
    twin = engines[0].create_session(kv.spec, kv.tokens[:STORED])  # others are not held back by what one met
    assert {tier for _, tier, _ in ways(twin, EXACT)} == ({"cpu"} if kind == "lost" else {"gpu"})
    for session in (there, here, twin):
        session.close()


def test_a_tail_that_finds_no_room_stays_here(make_engine):
    kv = Kv(spec_of(layers=2), STORED + 80)
    reference = make_engine(0)
    nbytes = make_engine()._blocks.gpu_tier(kv.spec).layout.nbytes
    cramped = make_engine(nbytes * (2 * 10 + 1))  # all of the document in each of two layers, and one block more
    outs = []
    for engine in (cramped, reference):
        imported(engine, kv, "document", STORED)
        session = opened(engine, kv, STORED)
        outs.append([step(session, kv, STORED + i * 20, EXACT, n=20) for i in range(3)])
        if engine is cramped:
            assert {tier for name, tier, _ in ways(session, EXACT) if name != "tail"} == {"gpu"}
            assert ("tail", "cpu", None) in ways(session, EXACT)
        session.close()
    for there, here in zip(*outs, strict=True):
        close(there, here)


def test_a_segment_that_is_lost_while_it_is_copied_is_logged(make_engine, monkeypatch, caplog):
    kv = Kv(spec_of(), STORED + 8)
    engine = make_engine()
    imported(engine, kv, "document", STORED)

    def fail(*arguments, **named):
        raise ERRORS["out of memory"]

    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr("kvdb.gpu.upload.store", fail)
        session = opened(engine, kv, STORED)
    assert "is not copied to the GPU" in caplog.text
    assert engine.gpu.mirror(session.snapshot.views[0].segment) is None
    session.close()


def test_a_bug_while_copying_is_heard_of_once(make_engine, monkeypatch, caplog):
    kv = Kv(spec_of(), STORED + 8)
    engine = make_engine()
    imported(engine, kv, "document", STORED)

    def fail(*arguments, **named):
        raise KeyError("a bug")

    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr("kvdb.gpu.upload.store", fail)
        session = opened(engine, kv, STORED)
        for i in range(3):
            session.explain(0, QueryOptions(Exact() if i else None))
            engine.gpu.mirrors.wait_idle()
    assert caplog.text.count("nothing more is copied") == 1
    assert {tier for _, tier, _ in ways(session, EXACT)} == {"cpu"}
    session.close()
