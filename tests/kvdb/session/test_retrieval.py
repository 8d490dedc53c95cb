"""Sessions that search, against an oracle that knows which tokens are wanted."""

import threading
from contextlib import closing

import numpy as np
import pytest

import indexes.registry as registry
import kvdb
from indexes.retrieval import Dipr, Exact, TopK, TopP
from query_optimizer.query_options import QueryOptions
from tests.database import RECENT, database, small_config
from tests.reference import TOLERANCE, attention, relative_error
from tests.scan import Scan
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("scan_for_flat")

TAIL = 32
ALPHA = 0.012
ASKED = {
    "dipr": QueryOptions(Dipr(ALPHA)),
    "top_k": QueryOptions(TopK(10)),
    "top_p": QueryOptions(TopP(0.95)),
}


@pytest.fixture
def engine():
    """A database in which everything is small."""
    with database(config=small_config(tail_tokens=TAIL)) as opened:
        yield opened


class Peaked:
    """KV of n tokens of which a query needs few: `kv` with larger queries."""

    def __init__(self, kv):
        self.spec, self.tokens, self.k, self.v, self.q = kv.spec, kv.tokens, kv.k, kv.v, kv.q * kv.q.dtype.type(6)

    def pairs(self, start=0, end=None):
        return [(k[:, start:end], v[:, start:end]) for k, v in zip(self.k, self.v, strict=True)]

    def after(self, prefix, tokens):
        """These tokens behind the first `tokens` of another."""
        self.tokens = np.concatenate([prefix.tokens[:tokens], self.tokens])
        for name in ("k", "v", "q"):
            both = [getattr(prefix, name)[:, :, :tokens], getattr(self, name)]
            setattr(self, name, np.concatenate(both, axis=2))
        return self


@pytest.fixture
def peaked(spec, make_kv):
    return lambda n, seed=0: Peaked(make_kv(spec, n, seed))


def load(engine, kv, name, end):
    start = (writing := engine.begin_import(kv.spec, kv.tokens[:end], name)).start
    for layer, (k, v) in enumerate(kv.pairs(start, end)):
        writing.write(layer, k, v)
    return writing.commit()


def attend(session, kv, layer, begin, end, wanted):
    """`session.attend` of tokens [begin, end)."""
    now = slice(begin, end)
    return session.attend(layer, kv.q[layer][:, now], kv.k[layer][:, now], kv.v[layer][:, now], wanted, begin)


def expected(kv, layer, begin, end, searched, alpha=ALPHA):
    """Attention of tokens [begin, end) over everything outside of the searched ranges, and what Dipr wants of these."""
    scale = kv.spec.softmax_scale
    q, k, v = (x[layer][:, :end].astype(np.float64) for x in (kv.q, kv.k, kv.v))
    group = kv.spec.q_heads // kv.spec.kv_heads
    position = np.arange(begin, end)[:, None]
    logits = scale * np.einsum("hnd,htd->hnt", q[:, begin:end], k.repeat(group, axis=0))
    logits = np.where(np.arange(end)[None] <= position, logits, -np.inf)
    unwanted = logits < logits.max(axis=-1, keepdims=True) + np.log(alpha)
    inside = np.zeros(end, bool)
    for first, last in searched:
        inside[first:last] = True
    logits = np.where(unwanted & inside, -np.inf, logits)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("hnt,htd->hnd", weights / weights.sum(-1, keepdims=True), v.repeat(group, axis=0))


def sealed(tail):
    """How many tokens of a tail that grew one by one are indexed."""
    return max(0, (tail - RECENT) // TAIL * TAIL)


def check(out, kv, layer, begin, end, searched):
    assert relative_error(out, expected(kv, layer, begin, end, searched)) <= TOLERANCE[kv.spec.dtype]


CUT, STORED = 500, 1100
SEARCHED = [(16, 496), (500, 1076)]
"""The searched ranges over 500 tokens of one segment and 600 of another: whole blocks outside of the window."""


@pytest.fixture
def document(engine, peaked):
    """1100 tokens in two segments, of the first of which 500 of 800 are seen, and 200 more to come."""
    first = peaked(800)
    load(engine, first, "first", 800)
    kv = peaked(800, seed=1).after(first, CUT)
    info = load(engine, kv, "document", STORED)
    assert info.segments == 2
    return kv


def test_two_segments_and_a_tail_that_is_sealed_are_searched_as_one(engine, document):
    engine.build_index("document", "flat")
    with_index = engine.create_session(document.spec, document.tokens[:STORED])
    assert with_index.reused == STORED
    for at in range(STORED, STORED + 120):
        out = attend(with_index, document, 0, at, at + 1, ASKED["dipr"])
        check(out, document, 0, at, at + 1, [*SEARCHED, (STORED, STORED + sealed(at + 1 - STORED))])
    stats = with_index.stats()
    assert sum(stats.rules.values()) == 120
    assert set(stats.rules) == {"first_layers", "cheapest_scan"}  # until its queries are known
    assert 0 < stats.missed_mass <= stats.missed_mass_bound <= stats.missed_mass_bound_max < 1
    assert stats.tokens_retrieved < stats.tokens_scanned
    assert str(with_index.explain(0, ASKED["dipr"])).count("Index Search using flat") == 3
    with_index.close()


def test_several_queries_in_one_call_see_up_to_themselves(engine, document):
    engine.build_index("document", "flat")
    session = engine.create_session(document.spec, document.tokens[:STORED])
    at, tail_index = STORED, 0
    for n in (5, 60, 1, 9, 40, 3, 3):
        out = attend(session, document, 1, at, at + n, ASKED["dipr"])
        if at > STORED:
            tail = at + n - STORED
            tail_index += max(0, (tail - RECENT - tail_index) // TAIL * TAIL) if tail - tail_index >= TAIL + RECENT else 0
        searched = [*SEARCHED, (STORED, STORED + tail_index)] if n <= at + n - STORED - tail_index else []
        searched = searched if n <= 16 else SEARCHED  # a prompt attends to itself exactly
        found, whole = (expected(document, 1, at, at + n, spans) for spans in (searched, []))
        errors = [np.linalg.norm(out - right, axis=2) / np.linalg.norm(right, axis=2) for right in (found, whole)]
        assert np.minimum(*errors).max() <= TOLERANCE["float32"]  # a query that wants many tokens is answered by all
        assert (errors[0] <= TOLERANCE["float32"]).mean() > 0.95
        at += n
    session.close()


def test_queries_of_stored_tokens_search_what_all_of_them_see(engine, document):
    """Without a tail; the window's recent tokens lie behind what is searched."""
    engine.build_index("document", "flat")
    session = engine.create_session(document.spec, document.tokens[:STORED])
    for n in (1, RECENT, STORED - SEARCHED[-1][1], STORED - SEARCHED[-1][1] + 1):
        at = STORED - n
        out = session.attention(1, document.q[1][:, at:STORED], ASKED["dipr"])
        searched = SEARCHED if n <= STORED - SEARCHED[-1][1] else []
        check(out, document, 1, at, STORED, searched)
    session.close()


def test_forks_search_their_own_tails(engine, document, peaked):
    engine.build_index("document", "flat")
    other = peaked(150, seed=9).after(document, STORED + 70)
    session = engine.create_session(document.spec, document.tokens[:STORED])
    for at in range(STORED, STORED + 70):
        attend(session, document, 0, at, at + 1, ASKED["dipr"])
    twin = session.fork()
    for at in range(STORED + 70, STORED + 150):
        for one, kv in ((session, document), (twin, other)):
            out = attend(one, kv, 0, at, at + 1, ASKED["dipr"])
            tail = 0 if one is twin and at == STORED + 70 else sealed(at + 1 - STORED)
            check(out, kv, 0, at, at + 1, [*SEARCHED, (STORED, STORED + tail)])
    session.close()
    for at in range(STORED + 150, STORED + 155):
        out = attend(twin, other, 0, at, at + 1, ASKED["dipr"])
        check(out, other, 0, at, at + 1, [*SEARCHED, (STORED, STORED + sealed(at + 1 - STORED))])
    twin.close()


def test_without_an_index_everything_is_read_and_the_tail_is_searched(engine, document):
    session = engine.create_session(document.spec, document.tokens[:STORED])
    for at in range(STORED, STORED + 60):
        out = attend(session, document, 0, at, at + 1, ASKED["dipr"])
        check(out, document, 0, at, at + 1, [(STORED, STORED + sealed(at + 1 - STORED))])
    session.close()


def test_an_index_that_appears_is_used_from_then_on(engine, document):
    session = engine.create_session(document.spec, document.tokens[:STORED])
    attend(session, document, 0, STORED, STORED + 1, ASKED["dipr"])
    assert session.explain(0, ASKED["dipr"]).rule == "no_index"
    engine.build_index("document", "flat")
    assert session.explain(0, ASKED["dipr"]).rule == "first_layers"
    out = attend(session, document, 0, STORED + 1, STORED + 2, QueryOptions())
    assert relative_error(out, expected(document, 0, STORED + 1, STORED + 2, [])) <= 1e-5  # nothing is proven
    out = attend(session, document, 0, STORED + 2, STORED + 3, ASKED["dipr"])
    check(out, document, 0, STORED + 2, STORED + 3, SEARCHED)
    assert session.stats().rules == {"no_index": 1, "error_budget": 1, "first_layers": 1}
    session.close()


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("share", [0.3, 0.02, 1e-4, 1e-9])
def test_a_bound_on_the_missed_mass_holds(engine, document, asked, share):
    engine.build_index("document", "flat")
    session = engine.create_session(document.spec, document.tokens[:STORED])
    for at in range(STORED, STORED + 12):
        out = attend(session, document, 0, at, at + 1, QueryOptions(ASKED[asked].retrieval, share))
        dense, _ = attention(
            document.q[0][:, at : at + 1], document.k[0][:, : at + 1], document.v[0][:, : at + 1], document.spec.softmax_scale
        )
        spread = np.abs(document.v[0][:, : at + 1]).max()
        assert np.abs(out - dense).max() <= 2 * share * spread + 1e-4
    stats = session.stats()
    assert stats.missed_mass_bound_max <= share
    session.close()


def test_a_bound_alone_searches_too(engine, document):
    engine.build_index("document", "flat")
    session = engine.create_session(document.spec, document.tokens[:STORED])
    assert str(session.explain(0, QueryOptions(max_missed_mass=0.1)).retrieval) == "dipr(0.012)"
    session.close()


@pytest.mark.parametrize("asked", ASKED)
def test_an_estimated_tail_brings_the_output_nearer(engine, document, asked):
    """The stand-in's estimate is the truth, so nothing is missing."""
    engine.build_index("document", "flat")
    session = engine.create_session(document.spec, document.tokens[:STORED])
    for at in range(STORED, STORED + 60):
        out = attend(session, document, 0, at, at + 1, QueryOptions(ASKED[asked].retrieval, estimate_tail=True))
        seen = slice(0, at + 1)
        scale = document.spec.softmax_scale
        dense, _ = attention(document.q[0][:, at : at + 1], document.k[0][:, seen], document.v[0][:, seen], scale)
        assert relative_error(out, dense) <= 1e-4
    session.close()


@pytest.mark.parametrize("k", [1, 7, 10**30])
def test_the_largest_k_of_all_segments_are_read(engine, document, k):
    engine.build_index("document", "flat")
    session = engine.create_session(document.spec, document.tokens[:STORED])
    out = attend(session, document, 0, STORED, STORED + 1, QueryOptions(TopK(k)))
    group, scale = 2, document.spec.softmax_scale
    at = STORED + 1
    keys, values = (x[0][:, :at].astype(np.float64).repeat(group, axis=0) for x in (document.k, document.v))
    logits = scale * np.einsum("hd,htd->ht", document.q[0][:, STORED].astype(np.float64), keys)
    inside = np.zeros(at, bool)
    for first, last in SEARCHED:
        inside[first:last] = True
    for head, row in enumerate(logits):
        kth = np.sort(row[inside])[::-1][min(k, inside.sum()) - 1]
        weights = np.where(~inside | (row >= kth - 1e-9), np.exp(row - row.max()), 0)
        assert relative_error(out[head, 0], weights @ values[head] / weights.sum()) <= 1e-5
    session.close()


def test_a_prompt_that_ends_before_the_window_is_read_whole(engine, document):
    """The searched range is shorter than what is worth a search."""
    engine.build_index("document", "flat")
    session = engine.create_session(document.spec, document.tokens[:90])
    assert session.explain(0, ASKED["dipr"]).accesses[0].index is None
    out = attend(session, document, 0, 90, 91, ASKED["dipr"])
    check(out, document, 0, 90, 91, [])
    session.close()


def test_a_stored_session_hands_its_queries_to_the_indexes(engine, document):
    session = engine.create_session(document.spec, document.tokens[:STORED])
    for layer in range(document.spec.layers):
        attend(session, document, layer, STORED, STORED + 130, QueryOptions())
    session.store("longer", document.tokens[: STORED + 130])
    session.close()
    built = engine.build_index("longer", "flat")
    assert [(info.tokens, info.layers) for info in built] == [(800, 2), (600, 2), (130, 2)]
    with closing(engine.create_session(document.spec, document.tokens[: STORED + 130])) as session:
        query_samples = [view.segment.indexes.of(0)["flat"].query_samples for view in session.views]
    assert query_samples[0] is None
    assert query_samples[1] is None
    assert query_samples[2].shape[::2] == (4, 16)
    assert 1 <= query_samples[2].shape[1] <= 128


def test_a_broken_index_is_found(engine, document):
    engine.build_index("document", "flat")
    assert engine.verify("document").indexes == 4
    with closing(engine.create_session(document.spec, document.tokens[:STORED])) as session:
        session.views[1].segment.indexes.of(1)["flat"].broken = "token 7 is not what it was"
    with pytest.raises(kvdb.errors.IntegrityError, match=r"segment \d+ does not fit its keys: token 7"):
        engine.verify("document")


def test_a_plan_for_each_of_many_retrievals_is_not_kept(engine, document):
    engine.build_index("document", "flat")
    session = engine.create_session(document.spec, document.tokens[:STORED])
    for i in range(1, 200):
        attend(session, document, 0, STORED + i - 1, STORED + i, QueryOptions(Dipr(i / 1000)))
    assert len(session._layers[0].planner._prepared) <= 64
    session.close()


def test_exact_stays_exact_beside_an_index(engine, document):
    engine.build_index("document", "flat")
    session = engine.create_session(document.spec, document.tokens[:STORED])
    out = attend(session, document, 0, STORED, STORED + 1, QueryOptions(Exact()))
    check(out, document, 0, STORED, STORED + 1, [])
    stats = session.stats()
    assert (stats.tokens_scanned, stats.tokens_retrieved, stats.missed_mass_bound_max) == (STORED + 1, STORED + 1, 0)
    session.close()


def test_the_facts_say_who_else_reads_a_segment_and_what_is_being_built(engine, document, monkeypatch):
    one, two = (engine.create_session(document.spec, document.tokens[:STORED]) for _ in range(2))
    twin = one.fork()

    def facts():
        planner = two._layers[0].planner
        return planner._facts(1, QueryOptions(), planner._parts(1, QueryOptions())).parts

    assert [part.sessions for part in facts()] == [3, 3]
    twin.close()
    one.close()
    assert [part.sessions for part in facts()] == [1, 1]
    released = threading.Event()

    class Slow(Scan):
        @classmethod
        def build(cls, blocks, query_samples=None):
            assert released.wait(10)
            return super().build(blocks, query_samples)

    monkeypatch.setattr(registry, "KINDS", {**registry.KINDS, "flat": Slow})
    engine.build_index("document", "flat", wait=False)
    until(lambda: any(part.building for part in facts()))
    assert {part.building for part in facts()} <= {(), ("flat",)}
    verbose = two.explain(0, QueryOptions(Dipr())).explain(verbose=True)
    assert "no index yet, it is being built" in verbose  # of whatever kind
    assert "no hnsw over it" in verbose
    released.set()
    engine.build_index("document", "flat")
    assert [part.building for part in facts()] == [(), ()]
    two.close()
