"""Steps by native code alone are the steps that Python carries out: the same answers, counters, samples and refusals."""

from collections import Counter
from dataclasses import fields, replace
from functools import partial
from time import sleep

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvdb
import kvdb.session.step as steps
from kvdb import _native
from kvdb.catalog.evidence.statistics import Statistics
from kvdb.client.arrays import like, to_numpy
from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig
from tests.kvdb.attention.observed import assert_same_observations
from tests.reference import TOLERANCE, attention, relative_error

STORED, CHUNK, STEPS, LAYERS = 5000, 3000, 24, 1
ASKED = {
    "exact": kvdb.QueryOptions(kvdb.Exact()),
    "estimate": kvdb.QueryOptions(kvdb.TopK(16), estimate_tail=True, hints=kvdb.Hints(index="quantized")),
    "range": kvdb.QueryOptions(kvdb.Dipr(0.1), hints=kvdb.Hints(index="flat")),
    "observed": kvdb.QueryOptions(kvdb.Dipr(0.1)),
    "bounded": kvdb.QueryOptions(kvdb.Dipr(0.1), max_missed_mass=0.999, hints=kvdb.Hints(index="flat")),
    "behind sinks": kvdb.QueryOptions(hints=kvdb.Hints(index="flat")),
}
STANDS = ["a context", "two segments", "moved chunks", "overlaid chunks"]
PAGES_AND_GRAPHS = ["coarse-bounds", "coarse-clusters", "hnsw"]
ACTIONS = ["step", "step", "step", "tensor", "stats", "fork", "update", "attention", "two", "nan", "late", "other"]


def model(dtype):
    return kvdb.ModelSpec("m", LAYERS, 4, 2, 32, dtype, kvdb.Rope(10_000.0))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def stored(request):
    """A database with a context and its indexes, and keys, values and queries `[heads, tokens, head_dim]` beyond it."""
    spec = model(request.param)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((h, STORED + 4 * STEPS, 32)).astype(spec.numpy_dtype) for h in (4, 2, 2))
    config = Config(
        indexes=IndexConfig(on_demand="", automatic=False, sample_queries=4),
        storage=StorageConfig(block_size=16),
        optimizer=OptimizerConfig(rules_off=("short_context", "diffuse_head")),  # so that a range is searched
    )
    with kvdb.connect(config=config) as db:
        db.import_context(spec, np.arange(STORED), [(k[:, :STORED], v[:, :STORED])] * LAYERS, name="doc")
        pair = k[:, :CHUNK], v[:, :CHUNK]
        db.import_context(
            spec, np.arange(STORED + CHUNK), [tuple(np.concatenate([k[:, :STORED], x], 1) for x in pair)], name="two"
        )
        db.import_chunk(spec, np.arange(CHUNK) + 7, [pair], name="chunk")
        for name in ("doc", "two", "chunk"):
            for kind in ("quantized", "flat"):
                db.build_index(name, kind)
        yield db, spec, q, k, v


@pytest.fixture(scope="module")
def searched():
    """A database with a context that has the other kinds of indexes."""
    spec, rng = model("float32"), np.random.default_rng(0)
    q, k, v = (rng.standard_normal((h, STORED + 64, 32), dtype=np.float32) for h in (4, 2, 2))
    config = Config(
        indexes=IndexConfig(on_demand="", automatic=False, sample_queries=4),
        optimizer=OptimizerConfig(rules_off=("short_context", "diffuse_head")),
    )
    with kvdb.connect(config=config) as db:
        db.import_context(spec, np.arange(STORED), [(k[:, :STORED], v[:, :STORED])] * LAYERS, name="doc")
        for kind in PAGES_AND_GRAPHS:
            db.build_index("doc", kind)
        yield db, spec, q, k, v


def opened(stored, stands):
    """A session over stored tokens."""
    db, spec, _, k, v = stored
    if stands == "a context":
        return db.create_session(spec, np.arange(STORED))
    if stands == "two segments":
        return db.create_session(spec, np.arange(STORED + CHUNK))
    session = db.create_session(spec, parts=["doc", "chunk", "chunk"])
    if stands == "overlaid chunks":
        positions = np.array([3, 700, STORED + 40, STORED + CHUNK + 5, STORED + CHUNK + 2900])
        session.overlay(0, positions, k[:, 50:55], v[:, 50:55])
    return session


@pytest.fixture
def shown(monkeypatch):
    """The observations of each segment, in the order in which its statistics would hear of them. They hear nothing, so that no
    session changes the plans of another."""
    heard = []
    monkeypatch.setattr(Statistics, "observe", lambda self, layer, one: heard.append((id(self), one)))
    return heard


@pytest.fixture
def in_python(monkeypatch):
    """Counts the calls that native code did not answer alone."""
    calls = []
    plan = steps.plan
    monkeypatch.setattr(steps, "plan", lambda *given: calls.append(given) or plan(*given))
    return calls


def act(session, action, at, q, k, v, options):
    """Do it with token `at`. Returns what came out, or the error."""
    turn = [np.ascontiguousarray(x[:, at : at + 1]) for x in (q, k, v)]
    two = [x[:, at : at + 2] for x in (q, k, v)]
    if action == "nan":
        turn[1][1, 0, 3] = np.nan
    start = 7 if action == "late" else session.start + session.stats().tail_tokens
    step = partial(session.attend, 0, *turn, start=start, options=options)
    acts = {
        "tensor": lambda: to_numpy(session.attend(0, *(like(x, torch.empty(0)) for x in turn), options=options)),
        "fork": lambda: forked(session, two, options),
        "update": lambda: session.update(0, *turn[1:]),
        "attention": lambda: session.attention(0, turn[0], options=options),
        "two": lambda: session.attend(0, *two, options=options),
        "other": lambda: session.attend(0, *turn, options=kvdb.QueryOptions(kvdb.TopK(3))),
        "stats": lambda: counted(session)["queries"],
    }
    try:
        return acts.get(action, step)()
    except kvdb.KvdbError as error:
        return type(error), str(error)


def forked(session, two, options):
    """The answer of a fork, which goes its own way."""
    with session.fork() as twin:
        return twin.attend(0, *two, options=options)


def counted(session):
    """The statistics but for times."""
    stats = session.stats()
    return {field.name: getattr(stats, field.name) for field in fields(stats) if field.name != "kernel_seconds"}


def same(one, other):
    """Two sessions have the same counters and samples."""
    mine, theirs = counted(one), counted(other)
    for name in ("tokens_scanned", "tokens_retrieved", "missed_mass", "missed_mass_bound"):
        assert mine.pop(name) == pytest.approx(theirs.pop(name), rel=1e-6)
    assert mine == theirs
    for layer, twin in zip(one._transport._layers, other._transport._layers, strict=True):
        assert layer.query_samples.every == twin.query_samples.every
        for mine, theirs in (
            (layer.query_samples.last, twin.query_samples.last),
            (layer.query_samples.all(), twin.query_samples.all()),
        ):
            assert (mine is None) if theirs is None else (mine == theirs).all()


@pytest.mark.parametrize("asked", ASKED)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=12, max_size=STEPS), stands=st.sampled_from(STANDS))
def test_they_are_those_of_python(stored, shown, asked, actions, stands):
    _, _, q, k, v = stored
    heard = [], []
    with opened(stored, stands) as native, opened(stored, stands) as python:
        for i, action in enumerate(actions):
            outs = []
            for session, observations in zip((native, python), heard, strict=True):
                session is python and session._transport._stop()
                outs.append(act(session, action, STORED + 2 * i, q, k, v, ASKED[asked]))
                session.stats() if i + 1 == len(actions) else None
                observations.extend(shown)
                shown.clear()
            mine, theirs = outs
            assert (mine == theirs) if not isinstance(mine, np.ndarray) else close(mine, theirs), action
        same(native, python)
    same_observations(*heard)


def close(one, other):
    return relative_error(one, other) <= TOLERANCE[one.dtype.name]


def same_observations(mine, theirs):
    """Every segment heard the same, in the same order."""
    for segment in {segment for segment, _ in [*mine, *theirs]}:
        one, other = ([heard for at, heard in all_heard if at == segment] for all_heard in (mine, theirs))
        assert_same_observations(one, other)


def test_observations_reach_the_statistics(stored, shown, in_python):
    """Not until native steps end, of which nothing but a full block and the plan's age need Python."""
    _, _, q, k, v = stored
    with opened(stored, "two segments") as session:
        for i in range(40):
            session.attend(
                0, *(np.ascontiguousarray(x[:, STORED + i : STORED + i + 1]) for x in (q, k, v)), options=ASKED["observed"]
            )
        session.stats()
        assert len(in_python) <= 12
    assert max(Counter(segment for segment, _ in shown).values()) == 16 + 3  # the second hears nothing where the first gave up


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    ("kind", "stands"), [("numpy", "a context"), ("torch", "a context"), *(("numpy", s) for s in STANDS[1:])]
)
def test_most_steps_need_nothing_of_python(stored, in_python, asked, kind, stands):
    _, spec, q, k, v = stored
    with opened(stored, stands) as session:
        for i in range(32):
            turn = [np.ascontiguousarray(x[:, STORED + i : STORED + i + 1]) for x in (q, k, v)]
            turn = turn if kind == "numpy" else [like(x, torch.empty(0)) for x in turn]
            out = session.attend(0, *turn, options=replace(ASKED[asked]))  # an equal one each time
            assert type(out) is type(turn[0])
        assert len(in_python) <= 8  # the first two, and where a block is full or a plan used up
        if asked == "exact" and stands == "a context":
            expected, _ = attention(q[:, STORED + 31 : STORED + 32], k[:, : STORED + 32], v[:, : STORED + 32], spec.softmax_scale)
            assert relative_error(to_numpy(out), expected) <= TOLERANCE[spec.dtype]


def test_an_index_that_is_built_meanwhile_ends_them(stored, in_python):
    db, spec, q, k, v = stored
    with db.create_session(spec, np.arange(STORED)) as session:
        for i in range(8):
            if i == 5:
                session._transport.views[0].segment.indexes.changes.advance()
                before = len(in_python)
            session.attend(0, *(x[:, STORED + i : STORED + i + 1] for x in (q, k, v)), options=ASKED["exact"])
        assert before < len(in_python)


@pytest.mark.skipif(_native.usable_cpus() < 2, reason="nobody is woken")
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("stands", STANDS)
def test_a_step_wakes_its_threads_once(stored, in_python, patient_threads, asked, stands):
    """However many parts of a step are for several threads, whoever is woken for one stays awake for the others."""
    assert wakes_once(partial(woken_by_steps, stored, in_python, patient_threads, ASKED[asked], stands))


@pytest.mark.skipif(_native.usable_cpus() < 2, reason="nobody is woken")
@pytest.mark.parametrize("kind", PAGES_AND_GRAPHS)
def test_a_step_over_pages_or_a_graph_wakes_its_threads_once(searched, in_python, patient_threads, kind):
    options = kvdb.QueryOptions(kvdb.Dipr(0.1), hints=kvdb.Hints(index=kind))
    measure = partial(woken_by_steps, searched, in_python, patient_threads, options, "a context")
    assert any(measure())
    assert wakes_once(measure)


def woken_by_steps(stored, in_python, seconds, options, stands):
    """How many threads each native step woke; more than once where others keep a thread from working. seconds: how long threads
    wait awake."""
    _, _, q, k, v = stored
    woken = []
    with opened(stored, stands) as session:
        for i in range(12):
            turn = [np.ascontiguousarray(x[:, STORED + i : STORED + i + 1]) for x in (q, k, v)]
            before, by_python = wakes(), len(in_python)
            session.attend(0, *turn, options=options)
            sleep(1.5 * seconds)  # time to fall asleep; a thread counts that it was woken when it runs, maybe after the step
            if len(in_python) == by_python:
                woken.append(wakes() - before)
    assert len(woken) >= 6
    return woken


@pytest.mark.skipif(_native.usable_cpus() < 2, reason="nobody is woken")
@pytest.mark.parametrize("asked", ASKED)
def test_a_step_of_several_sessions_wakes_its_threads_once(stored, patient_threads, asked):
    db, _, q, k, v = stored

    def measure():
        woken = []
        with opened(stored, "a context") as one, opened(stored, "a context") as other, one.fork() as third:
            for i in range(12):
                turn = [np.stack([x[:, STORED + i : STORED + i + 1]] * 3) for x in (q, k, v)]
                before = wakes()
                db.attend([one, other, third], 0, *turn, options=ASKED[asked])
                sleep(1.5 * patient_threads)
                woken.append(wakes() - before)
        return woken

    assert any(measure())
    assert wakes_once(measure)


def wakes_once(measure):
    """Whether a quarter of the steps woke each thread once at most, in one of a few tries: where other processes take a processor
    for longer than threads wait awake, they are woken again."""
    return any(sorted(woken)[len(woken) // 4] <= _native.threads() - 1 for woken in (measure() for _ in range(5)))


@pytest.fixture
def patient_threads():
    """Seconds for which threads wait awake; by default it is so little that other work on the machine makes a difference."""
    before = _native.spin_us()
    _native.set_spin_us(2000)
    yield 0.002
    _native.set_spin_us(before)


def wakes():
    """How often threads were woken so far."""
    return sum(slot[2] for slot in _native.pool_counters())
