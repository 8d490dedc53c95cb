"""Moved chunks and recomputed tokens on the GPU: its queries are turned back, and what is overlaid is masked there."""

import numpy as np
import pytest

import kvdb
from indexes.retrieval import Dipr, Exact
from query_optimizer.query_options import QueryOptions
from tests.conftest import Kv
from tests.kvdb.blend.oracle import ROPES
from tests.kvdb.gpu.conftest import settled, spec_of, step, ways
from tests.kvdb.gpu.test_answers import close

EXACT = QueryOptions(Exact())
SIZES = 110, 70


def chunk(engine, kv, name, n):
    writing = engine.begin_import(kv.spec, kv.tokens[:n], name, 0)
    for layer, (k, v) in enumerate(kv.pairs(0, n)):
        writing.write(layer, k, v)
    writing.commit()


FEW = ["interleaved", "some dimensions"]


@pytest.fixture(params=sorted(ROPES))
def laid_out(request, make_engine):
    """Sessions over two chunks, of which the second was moved, with a GPU and without."""
    spec = spec_of(rope=ROPES[request.param])
    texts = [Kv(spec, n, seed=n) for n in SIZES]
    sessions = []
    for engine in (make_engine(block_size=32), make_engine(0)):
        for i, (kv, n) in enumerate(zip(texts, SIZES, strict=True)):
            chunk(engine, kv, f"chunk {i}", n)
        session = engine.create_session_of_parts(spec, [kvdb.PromptPart("chunk 0"), kvdb.PromptPart("chunk 1")])
        sessions.append(settled(engine, session))
    yield sessions, Kv(spec, sum(SIZES) + 8, seed=3)
    for session in sessions:
        session.close()


def test_a_moved_chunk_is_read_there(laid_out):
    (there, here), kv = laid_out
    assert {tier for _, tier, _ in ways(there, EXACT)} == {"gpu"}
    for i in range(2):
        close(step(there, kv, there.start + i, EXACT), step(here, kv, here.start + i, EXACT))
    n = 4
    at = there.start + 2
    close(step(there, kv, at, n=n), step(here, kv, at, n=n))


@pytest.mark.parametrize("laid_out", FEW, indirect=True)
def test_a_moved_chunk_is_searched_there(laid_out):
    (there, here), kv = laid_out
    kv.q *= 3
    options = QueryOptions(Dipr(1e-4))
    assert ("gpu", "flat") in {way[1:] for way in ways(there, options)}
    out, exact = step(there, kv, there.start, options), step(here, kv, here.start, EXACT)
    bound = there.stats().missed_mass_bound_max
    assert np.linalg.norm(out - exact, axis=-1).max() <= 2 * np.abs(kv.v).max() * 4 * bound + 1e-4


@pytest.mark.parametrize("laid_out", FEW, indirect=True)
def test_what_is_recomputed_is_masked_there(laid_out):
    sessions, kv = laid_out
    outs = []
    for session in sessions:
        step(session, kv, session.start, EXACT)  # the plan before the overlay
        positions = np.array([3, 60, SIZES[0], SIZES[0] + 31, SIZES[0] + 60])
        k, v = (array[0][:, positions] for array in (kv.k, kv.v))
        session.overlay(0, positions, k, v)
        outs.append([step(session, kv, session.start + 1, EXACT), step(session, kv, session.start + 2, QueryOptions(Dipr(1e-9)))])
    for there, here in zip(*outs, strict=True):
        close(there, here, times=50)
