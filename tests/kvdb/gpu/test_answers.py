"""Queries answered on the GPU beside the same queries answered by the CPU: congruence over devices.

Everything goes through the engine: what is stored is copied, plans are made, both sides answer, and their states merge.
"""

import numpy as np
import pytest

from indexes.retrieval import Dipr, Exact, TopK
from query_optimizer.query_options import Hints, QueryOptions
from tests.conftest import Kv
from tests.kvdb.gpu.conftest import imported, opened, spec_of, step, ways

STORED = 160
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
EXACT = QueryOptions(Exact())
UNPROVEN = QueryOptions(hints=Hints(rules_off=("error_budget",)))


def close(out, expected, dtype="float32", times=1.0):
    np.testing.assert_allclose(np.float32(out), np.float32(expected), atol=times * TOLERANCE[dtype], rtol=0)


@pytest.fixture
def both(make_engine):
    """Two engines that hold the same document, with a GPU and without."""

    def make(kv, n=STORED, **storage):
        engines = make_engine(block_size=32, **storage), make_engine(0)
        for engine in engines:
            imported(engine, kv, "document", n)
        return engines

    return make


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_session_reads_there_what_it_reads_here(both, dtype):
    kv = Kv(spec_of(dtype, layers=2), STORED + 20)
    there, here = (opened(engine, kv, STORED) for engine in both(kv))
    assert {tier for _, tier, _ in ways(there, EXACT)} == {"gpu"}
    for i in range(2):
        for layer in range(2):
            close(step(there, kv, STORED + i, EXACT, layer), step(here, kv, STORED + i, EXACT, layer), dtype)
    there.close()
    here.close()


@pytest.mark.parametrize("kept", ["float8", "int8"])
def test_quantised_copies_are_near(both, kept):
    kv = Kv(spec_of(), STORED + 4)
    there, here = (opened(engine, kv, STORED) for engine in both(kv, gpu_format=kept))
    for i in range(2):
        close(step(there, kv, STORED + i, EXACT), step(here, kv, STORED + i, EXACT), times=1500)
    there.close()
    here.close()


def test_what_has_no_room_is_read_by_the_cpu_at_the_same_time(make_engine, both):
    kv = Kv(spec_of(layers=2), STORED + 10)
    there, here = both(kv)
    slot = there._blocks.gpu_tier(kv.spec).layout.nbytes
    cramped = make_engine(slot * 2 * 4, block_size=32)  # in each of two layers 4 blocks of 5
    imported(cramped, kv, "document", STORED)
    some, reference = opened(cramped, kv, STORED), opened(here, kv, STORED)
    assert {tier for _, tier, _ in ways(some, EXACT)} == {"cpu", "gpu"}
    for i in range(2):
        close(step(some, kv, STORED + i, EXACT), step(reference, kv, STORED + i, EXACT))
    some.close()
    reference.close()


@pytest.mark.parametrize("n", [2, 17, 40])
def test_a_piece_of_a_prompt_attends_causally(both, n):
    kv = Kv(spec_of(), STORED + 80)
    there, here = (opened(engine, kv, STORED) for engine in both(kv))
    for i in range(2):
        close(step(there, kv, STORED + i * n, n=n), step(here, kv, STORED + i * n, n=n))
    there.close()
    here.close()


@pytest.mark.parametrize("options", [QueryOptions(Dipr(0.01)), QueryOptions(TopK(33)), UNPROVEN], ids=str)
def test_a_search_there_finds_what_matters(both, options):
    kv = Kv(spec_of(head_dim=32), STORED + 4)
    kv.q *= 3
    wanted_by_all = kv.q[:, ::2, STORED : STORED + 1] + kv.q[:, 1::2, STORED : STORED + 1]  # both heads of each group
    kv.k[:, :, 50:STORED:45] += wanted_by_all
    there, here = (opened(engine, kv, STORED) for engine in both(kv))
    assert any(tier == "gpu" and index is not None for _, tier, index in ways(there, options))
    out, exact = step(there, kv, STORED, options), step(here, kv, STORED, EXACT)
    stats = there.stats()
    assert stats.tokens_retrieved < STORED
    assert 0 < stats.missed_mass_bound_max <= 1
    length = np.abs(kv.v).max() * np.sqrt(32)
    assert np.linalg.norm(out - exact, axis=-1).max() <= 2 * length * stats.missed_mass_bound_max + 1e-4
    there.close()
    here.close()


def test_a_bound_on_what_is_missed_is_kept(both):
    kv = Kv(spec_of(), STORED + 4)
    there, here = (opened(engine, kv, STORED) for engine in both(kv))
    out = step(there, kv, STORED, QueryOptions(Dipr(0.5), max_missed_mass=0.02))
    assert there.stats().missed_mass_bound_max <= 0.02
    close(out, step(here, kv, STORED, EXACT), times=5000)
    there.close()
    here.close()


def test_an_index_of_the_cpu_that_was_hinted_at_is_asked_there(make_engine):
    kv = Kv(spec_of(), STORED + 4)
    engine = make_engine()
    imported(engine, kv, "document", STORED)
    engine.build_index("document", "coarse-means")
    session = opened(engine, kv, STORED)
    assert {tier for _, tier, _ in ways(session, QueryOptions(hints=Hints(index="coarse-means")))} == {"cpu"}
    session.close()


@pytest.mark.parametrize(
    ("options", "index", "retrieval"),
    [
        (UNPROVEN, "coarse-bounds", TopK(3)),
        (QueryOptions(hints=Hints(rules_off=("error_budget", "budget_fits"))), "flat", Dipr()),
        (QueryOptions(max_missed_mass=0.1), "flat", Dipr()),
        (QueryOptions(TopK(9)), "coarse-bounds", TopK(9)),
        (QueryOptions(TopK(9), hints=Hints(index="coarse-bounds")), "coarse-bounds", TopK(9)),
        (QueryOptions(Dipr(0.1), hints=Hints(index="flat")), "flat", Dipr(0.1)),
    ],
    ids=str,
)
def test_pages_are_ranked_and_ranges_are_found_by_codes(make_engine, options, index, retrieval):
    kv = Kv(spec_of(head_dim=32), STORED + 4)
    engine = make_engine()
    imported(engine, kv, "document", STORED)
    session = opened(engine, kv, STORED)
    found = [access for access in session.explain(0, options).accesses if access.index is not None]
    assert [(access.tier, access.index, access.retrieval) for access in found] == [("gpu", index, retrieval)]
    session.close()


def test_a_fork_and_its_parent_go_their_ways(both):
    kv = Kv(spec_of(), STORED + 40)
    outs = []
    for engine in both(kv):
        parent = opened(engine, kv, STORED)
        seen = [step(parent, kv, STORED + i, EXACT) for i in range(2)]
        twin = parent.fork()
        seen += [step(session, kv, STORED + 2 + i, EXACT) for i, session in enumerate([parent, twin, parent, twin])]
        outs.append(seen)
        parent.close()
        twin.close()
    for there, here in zip(*outs, strict=True):
        close(there, here)
