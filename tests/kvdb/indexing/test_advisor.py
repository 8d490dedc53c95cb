"""Indexes that appear while sessions decode: because they pay, because a segment is opened often, or on demand."""

import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

import indexes.registry as registry
import kvdb
import kvdb.indexing.advisor as advisor
from benchmarks.workloads import Shape, generate
from indexes.base import BuildCost
from indexes.retrieval import Dipr, Exact
from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig, WindowConfig
from kvdb.database import Database
from kvdb.indexing.advisor import IndexAdvisor
from kvdb.indexing.builder import IndexBuilder
from kvdb.storage.budget import CpuBudget
from kvdb.storage.buffer_pool import BufferPool
from kvdb.storage.loader import Loader
from query_optimizer.build_policy import BuildPolicy
from query_optimizer.query_options import QueryOptions
from tests.reference import attention, relative_error
from tests.scan import Scan
from tests.waiting import SECONDS_MAX

SPEC = kvdb.ModelSpec("sharp", layers=1, q_heads=8, kv_heads=2, head_dim=64, dtype="bfloat16")
LONG, STEP_SECONDS_MAX = 4096, 2.0
ANYTHING, DIPR = QueryOptions(), QueryOptions(Dipr())


@pytest.fixture
def engine():
    """Behind `db`: nothing is built that the test did not ask for."""
    indexes = IndexConfig(on_demand="", automatic=False)
    with Database(Config(storage=StorageConfig(arena_bytes=1 << 20), indexes=indexes)) as database:
        yield database
        database.check_integrity()


@pytest.fixture(scope="module")
def work():
    return generate("sharp", Shape(LONG, kv_heads=2, group=4, head_dim=64), queries=4, query_samples=16)


def test_a_session_switches_to_better_indexes_without_a_pause(db, engine, work):
    """Decoding goes on while one kind after the other is built; every step is right, whatever answers it."""
    k, v = np.asarray(work.k), np.asarray(work.v)
    queries = [work.queries[:, i : i + 1].astype(k.dtype) for i in range(4)]
    db.import_context(SPEC, np.arange(LONG), [(k, v)], name="long")
    last = k[:, -1:], v[:, -1:]  # the token that asks, which is therefore there twice
    keys, values = (np.concatenate(pair, axis=1) for pair in zip((k, v), last, strict=True))
    exact = [attention(q, keys, values, SPEC.softmax_scale)[0] for q in queries]
    plans, slowest, at = [], 0.0, 0
    searching = kvdb.Hints(rules_off=("short_context", "diffuse_head"))  # however short the context
    with db.create_session(SPEC, np.arange(LONG)) as session:
        session.update(0, *last)
        for kind in ("", "coarse-bounds", "flat", "hnsw"):
            if kind:
                db.build_index("long", kind, wait=False)
            more = 20  # steps after it stands
            while more:
                started = time.perf_counter()
                out = session.attention(0, queries[at % 4], retrieval=kvdb.Dipr(0.01), hints=searching)
                slowest = max(slowest, time.perf_counter() - started)
                assert relative_error(out, exact[at % 4]) <= 0.05
                at += 1
                engine.wait_for_builds(1e-3)  # as long as a model computes between two layers, which builds can use
                ways = {access.index for access in session.explain(0, retrieval=kvdb.Dipr(0.01), hints=searching).accesses}
                if not plans or ways != plans[-1]:
                    plans.append(ways)
                more -= all(info.state == "ready" for info in db.indexes("long"))
    assert slowest < STEP_SECONDS_MAX
    assert plans[:2] == [{None}, {None, "coarse-bounds"}]
    db.drop("long")


@dataclass
class Priced(Scan):
    """An index that says it takes a millisecond to build and no time to search."""

    kind: ClassVar[str] = "priced"
    seconds: ClassVar[float] = 1e-3

    @classmethod
    def build_cost(cls, tokens, kv_heads, head_dim):
        return BuildCost(cls.seconds, float(tokens), 0.01)


@dataclass
class Dear(Priced):
    kind: ClassVar[str] = "dear"
    seconds: ClassVar[float] = 1e9


TOKENS = 300
CONFIG = Config(
    storage=StorageConfig(block_size=16, arena_bytes=1 << 20),
    optimizer=OptimizerConfig(short_context_tokens=64, rules_off=("short_context", "diffuse_head")),
    window=WindowConfig(8, 16),
    indexes=IndexConfig(on_demand="", segment_tokens_min=64),
)


@pytest.fixture
def opened(monkeypatch, make_kv, spec):
    """`opened(**indexes)`: a database with these settings of its indexes, over a document, and the document."""
    monkeypatch.setattr(registry, "KINDS", {"flat": Scan, "priced": Priced, "dear": Dear})
    monkeypatch.setattr(advisor, "STEP_SECONDS", 0.0)  # here everything is small
    databases = []

    def open_(**indexes):
        engine = Database(replace(CONFIG, indexes=replace(CONFIG.indexes, **indexes)))
        databases.append(engine)
        kv = make_kv(spec, TOKENS)
        writing = engine.begin_import(spec, kv.tokens, "doc")
        for layer, (k, v) in enumerate(kv.pairs()):
            writing.write(layer, k, v)
        writing.commit()
        return engine, kv

    yield open_
    for engine in databases:
        engine.close()


def ask(engine, kv, calls, options=ANYTHING, n=1):
    """A session over the document that asks so often of each layer, of n tokens each time."""
    session = engine.create_session(kv.spec, kv.tokens)
    for layer, (k, v) in enumerate(kv.pairs(0, n)):
        session.update(layer, k, v)
        for _ in range(calls):
            session.attention(layer, kv.q[layer][:, :n], options)
    session.close()


def built(engine):
    """The kinds that stand, or come to stand."""
    assert engine.wait_for_builds(SECONDS_MAX)
    return [info.kind for info in engine.indexes("doc")]


def segment_of(engine, kv):
    """The segment of the document, without a session counted for the look at it."""
    with closing(engine.create_session(kv.spec, kv.tokens)) as session:
        segment = session.views[0].segment
    segment.usage.opened -= 1
    return segment


@pytest.fixture
def counted_only(monkeypatch):
    """Queries are counted, and never a reason to build."""
    monkeypatch.setattr(IndexAdvisor, "review", lambda *_: None)


@pytest.fixture
def idle_builder():
    with closing(Loader(BufferPool(CpuBudget(None)))) as loader, closing(IndexBuilder(loader, threads=1)) as builder:
        yield builder


def test_what_queries_have_paid_for_is_built(opened, idle_builder):
    engine, kv = opened()
    segment = segment_of(engine, kv)
    ask(engine, kv, 10)
    assert built(engine) == []
    for _ in range(40):
        segment.usage.opened = 0  # not because it was opened often
        ask(engine, kv, 100)
        if built(engine):
            break
    assert built(engine) == ["priced"]
    advise = IndexAdvisor(idle_builder, BuildPolicy(), CONFIG.indexes)
    decisions = {decision.kind: decision.reason for decision in advise.decide(segment)}
    assert decisions.keys() == {"priced", "dear"}  # flat does not say what it costs
    assert decisions["priced"] == "it is built"


def test_a_segment_that_is_opened_often_gets_an_index(opened, monkeypatch):
    monkeypatch.setattr(Priced, "seconds", 1e-7)
    engine, kv = opened(opened_often=3)
    usage = segment_of(engine, kv).usage
    ask(engine, kv, 5)
    ask(engine, kv, 5)
    assert built(engine) == []
    assert (usage.opened, usage.queries_in_all) == (2, 20)
    ask(engine, kv, 0)
    assert built(engine) == ["priced"]


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"automatic": False}, {}),
        ({"bytes_max": TOKENS}, {}),  # two layers would need twice that
        ({"segment_tokens_min": TOKENS + 1}, {}),
        ({}, {"options": QueryOptions(Exact())}),
        ({}, {"n": 17}),
    ],
    ids=["switched off", "over the budget", "too short", "exact queries", "prefill"],
)
def test_nothing_is_built(opened, monkeypatch, settings, asked):
    monkeypatch.setattr(Priced, "seconds", 1e-7)
    engine, kv = opened(**settings)
    for _ in range(4):
        ask(engine, kv, 70, **asked)
    assert built(engine) == []


def test_a_search_that_reads_everything_anyway_promises_no_savings(opened, counted_only, idle_builder, monkeypatch):
    """Of a diffuse head an index finds most tokens, and another would too."""
    monkeypatch.setattr(Priced, "seconds", 1e-7)
    engine, kv = opened()
    engine.build_index("doc", "flat")
    for _ in range(4):
        ask(engine, kv, 70, QueryOptions(Dipr(1e-9)))
    segment = segment_of(engine, kv)
    use = segment.usage.recent
    assert use.searches == use.queries == 560
    assert use.attended / use.searches > 0.9
    kinds = {kind.kind: kind for kind in advisor.segment_facts(segment, idle_builder).kinds}
    whole = advisor.BYTE_SECONDS * kv.spec.token_nbytes * TOKENS
    assert kinds["priced"].saved_seconds <= use.seconds / use.queries - 0.9 * whole


def test_queries_are_counted_for_the_segments_they_read(opened, counted_only, spec, make_kv):
    engine, kv = opened(automatic=True)
    session = engine.create_session(spec, kv.tokens)
    session.update(0, *kv.pairs(0, 100)[0])
    for _ in range(64):
        session.attention(0, kv.q[0][:, :1], DIPR)
    use = session.views[0].segment.usage
    assert (use.opened, use.queries_in_all, use.recent.searches) == (1, 64, 0)
    kernel_seconds = session.stats().kernel_seconds
    assert use.recent.seconds == pytest.approx(kernel_seconds * TOKENS / (TOKENS + 100))
    assert use.exact_token_seconds == pytest.approx(kernel_seconds / 64 / (TOKENS + 100))
    engine.build_index("doc", "flat")
    for _ in range(10):
        session.attention(0, kv.q[0][:, :1], DIPR)
    session.close()
    assert (use.queries_in_all, use.recent.queries, use.recent.searches) == (74, 10, 10)  # counted anew under the new index
