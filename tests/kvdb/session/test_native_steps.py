"""Steps by native code alone are the steps that Python carries out: the same answers, counters, samples and refusals."""

from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdb
from kvdb.client.arrays import like, to_numpy
from kvdb.config import Config, IndexConfig, StorageConfig
from kvdb.session.state import SessionState
from tests.reference import TOLERANCE, attention, relative_error

STORED, STEPS, LAYERS = 5000, 24, 1
ASKED = {
    "exact": kvdb.QueryOptions(kvdb.Exact()),
    "estimate": kvdb.QueryOptions(kvdb.TopK(16), estimate_tail=True, hints=kvdb.Hints(index="quantized")),
    "range": kvdb.QueryOptions(kvdb.Dipr(0.1), hints=kvdb.Hints(index="flat")),
}
ACTIONS = ["step", "step", "step", "tensor", "stats", "fork", "update", "attention", "two", "nan", "late", "other"]


def model(dtype):
    return kvdb.ModelSpec("m", LAYERS, 4, 2, 32, dtype)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def stored(request):
    """A database with a context and its indexes, and keys, values and queries `[heads, tokens, head_dim]` beyond it."""
    spec = model(request.param)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((h, STORED + 4 * STEPS, 32)).astype(spec.numpy_dtype) for h in (4, 2, 2))
    config = Config(indexes=IndexConfig(on_demand="", automatic=False, sample_queries=4), storage=StorageConfig(block_size=16))
    with kvdb.connect(config=config) as db:
        db.import_context(spec, np.arange(STORED), [(k[:, :STORED], v[:, :STORED])] * LAYERS, name="doc")
        for kind in ("quantized", "flat"):
            db.build_index("doc", kind)
        yield db, spec, q, k, v


@pytest.fixture
def in_python(monkeypatch):
    """Counts the calls that native code did not answer alone."""
    calls = []
    attend = SessionState._attend
    monkeypatch.setattr(SessionState, "_attend", lambda self, *given: calls.append(self) or attend(self, *given))
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
@settings(max_examples=6, deadline=None)
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=12, max_size=STEPS))
def test_they_are_those_of_python(stored, asked, actions):
    db, spec, q, k, v = stored
    with db.create_session(spec, np.arange(STORED)) as native, db.create_session(spec, np.arange(STORED)) as python:
        for i, action in enumerate(actions):
            outs = []
            for session in (native, python):
                session is python and session._transport._settle()
                outs.append(act(session, action, STORED + 2 * i, q, k, v, ASKED[asked]))
            mine, theirs = outs
            assert (mine == theirs) if not isinstance(mine, np.ndarray) else (mine == theirs).all(), action
        same(native, python)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_most_steps_need_nothing_of_python(stored, in_python, asked, kind):
    db, spec, q, k, v = stored
    with db.create_session(spec, np.arange(STORED)) as session:
        for i in range(32):
            turn = [np.ascontiguousarray(x[:, STORED + i : STORED + i + 1]) for x in (q, k, v)]
            turn = turn if kind == "numpy" else [like(x, torch.empty(0)) for x in turn]
            out = session.attend(0, *turn, options=replace(ASKED[asked]))  # an equal one each time
            assert type(out) is type(turn[0])
        assert len(in_python) <= 8  # the first two, and where a block is full or a plan used up
        if asked == "exact":
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
