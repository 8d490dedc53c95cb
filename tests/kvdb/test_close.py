"""Closing a database beside calls of other threads: they finish, or raise an error of the package; never a signal."""

import subprocess
import sys
import threading
from textwrap import dedent

import numpy as np
import pytest

import kvdb
from kvdb.config import Config, OptimizerConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import CapacityError, NonFiniteError, SessionClosed, Unavailable
from query_optimizer.query_options import QueryOptions
from tests.reference import attention, relative_error

SECONDS_MAX = 30
ANYTHING = QueryOptions()


class Gate:
    """A rule that stops who plans in layer 1 until it is opened."""

    name, before = "gate", "exact_asked"

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def when(self, facts, part, heads):
        if facts.layer == 1:
            self.reached.set()
            assert self.opened.wait(SECONDS_MAX)
        return "a gate"


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def engine(gate, spec, make_kv):
    """A database with a document, in which queries of layer 1 wait for the gate."""
    config = Config(storage=StorageConfig(arena_bytes=1 << 20), optimizer=OptimizerConfig(machine_file=""))
    database = Database(config, [gate])
    kv = make_kv(spec, 100)
    writing = database.begin_import(spec, kv.tokens, "doc")
    for layer, pair in enumerate(kv.pairs()):
        writing.write(layer, *pair)
    writing.commit()
    database.kv = kv
    yield database
    gate.opened.set()
    database.close()


class Call(threading.Thread):
    """A call in a thread of its own; `done` gives what it returned, or raises what it raised."""

    def __init__(self, function):
        super().__init__(daemon=True)
        self.function, self.error, self.value = function, None, None
        self.start()

    def run(self):
        try:
            self.value = self.function()
        except kvdb.KvdbError as error:
            self.error = error

    def done(self):
        self.join(SECONDS_MAX)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.value


CALLS = {
    "attention": lambda db, session, q: session.attention(1, q),
    "attention_of_several": lambda db, session, q: db.attention([session], 1, q[None], ANYTHING)[0],
    "explain": lambda db, session, q: db.explain("doc", 1, ANYTHING, analyze=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_closing_waits_for_calls_in_flight(engine, gate, spec, name):
    session = engine.create_session(spec, engine.kv.tokens)
    q = engine.kv.q[1][:, -1:]
    call = Call(lambda: CALLS[name](engine, session, q))
    assert gate.reached.wait(SECONDS_MAX)
    closing = Call(engine.close)
    while True:  # until the database refuses calls
        try:
            engine.contexts()
        except Unavailable:
            break
    assert closing.is_alive()
    gate.opened.set()
    value = call.done()
    closing.done()
    if name != "explain":
        right, _ = attention(q, engine.kv.k[1], engine.kv.v[1], spec.softmax_scale)
        assert relative_error(value, right) < 1e-5


def test_a_session_that_is_opened_while_the_database_closes_is_refused_and_leaves_nothing(engine, spec):
    session = engine.create_session(spec, engine.kv.tokens)
    (segment,) = [view.segment for view in session.views]
    assert session.services.handles.refuse(), "as closing begins"
    with pytest.raises(Unavailable, match="closed"):
        session.fork()
    with pytest.raises(Unavailable, match="closed"):
        engine.create_session(spec, engine.kv.tokens)
    with pytest.raises(Unavailable, match="closed"):
        engine.begin_import(spec, engine.kv.tokens, "another")
    assert segment.references == 2, "the context and the session"
    session.close()
    assert (segment.references, segment.usage.sessions) == (1, 0)


def test_everything_of_a_closed_database_raises(engine, spec):
    session, writing = engine.create_session(spec, engine.kv.tokens), engine.begin_import(spec, engine.kv.tokens + 1, "more")
    q, k, v = engine.kv.q[0][:, :1], engine.kv.k[0][:, :1], engine.kv.v[0][:, :1]
    engine.close()
    engine.close()
    engine.check_integrity()
    for call in (
        lambda: session.attention(0, q),
        lambda: session.attend(0, q, k, v),
        session.fork,
        session.stats,
        lambda: session.explain(0),
        lambda: session.store("again"),
        lambda: writing.write(0, k, v),
        writing.commit,
    ):
        with pytest.raises(SessionClosed):
            call()
    for call in (
        lambda: engine.create_session(spec, engine.kv.tokens),
        lambda: engine.attention([session], 0, q[None], ANYTHING),
        lambda: engine.get("doc"),
        lambda: engine.statistics("doc"),
        lambda: engine.build_index("doc", "flat"),
        engine.contexts,
        engine.tiers,
    ):
        with pytest.raises(Unavailable):
            call()


RACE = """
    import faulthandler, sys, threading
    import numpy as np
    import kvdb
    from kvdb.errors import SessionClosed, Unavailable

    faulthandler.enable()
    seed, tokens = int(sys.argv[1]), 3000
    rng = np.random.default_rng(seed)
    spec = kvdb.ModelSpec("m", layers=4, q_heads=4, kv_heads=2, head_dim=64, dtype="float32")
    kv = [tuple(rng.standard_normal((2, 2, tokens, 64)).astype(np.float32)) for _ in range(4)]
    ids = np.arange(tokens)
    q, one = rng.standard_normal((4, 1, 64)).astype(np.float32), kv[0][0][:, :1]
    db = kvdb.connect()
    db.import_context(spec, ids, kv, name="doc")
    started, bad = threading.Barrier(9), []

    def create(n):
        session = db.create_session(spec, ids)
        session.attend(0, q, one, one)
        session.attention(0, q)

    def fork(n, base):
        session = base.fork()
        session.attend(0, q, one, one)
        session.attention(0, q)

    def together(n, base):
        db.attend([base, base.fork()], 1, np.stack([q, q]), np.stack([one, one]), np.stack([one, one]))

    def bring_in(n, count):
        db.import_context(spec, ids + 7 + 10 * n, kv, name=f"{n}-{count}")
        db.drop(f"{n}-{count}")

    def look(n, base):
        db.tiers(), db.contexts(), base.stats(), base.explain(0), db.explain("doc")

    def work(n):
        base, count = db.create_session(spec, ids), 0
        started.wait()
        while True:
            count += 1
            try:
                (create(n) if n in {0, 1} else fork(n, base) if n in {2, 3} else together(n, base) if n == 4
                 else bring_in(n, count) if n in {5, 6} else look(n, base))
            except (Unavailable, SessionClosed):
                return
            except BaseException as error:
                bad.append(repr(error))
                return

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    started.wait()
    for _ in range(seed % 3):
        create(0)
    db.close()
    for thread in threads:
        thread.join(20)
    print(bad, [thread.name for thread in threads if thread.is_alive()])
    sys.exit(bool(bad) or any(thread.is_alive() for thread in threads))
"""


@pytest.mark.parametrize("seed", range(4))
def test_closing_beside_threads_that_call_ends_without_a_signal(seed):
    ended = subprocess.run(
        [sys.executable, "-c", dedent(RACE), str(seed)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


def fails(*args, **given):
    raise CapacityError("no room for an answer")


def test_a_call_that_raises_has_appended_nothing(engine, spec, monkeypatch):
    session = engine.create_session(spec, engine.kv.tokens)
    twin = session.fork()
    q, k, v = engine.kv.q[0][:, :3], engine.kv.k[0][:, :3], engine.kv.v[0][:, :3]
    with monkeypatch.context() as patch:
        patch.setattr("kvdb.session.layer.exact_attention.exact", fails)
        with pytest.raises(CapacityError):
            session.attend(0, q, k, v)
        with pytest.raises(CapacityError):
            engine.attend([session, twin], 0, *(np.stack([x, x]) for x in (q, k, v)), ANYTHING)
    assert session.stats().tokens == twin.stats().tokens == 100
    assert [session.layer(0).run.tokens, twin.layer(0).run.tokens] == [100, 100]
    out = session.attend(0, q[:, :1], k[:, :1], v[:, :1])
    keys, values = (np.concatenate([x[0], y[:, :1]], axis=1) for x, y in ((engine.kv.k, k), (engine.kv.v, v)))
    assert relative_error(out, attention(q[:, :1], keys, values, spec.softmax_scale)[0]) < 1e-5
    engine.check_integrity()


def test_tokens_that_were_taken_back_leave_the_index_of_a_tail(spec, make_kv, monkeypatch):
    """A large piece fails after what is old of it was indexed; other tokens follow."""
    kv, other = make_kv(spec, 3000), make_kv(spec, 3000, seed=1)
    config = Config(
        storage=StorageConfig(arena_bytes=1 << 20), optimizer=OptimizerConfig(machine_file="", rules_off=("short_context",))
    )
    with Database(config) as engine:
        session = engine.create_session(spec, np.zeros(0, np.int32))
        session.update(0, kv.k[0][:, :1500], kv.v[0][:, :1500])
        for _ in range(2):
            session.attention(0, kv.q[0][:, :1], QueryOptions(kvdb.Dipr(1e-9)))
        with monkeypatch.context() as patch:
            patch.setattr("kvdb.session.layer.exact_attention.exact", fails)
            with pytest.raises(CapacityError):
                session.attend(0, kv.q[0][:, 1500:], kv.k[0][:, 1500:], kv.v[0][:, 1500:])
        session.update(0, other.k[0][:, 1500:], other.v[0][:, 1500:])
        k, v = (np.concatenate([a[0][:, :1500], b[0][:, 1500:]], axis=1) for a, b in ((kv.k, other.k), (kv.v, other.v)))
        for _ in range(3):
            out = session.attention(0, kv.q[0][:, :1], QueryOptions(kvdb.Dipr(1e-9)))
            assert relative_error(out, attention(kv.q[0][:, :1], k, v, spec.softmax_scale)[0]) < 1e-5
        session.close()


def test_what_float32_cannot_hold_is_an_error_and_appends_nothing(engine, spec):
    session = engine.create_session(spec, np.zeros(0, np.int32))
    huge = np.full((4, 2, 16), 1e20, np.float32)
    with pytest.raises(NonFiniteError, match="float32"):
        session.attend(0, huge, huge[:2], huge[:2])
    assert session.stats().tokens == 0
    session.update(0, huge[:2], huge[:2])
    with pytest.raises(NonFiniteError, match="float32"):
        engine.attention([session], 0, huge[None], ANYTHING)
