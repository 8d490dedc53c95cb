"""Chunks searched where they stand: the indexes of what is stored, asked with queries that were turned back, without what is
masked."""

from copy import copy

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.config import ServerConfig
from kvdb.server.serve import Server
from tests.database import BLOCK, RECENT, SINK, database, small_config
from tests.kvdb.blend.oracle import ROPES, Oracle, Text
from tests.reference import relative_error

ALPHA = 0.012
SIZES = {"a": (400, 0), "b": (330, 77), "c": (50, 0)}
PARTS = [[7000] * 9, "b", "c", "a", [7001], kvdb.PromptPart("b", visible=200), "a"]
VIEWS = [(9, "b", 330), (339, "c", 50), (389, "a", 400), (790, "b", 200), (990, "a", 400)]
START = 1390
GAPS = [*range(9), 789]
SHARP = 10.0
"""Few tokens matter, so that no search gives up."""


@pytest.fixture(params=["half", "yarn, interleaved"])
def spec(request, spec):
    """One layer, so that an oracle of every step is quick."""
    return kvdb.ModelSpec("one", 1, 4, 2, 16, "float32", ROPES[request.param])


@pytest.fixture
def engine():
    """A database in which everything is small."""
    with database(config=small_config(automatic=False, tail_tokens=0)) as opened:
        yield opened


def searched():
    """Which positions lie in whole blocks of long chunks, outside of the sinks and the recent tokens."""
    inside = np.zeros(START, bool)
    for begin, _, visible in VIEWS:
        first = max(0, -(-(SINK - begin) // BLOCK) * BLOCK)
        last = min(visible, START - RECENT - begin) // BLOCK * BLOCK
        if last - first >= 64:
            inside[begin + first : begin + last] = True
    return inside


class Laid:
    """A session over PARTS whose queries are sharp, and which of its tokens are overlaid."""

    def __init__(self, db, spec, kind):
        texts = {name: Text(spec, n, seed, base) for seed, (name, (n, base)) in enumerate(SIZES.items())}
        for name, text in texts.items():
            text.store(db, name)
            if text.n >= 64:
                (info,) = db.build_index(name, kind)
                assert info.state == "ready"
        known = [9, *((texts[name], visible) for _, name, visible in VIEWS[:3]), 1]
        self.oracle = Oracle(spec, [*known, *((texts[name], visible) for _, name, visible in VIEWS[3:])])
        self.db = db
        self.session = db.create_session(spec, parts=PARTS)
        self.inside = searched()
        self.fresh = Text(spec, 200, seed=42, sharp=SHARP)
        self.at = 0
        assert self.session.start == START

    def overlay(self, positions, seed=1):
        """These tokens, with the keys of others."""
        positions = np.sort(positions)
        other = Text(self.session.spec, len(positions), seed)
        self.session.overlay(0, positions, *other.pairs[0])
        self.oracle.overlay(0, positions, *other.pairs[0])
        self.inside[positions] = False

    def ask(self, n=1, **wanted):
        """Attention of the next n tokens; the answer and the logits of everything."""
        q, k, v = (x[0][:, self.at : self.at + n] for x in (self.fresh.q, self.fresh.k, self.fresh.v))
        self.at += n
        self.oracle.append(0, k, v)
        out = self.session.attend(0, q, k, v, **wanted)
        end = self.oracle.length(0)
        return out, self.oracle.logits(0, q, np.arange(end - n, end))

    def dipr(self, logits, alpha=ALPHA):
        unwanted = logits < logits.max(axis=-1, keepdims=True) + np.log(alpha)
        return self.oracle.output(0, np.where(unwanted & self._mask(logits), -np.inf, logits))

    def top_k(self, logits, k):
        mask = self._mask(logits)
        kth = -np.sort(-np.where(mask, logits, -np.inf), axis=-1)[..., k - 1 : k]
        return self.oracle.output(0, np.where(mask & (logits < kth - 1e-6), -np.inf, logits))

    def fork(self):
        twin = copy(self)
        twin.session, twin.oracle, twin.inside = self.session.fork(), self.oracle.copy(), self.inside.copy()
        return twin

    def largest(self, rows=4):
        """Positions of the searched tokens that the next queries look at most."""
        q = self.fresh.q[0][:, self.at : self.at + rows]
        logits = self.oracle.logits(0, q, np.full(rows, START))[..., :START]
        return np.unique(np.where(self.inside, logits, -np.inf).argmax(axis=-1))

    def _mask(self, logits):
        return np.concatenate([self.inside, np.zeros(logits.shape[-1] - START, bool)])


@pytest.fixture
def laid(engine, spec, scan_for_flat):
    laid = Laid(Client(engine), spec, "flat")
    yield laid
    laid.session.close()


@pytest.mark.parametrize("n", [1, 5])
def test_a_range_over_moved_chunks_is_the_oracles(laid, n):
    laid.overlay(GAPS)
    for _ in range(4):
        out, logits = laid.ask(n, retrieval=kvdb.Dipr(ALPHA))
        assert relative_error(out, laid.dipr(logits)) <= 1e-5
    assert laid.session.stats().tokens_retrieved < laid.session.stats().queries * 400


def test_masked_tokens_are_not_found_and_their_overlays_are_read(laid):
    """The tokens that the queries look at most are overlaid, more at a time."""
    laid.overlay(GAPS)
    for step in range(5):
        chosen = laid.largest()
        assert len(chosen) > 3
        laid.overlay(chosen, seed=step)
        out, logits = laid.ask(retrieval=kvdb.Dipr(ALPHA))
        assert relative_error(out, laid.dipr(logits)) <= 1e-5


@pytest.mark.parametrize("k", [1, 10, 40])
def test_the_largest_of_all_moved_chunks(laid, k):
    laid.overlay([*GAPS, *laid.largest()])
    for n in (1, 3):
        out, logits = laid.ask(n, retrieval=kvdb.TopK(k))
        assert relative_error(out, laid.top_k(logits, k)) <= 1e-5


def test_whole_segments_are_masked(laid):
    """All of a chunk, all but one token of another."""
    laid.overlay([*GAPS, *range(389, 789), *range(790, 989)])
    for n in (1, 4):
        out, logits = laid.ask(n, retrieval=kvdb.Dipr(ALPHA))
        assert relative_error(out, laid.dipr(logits)) <= 1e-5


def test_a_bound_on_the_missed_mass_holds(laid):
    laid.overlay([*GAPS, *laid.largest()])
    for share in (0.1, 1e-3):
        out, logits = laid.ask(retrieval=kvdb.TopK(3), max_missed_mass=share)
        spread = np.abs(laid.oracle.values[0][:, :START]).max()
        assert np.abs(out - laid.oracle.output(0, logits)).max() <= 2 * share * spread + 1e-4


def test_a_piece_of_the_prompt_searches_what_was_laid_out(laid):
    laid.overlay([*GAPS, *laid.largest()])
    for n in (40, 17):
        out, logits = laid.ask(n, retrieval=kvdb.Dipr(ALPHA))
        assert relative_error(out, laid.dipr(logits)) <= 1e-5
        assert relative_error(out, laid.oracle.output(0, logits)) > 1e-5


def test_explain_says_how_each_chunk_is_searched(laid):
    laid.overlay([*GAPS, 400, 401])
    laid.ask(retrieval=kvdb.Dipr(ALPHA))
    plan = str(laid.session.explain(0, retrieval=kvdb.Dipr(ALPHA)))
    assert plan.count("Index Search using flat") == 4
    for line in (
        "Shift: -68 positions, by rotating the query",  # "b" of base 77, at 9
        "Shift: +389 positions, by rotating the query",
        "Shift: +713 positions, by rotating the query",
        "Filter: 2 recomputed tokens are masked",
        "Filter: the first 200 of 330 tokens are visible",
        "Exact Scan on overlay",
    ):
        assert line in plan
    analyzed = laid.session.explain(0, retrieval=kvdb.Dipr(ALPHA), analyze=True)
    assert analyzed.outcome is not None


def test_a_fork_masks_what_it_overlaid_itself(laid):
    laid.overlay(GAPS)
    twin = laid.fork()
    laid.overlay(laid.largest())
    for one in (laid, twin, laid):
        out, logits = one.ask(retrieval=kvdb.Dipr(ALPHA))
        assert relative_error(out, one.dipr(logits)) <= 1e-5
    twin.overlay(twin.largest(), seed=5)
    for one in (laid, twin):
        out, logits = one.ask(retrieval=kvdb.Dipr(ALPHA))
        assert relative_error(out, one.dipr(logits)) <= 1e-5
    twin.session.close()


def test_a_refused_overlay_does_not_leave_plans_for_blocks_that_were_given_back(laid):
    """It may have copied the block that a fork shared; the fork's is then reused by others."""
    laid.overlay(GAPS)
    laid.ask(retrieval=kvdb.Dipr(ALPHA))
    twin = laid.fork()
    bad = np.full((2, 1, 16), np.nan, np.float32)
    with pytest.raises(kvdb.errors.NonFiniteError):
        laid.session.overlay(0, [500], bad, bad)
    twin.session.close()
    other = Text(laid.session.spec, 200, seed=6)
    with laid.db.create_session(laid.session.spec, []) as reuses:
        reuses.update(0, *other.pairs[0])
        out, logits = laid.ask(retrieval=kvdb.Dipr(ALPHA))
    assert relative_error(out, laid.dipr(logits)) <= 1e-5


@pytest.fixture(params=["embedded", "remote"])
def client(request, engine):
    if request.param == "embedded":
        yield Client(engine)
        return
    server = Server(engine, ServerConfig(port=0))
    server.start()
    with kvdb.connect(server.target) as db:
        yield db
    server.stop(grace=0)


@pytest.mark.parametrize("kind", ["flat", "coarse-clusters", "hnsw"])
def test_every_kind_of_index_searches_moved_chunks(client, spec, kind):
    """The tokens that matter most are found; those that were recomputed are not, though they would matter most of all."""
    laid = Laid(client, spec, kind)
    laid.overlay(GAPS)
    hints = kvdb.Hints(index=kind)
    for step in range(4):
        out, logits = laid.ask(retrieval=kvdb.Dipr(ALPHA), hints=hints)
        assert relative_error(out, laid.dipr(logits)) <= (1e-5 if kind == "flat" else 0.05)
        laid.overlay(laid.largest(), seed=step)
    out, logits = laid.ask(retrieval=kvdb.TopK(20), hints=hints)
    assert relative_error(out, laid.top_k(logits, 20)) <= (1e-5 if kind == "flat" else 0.1)
    assert f"Index Search using {kind}" in str(laid.session.explain(0, hints=hints, retrieval=kvdb.Dipr(ALPHA)))
    laid.session.close()
