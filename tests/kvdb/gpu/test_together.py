"""Sessions answered together on the GPU: one launch, what they share is read once, and each gets what it gets alone."""

import numpy as np
import pytest

import kvdb.session.step as together
from indexes.retrieval import Dipr, Exact
from query_optimizer.query_options import QueryOptions
from tests.conftest import Kv
from tests.kvdb.gpu.conftest import imported, opened, spec_of, step, ways
from tests.kvdb.gpu.test_answers import close

STORED = 140


@pytest.fixture
def engines(make_engine):
    """With a GPU and without, and in both two documents."""
    texts = [Kv(spec_of(), STORED + 30, seed=i) for i in range(2)]
    made = make_engine(), make_engine(0)
    for engine in made:
        for i, kv in enumerate(texts):
            imported(engine, kv, f"document {i}", STORED)
    return made, texts


@pytest.mark.parametrize("options", [QueryOptions(Exact()), QueryOptions(Dipr(0.001))])
def test_each_gets_what_it_gets_alone(engines, options, monkeypatch):
    made, texts = engines
    which = [0, 1, 0, 0]  # three share a document
    for kv in texts:
        kv.q *= 3
    outs = []
    for engine in made:
        sessions = [opened(engine, texts[of], STORED) for of in which]
        for i, session in enumerate(sessions):
            for at in range(i):  # tails of different lengths
                step(session, texts[1], STORED + at, QueryOptions(Exact()))
        seen = []
        for at in range(2):
            q, k, v = (np.stack([getattr(texts[0], name)[0][:, 5 * i + at :][:, :1] for i in range(4)]) for name in "qkv")
            if engine.gpu is not None:
                assert {way[1] for way in ways(sessions[0], options)} == {"gpu"}
            seen.append(together.answer(sessions, 0, q, k, v, options if engine.gpu is not None else QueryOptions(Exact())))
        outs.append(seen)
        for session in sessions:
            session.close()
    for there, here in zip(*outs, strict=True):
        close(there, here, times=1 if isinstance(options.retrieval, Exact) else 2000)


def test_it_is_one_launch(engines, monkeypatch):
    (engine, _), texts = engines
    sessions = [opened(engine, texts[0], STORED) for _ in range(3)]
    import kvdb.gpu.step_launches as step_launches

    launched = []

    def counting(q, *arguments):
        launched.append(len(q))
        decode(q, *arguments)

    decode = step_launches.decode
    monkeypatch.setattr(step_launches, "decode", counting)
    for at in range(2):
        q, k, v = (np.stack([getattr(texts[0], name)[0][:, at : at + 1]] * 3) for name in "qkv")
        together.answer(sessions, 0, q, k, v, QueryOptions(Exact()))
    assert launched == [3, 3]
    for session in sessions:
        session.close()
