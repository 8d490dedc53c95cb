"""Steps of several sessions in one native call: the answers of each session alone, all or none, whatever they share."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdb
import kvdb._native as _native
from kvdb.attention.shared_prefix import SHARED_TOKENS_MIN
from kvdb.config import Config, IndexConfig, StorageConfig
from tests.reference import TOLERANCE, attention, relative_error

STORED, SHARED, STEPS = 5000, 3000, 6
SPEC = kvdb.ModelSpec("m", 1, 4, 2, 32, "float32")
ASKED = {
    "exact": kvdb.QueryOptions(kvdb.Exact()),
    "estimate": kvdb.QueryOptions(kvdb.TopK(16), estimate_tail=True, hints=kvdb.Hints(index="quantized")),
    "k largest": kvdb.QueryOptions(kvdb.TopK(16), hints=kvdb.Hints(index="flat")),
    "range": kvdb.QueryOptions(kvdb.Dipr(0.1), hints=kvdb.Hints(index="flat")),
    "pages": kvdb.QueryOptions(kvdb.Dipr(0.1), hints=kvdb.Hints(index="coarse-bounds")),
    "graph": kvdb.QueryOptions(kvdb.Dipr(0.1), hints=kvdb.Hints(index="hnsw")),
}
EXACT_SETS = {"range", "k largest", "pages"}
"""What these retrieve does not depend on who else asks. Of the others a graph may find more where several walk together."""


class Documents:
    """Two documents that begin alike, with all indexes, and the tokens behind them; the second has no index of its own."""

    def __init__(self, db):
        self.db = db
        rng = np.random.default_rng(0)
        total = STORED + 64
        q, k, v = (rng.standard_normal((2, h, total, 32)).astype(np.float32) for h in (4, 2, 2))
        q *= 3  # so that few tokens are in range
        k[1, :, :SHARED], v[1, :, :SHARED] = k[0, :, :SHARED], v[0, :, :SHARED]
        self.q, self.k, self.v = q, k, v
        self.ids = np.stack([np.arange(total), np.arange(total)])
        self.ids[1, SHARED:] += total
        for number in range(2):
            held = k[number][:, :STORED], v[number][:, :STORED]
            db.import_context(SPEC, self.ids[number, :STORED], [held], name=str(number))
        for kind in ("quantized", "flat", "coarse-bounds", "hnsw"):
            db.build_index("0", kind)

    def open(self, number, tail):
        """A session on a document, and `tail` tokens of its own."""
        session = self.db.create_session(SPEC, self.ids[number, :STORED])
        if tail:
            session.update(0, self.k[number][:, STORED : STORED + tail], self.v[number][:, STORED : STORED + tail])
        return session


@pytest.fixture(scope="module")
def documents():
    config = Config(indexes=IndexConfig(on_demand="", automatic=False, sample_queries=4), storage=StorageConfig(block_size=16))
    with kvdb.connect(config=config) as db:
        yield Documents(db)


@pytest.fixture
def native_calls(monkeypatch):
    """How each call of several native steps ended."""
    ends, take = [], _native.take_steps
    monkeypatch.setattr(_native, "take_steps", lambda *given: ends.append(take(*given)) or ends[-1])
    return ends


def turns(documents, who, tails, step):
    """q, k, v of the next token of each session."""
    at = [STORED + tail + step for tail in tails]
    return tuple(
        np.stack([x[number][:, i : i + 1] for number, i in zip(who, at, strict=True)])
        for x in (documents.q, documents.k, documents.v)
    )


sessions_of = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1]), st.integers(0, 20)), min_size=2, max_size=9)


@pytest.mark.parametrize("asked", ASKED)
@settings(max_examples=5, deadline=None)
@given(drawn=sessions_of, shared_min=st.sampled_from([0, SHARED_TOKENS_MIN, 1 << 20]))
def test_they_are_those_of_each_session_alone(documents, asked, drawn, shared_min):
    who, tails = zip(*drawn, strict=True)
    together, alone = ([documents.open(*one) for one in drawn] for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for where in ("step", "host_steps"):
            patch.setattr(f"kvdb.session.{where}.SHARED_TOKENS_MIN", shared_min)
        for step in range(STEPS):
            q, k, v = turns(documents, who, tails, step)
            out = documents.db.attend(together, 0, q, k, v, options=ASKED[asked])
            for i, session in enumerate(alone):
                own = session.attend(0, q[i], k[i], v[i], options=ASKED[asked])
                if asked != "graph":
                    assert relative_error(out[i], own) <= (2e-3 if asked == "estimate" else TOLERANCE["float32"])
                if asked == "exact":
                    held = (x[who[i]][:, : STORED + tails[i] + step + 1] for x in (documents.k, documents.v))
                    assert relative_error(out[i], attention(q[i], *held, SPEC.softmax_scale)[0]) <= TOLERANCE["float32"]
    for one, other in zip(together, alone, strict=True):
        mine, theirs = one.stats(), other.stats()
        assert (mine.queries, mine.tail_tokens) == (theirs.queries, theirs.tail_tokens)
        if asked in EXACT_SETS:
            assert mine.tokens_retrieved == pytest.approx(theirs.tokens_retrieved, rel=1e-9)
        assert mine.tokens_retrieved >= 0.97 * theirs.tokens_retrieved
        samples = [session._transport._layers[0].query_samples for session in (one, other)]
        assert (samples[0].last == samples[1].last).all()
        assert (samples[0].all() == samples[1].all()).all()
        one.close()
        other.close()


@pytest.mark.parametrize("asked", ASKED)
def test_one_refusal_leaves_all_as_they_were(documents, native_calls, asked):
    drawn = [(0, 3), (0, 5), (1, 0), (0, 9)]
    who, tails = zip(*drawn, strict=True)
    sessions, twins = ([documents.open(*one) for one in drawn] for _ in range(2))
    attend = partial(documents.db.attend, options=ASKED[asked])
    for step in range(2):
        for all_of_them in (sessions, twins):
            attend(all_of_them, 0, *turns(documents, who, tails, step))
    before = len(native_calls)
    for what, last in ((0, 0), (1, 3), (2, 2)):
        spoiled = turns(documents, who, tails, 2)
        spoiled[what][last, 0, 0, 5] = np.nan
        with pytest.raises(kvdb.KvdbError, match=str(last)):
            attend(sessions, 0, *spoiled)
    with pytest.raises(kvdb.KvdbError):
        attend(sessions, 0, *turns(documents, who, tails, 2), starts=[0] * 4)
    assert not any(native_calls[before:])
    for step in range(2, 5):
        turn = turns(documents, who, tails, step)
        outs = attend(sessions, 0, *turn), attend(twins, 0, *turn)
        assert asked == "graph" or relative_error(*outs) <= (2e-3 if asked == "estimate" else TOLERANCE["float32"])
    for session, twin in zip(sessions, twins, strict=True):
        assert session.stats().queries == twin.stats().queries
        session.close()
        twin.close()


@pytest.mark.parametrize("asked", ASKED)
def test_most_of_them_need_nothing_of_python(documents, native_calls, asked):
    sessions = [documents.open(0, 0) for _ in range(3)]
    for step in range(14):
        documents.db.attend(sessions, 0, *turns(documents, [0] * 3, [0] * 3, step), options=replace(ASKED[asked]))
    assert native_calls.count(True) >= 11
    for session in sessions:
        session.close()


def test_the_search_of_what_they_share_is_made_once(documents):
    """What is scanned counts for all of them together, so each scans its part."""
    sessions = [documents.open(0, 0) for _ in range(4)]
    for step in range(3):
        documents.db.attend(sessions, 0, *turns(documents, [0] * 4, [0] * 4, step), options=ASKED["range"])
    before = [session.stats().tokens_scanned for session in sessions]
    documents.db.attend(sessions, 0, *turns(documents, [0] * 4, [0] * 4, 3), options=ASKED["range"])
    for session, had in zip(sessions, before, strict=True):
        assert session.stats().tokens_scanned - had < STORED / 2
        session.close()
