"""A step answers alike whichever way its indexes are asked, and several queries at once as each alone."""

from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import indexes.registry as registry
import kvdb
from indexes.retrieval import Dipr, Exact, Retrieval, TopK, TopP
from kvdb.attention.block_run import BlockRun, Span
from kvdb.attention.exact import AttentionStats
from kvdb.attention.observation import Observation
from kvdb.attention.partition import ExactSpan, RunPartition, SearchedSpan
from kvdb.attention.query import AttentionQuery
from kvdb.attention.sparse import sparse
from kvdb.attention.step import prepared_step
from kvdb.blend.rope_shift import Turn
from kvdb.config import StorageConfig
from kvdb.storage.store import BlockStore
from query_optimizer.query_options import QueryOptions
from tests.kvdb.attention.observed import assert_same_observations
from tests.reference import TOLERANCE, attention, relative_error

BLOCK, TOKENS, TAIL, SINKS = 16, 640, 21, 16
SPEC = kvdb.ModelSpec("m", 1, 6, 3, 16, "float32")
ANGLES = np.linspace(0.1, 3, 6)
SCALE = SPEC.softmax_scale
KINDS = list(registry.KINDS)
TURN = Turn(*(np.array(part, np.float32) for part in (np.cos(ANGLES), np.sin(ANGLES))), interleaved=False)
RETRIEVALS: list[Retrieval] = [Dipr(0.3), Dipr(0.01), TopK(7), TopK(90), TopP(0.4), Exact()]


@dataclass
class Layer:
    """Two segments of 640 tokens and a tail of 21, whose last 5 tokens are appended with the first query."""

    store: BlockStore = field(default_factory=lambda: BlockStore(StorageConfig(block_size=BLOCK, arena_bytes=1 << 20)))

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        n = 2 * TOKENS + TAIL
        self.q = rng.standard_normal((6, 1, 16)).astype(np.float32) * 3
        self.k, self.v = (rng.standard_normal((3, n, 16)).astype(np.float32) for _ in range(2))
        self.tables = [self.store.tables(SPEC)[0] for _ in range(3)]
        for i, table in enumerate(self.tables):
            part = slice(i * TOKENS, (i + 1) * TOKENS if i < 2 else n)
            table.append(self.k[:, part], self.v[:, part])
        self.indexes = {kind: [registry.KINDS[kind].build(table.keys(TOKENS)) for table in self.tables[:2]] for kind in KINDS}

    def close(self) -> None:
        for table in self.tables:
            table.release()
        self.store.close()


@pytest.fixture(scope="module")
def layer():
    made = Layer()
    yield made
    made.close()


@dataclass(frozen=True)
class Case:
    """How a layer is divided, and what is asked of it."""

    kind: str
    retrieval: Retrieval
    estimate_tail: bool
    named: bool
    parts: int
    active: tuple[bool, ...] | None
    hidden: int | None
    guard: float | None
    turned: bool = False
    missed_max: float | None = None

    def partition(self, layer: Layer, heard: list[Observation] | None = None) -> RunPartition:
        """heard: receives what observed queries show."""
        active = None if self.active is None else np.array(self.active)
        hidden = None
        if self.hidden is not None:
            hidden = np.random.default_rng(self.hidden).integers(0, 1 << 63, TOKENS // 64, np.uint64)
        searched, whole = [], []
        for i in range(self.parts):
            span = Span(BLOCK, TOKENS - 2 * BLOCK, i * TOKENS // BLOCK)
            index = layer.indexes[self.kind][i]
            turn = TURN if self.turned and i == 0 else None
            observe = None if heard is None else heard.append
            asked = self.retrieval, active, self.estimate_tail, observe, turn, hidden
            searched.append(SearchedSpan(index, span, *asked))
            if active is not None:
                whole.append(ExactSpan(span, ~active))
        made = RunPartition(searched, BLOCK, whole, sinks=[(0, SINKS // BLOCK)])
        made.guards = None if self.guard is None else np.full(3, self.guard, np.float32)
        return made

    def query(self, layer: Layer, observed: bool = False, n: int = 1) -> AttentionQuery:
        """n: the number of queries, of the tail's last tokens."""
        run = BlockRun([(table, TOKENS) for table in layer.tables[:2]], layer.tables[2])
        options = QueryOptions(self.retrieval if self.named else None, max_missed_mass=self.missed_max)
        q = np.concatenate([layer.q[:, :1], np.random.default_rng(n).standard_normal((6, n - 1, 16)).astype(np.float32)], axis=1)
        return AttentionQuery(layer.tables[0].layout, run, q, SCALE, options, observed)


cases = st.builds(
    Case,
    st.sampled_from(KINDS),
    st.sampled_from(RETRIEVALS[:-1]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
    st.one_of(st.none(), st.tuples(*[st.booleans()] * 3).filter(any)),
    st.one_of(st.none(), st.integers(0, 9)),
    st.sampled_from([None, -0.5, -3.0]),
    st.booleans(),
    st.sampled_from([None, None, 0.999, 0.2]),
)


@given(cases, st.booleans())
@settings(max_examples=100, deadline=None)
def test_it_answers_alike_where_python_searches(layer, case, observed):
    """Kinds of index have a search for Python and one for native code, which find the same."""
    query, heard, told = case.query(layer, observed), [], []
    native = sparse(query, case.partition(layer, heard), case.retrieval)
    with patch("indexes.searcher._own", lambda *_: None):
        right = sparse(query, case.partition(layer, told), case.retrieval)
    assert observed or not heard
    assert_same_observations(heard, told)
    assert relative_error(native[0].out, right[0].out) <= TOLERANCE["float32"]
    assert np.allclose(native[0].lse, right[0].lse, atol=1e-5)
    assert alike(native[1], right[1])


@given(cases, st.integers(2, TAIL))
@settings(max_examples=100, deadline=None)
def test_several_queries_are_answered_as_each_alone(layer, case, n):
    """Each sees what came before its token. Only where a search gives up, it may do so for other queries than alone."""
    query = case.query(layer, n=n)
    state, stats = sparse(query, case.partition(layer), case.retrieval)
    for i in range(n):
        tail = layer.tables[2].share()
        tail.truncate(TAIL - (n - 1 - i))
        run = BlockRun([(table, TOKENS) for table in layer.tables[:2]], tail)
        one = AttentionQuery(query.layout, run, query.q[:, i : i + 1], SCALE, query.options)
        alone, its = sparse(one, case.partition(layer), case.retrieval)
        tail.release()
        if np.array_equal(stats.given_up[:, i], its.given_up[:, 0]):
            assert relative_error(state.out[:, i], alone.out[:, 0]) <= TOLERANCE["float32"]
            assert np.allclose(state.lse[:, i], alone.lse[:, 0], atol=1e-5)
        else:
            assert case.kind != "quantized"


def alike(one: AttentionStats, other: AttentionStats) -> bool:
    for name in ("scanned", "retrieved", "nbytes", "missed", "missed_bound", "missed_bound_max"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-5, abs=1e-6), name
    assert len(one.searches) == len(other.searches)
    for mine, its in zip(one.searches, other.searches, strict=True):
        assert (mine.part.span, mine.retrieval) == (its.part.span, its.retrieval)
        assert np.array_equal(mine.result.ids, its.result.ids)
        assert its.result.dense is not None
        assert np.array_equal(mine.result.dense, its.result.dense)
    assert (one.missed_log is None) == (other.missed_log is None)
    return one.missed_log is None or np.allclose(one.missed_log, other.missed_log, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [None, 3])
def test_what_it_reads_and_estimates_is_everything(layer, kind, hidden):
    """With every token found, the answer is exact attention over what can be seen."""
    case = Case(kind, TopK(TOKENS), False, False, 1, None, hidden, None)
    partition, query = case.partition(layer), case.query(layer)
    with patch("kvdb.attention.step.FOUND_SHARE_MAX", 1.0):
        state, stats = sparse(query, partition, case.retrieval)
    seen = np.ones(layer.k.shape[1], bool)
    words = partition.searched[0].hidden
    if words is not None:
        bits = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
        seen[BLOCK : TOKENS - 2 * BLOCK] = ~bits[BLOCK : TOKENS - 2 * BLOCK]
    out, lse = attention(layer.q, layer.k[:, seen], layer.v[:, seen], SCALE)
    assert relative_error(state.out, out) <= 1e-5
    assert np.allclose(state.lse, lse, atol=1e-4)
    assert stats.missed == 0


def test_the_tail_grows_under_a_step_that_was_prepared_before():
    made = Layer()
    try:
        case = Case("quantized", TopK(TOKENS), True, False, 2, None, None, None)
        partition, query = case.partition(made), case.query(made)
        for n in (0, 1, 40):
            new = np.random.default_rng(n).standard_normal((2, 3, n, 16)).astype(np.float32)
            start = made.tables[2].length
            made.tables[2].append(*new)
            query.run.refresh(start)
            made.k, made.v = (np.concatenate([old, more], axis=1) for old, more in zip((made.k, made.v), new, strict=True))
            step = prepared_step(query, partition, case.retrieval)
            assert step is prepared_step(query, partition, case.retrieval)
            state, _ = sparse(query, partition, case.retrieval)
            out, _ = attention(made.q, made.k, made.v, SCALE)
            assert relative_error(state.out, out) <= 1e-5  # so many are found that all are read
    finally:
        made.close()
