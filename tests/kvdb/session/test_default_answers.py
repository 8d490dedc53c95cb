"""What a query gets that names nothing: answers close to exact attention, whatever indexes stand."""

import numpy as np
import pytest

import kvdb
from indexes.retrieval import Dipr
from kvdb.errors import NonFiniteError
from query_optimizer.query_options import Hints, QueryOptions
from tests.database import database, searching_config
from tests.reference import attention, relative_error

TOKENS, DIM, SINK_DIM, FEW_DIM = 4096, 32, 0, 1
SPEC = kvdb.ModelSpec("sinks", layers=1, q_heads=4, kv_heads=2, head_dim=DIM, dtype="float32")
NOTHING = QueryOptions()
ERROR_MAX = 0.02
KINDS = ["flat", "coarse-bounds", "coarse-clusters", "hnsw"]


@pytest.fixture
def engine():
    with database(config=searching_config()) as opened:
        yield opened


class Document:
    """Keys whose first token is an attention sink with a small value, as trained models have them, and a few that matter."""

    def __init__(self, engine, kind, few=8):
        rng = np.random.default_rng(1)
        self.rng = rng
        self.k = rng.standard_normal((2, TOKENS, DIM)).astype(np.float32)
        self.v = rng.standard_normal((2, TOKENS, DIM)).astype(np.float32)
        self.few = rng.choice(np.arange(300, TOKENS - 300), few, replace=False)
        self.k[:, :, SINK_DIM] = self.k[:, :, FEW_DIM] = 0
        self.k[:, 0] = 0
        self.k[:, 0, SINK_DIM] = self.k[:, self.few, FEW_DIM] = 1
        self.v[:, 0] *= 0.001
        writing = engine.begin_import(SPEC, np.arange(TOKENS, dtype=np.int32), "doc")
        writing.write(0, self.k, self.v)
        writing.commit()
        engine.build_index("doc", kind)
        self.session = engine.create_session(SPEC, np.arange(TOKENS, dtype=np.int32))

    def query(self, sink, few, spread=1.0):
        """A query whose weight on the sink, and on each of the few, is so many times that of all others together."""
        others = np.log(TOKENS)
        q = (self.rng.standard_normal((4, 1, DIM)) * spread).astype(np.float32)
        q[..., SINK_DIM] = (others + np.log(sink)) / SPEC.softmax_scale if sink else 0
        q[..., FEW_DIM] = (others + np.log(few)) / SPEC.softmax_scale if few else 0
        return q

    def error(self, q, options=NOTHING):
        """The largest relative error of any head."""
        out, right = self.session.attention(0, q, options), attention(q, self.k, self.v, SPEC.softmax_scale)[0]
        return max(relative_error(out[head], right[head]) for head in range(len(q)))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_with_a_sink_are_searched_by_their_range_behind_it(engine, kind):
    """A token that matters weighs a 600th of the sink, far below the range from the sink."""
    document = Document(engine, kind)
    for _ in range(20):
        assert document.error(document.query(sink=2e4, few=30)) <= ERROR_MAX
    forced = QueryOptions(hints=Hints(index=kind))
    if kind == "flat":  # the others read pages, or cannot be sure
        before = document.session.stats().tokens_retrieved
        assert document.error(document.query(sink=2e4, few=30), forced) <= ERROR_MAX
        assert document.session.stats().tokens_retrieved - before < 0.5 * TOKENS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sink", [0, 0.05, 1, 20])
def test_diffuse_heads_with_a_sink_are_read_whole(engine, kind, sink):
    document = Document(engine, kind)
    for _ in range(20):
        assert document.error(document.query(sink, few=0, spread=0.5)) <= ERROR_MAX
    assert document.session.stats().missed_mass <= 0.01


@pytest.mark.parametrize("sink", [0, 1])
def test_a_search_that_would_miss_much_is_never_served(engine, sink):
    """One token weighs a hundred times as much as each other one, which together are most of the mass."""
    document = Document(engine, "flat", few=1)
    for _ in range(100):
        assert document.error(document.query(sink, few=200 / TOKENS, spread=0.1)) <= ERROR_MAX
    assert document.session.stats().missed_mass <= 0.01


def test_a_head_that_finds_much_is_read_whole_and_the_others_are_not(engine):
    """The first KV head needs few tokens; the second a third of all."""
    document = Document(engine, "flat")
    q = document.query(sink=0, few=1e4)
    q[2:] = document.query(sink=0, few=0, spread=0.01)[2:]
    assert document.error(q, QueryOptions(Dipr(0.012))) <= ERROR_MAX
    stats = document.session.stats()
    assert stats.tokens_retrieved < 0.8 * TOKENS * stats.queries


def test_a_named_range_stays_literal(engine):
    """The sink is the largest score of all, so a range from it holds nothing else that is searched."""
    document = Document(engine, "flat")
    assert document.error(document.query(sink=2e4, few=30), QueryOptions(Dipr(0.012))) > 0.5


def test_estimates_are_made_only_where_the_caller_says_so(engine):
    """The rest of a diffuse head can be estimated, and is not proven to be good enough."""
    document = Document(engine, "coarse-clusters", few=1)
    for _ in range(40):
        document.session.attention(0, document.query(sink=0, few=0, spread=0.3))
    assert not any(access.estimate_tail for access in document.session.explain(0).accesses)
    assert document.error(document.query(sink=0, few=1)) <= ERROR_MAX


def test_sinks_in_a_tail_that_is_indexed(engine):
    """A session that stands on nothing: the sink is the first token of its own."""
    document = Document(engine, "flat")
    session = engine.create_session(SPEC, np.zeros(0, np.int32))
    session.update(0, document.k, document.v)
    for _ in range(4):
        q = document.query(sink=2e4, few=30)
        right = attention(q, document.k, document.v, SPEC.softmax_scale)[0]
        assert relative_error(session.attention(0, q), right) <= ERROR_MAX
    assert session.explain(0, QueryOptions(hints=Hints(index="flat"))).searches
    session.close()


@pytest.mark.parametrize("options", [NOTHING, QueryOptions(Dipr())], ids=["nothing", "a range"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", ["flat", "coarse-bounds"])
def test_scores_that_float32_cannot_hold_are_an_error_beside_an_index_too(engine, kind, options, sign):
    document = Document(engine, kind)
    with pytest.raises(NonFiniteError):
        document.session.attention(0, np.full((4, 1, DIM), sign * 3e38, np.float32), options)
