"""Several sessions in one call against one after the other, and against dense attention; embedded and remote."""

from dataclasses import replace
from threading import Thread

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, IndexConfig, OptimizerConfig, StorageConfig, WindowConfig
from kvdb.database import Database
from kvdb.errors import (
    CapacityError,
    DtypeError,
    InvalidArgument,
    LayerError,
    MessageTooLarge,
    NonFiniteError,
    PositionError,
    SessionClosed,
    ShapeError,
    SpecMismatch,
    Unavailable,
)
from tests.reference import TOLERANCE, attention, relative_error

ROUNDING = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 8e-3}
"""The rounding of two merges in another order, and of the output."""


def stack(kvs, layer, at, n=1):
    """q, k, v of tokens [at[i], at[i] + n) of each."""
    return tuple(
        np.stack([getattr(kv, name)[layer][:, begin : begin + n] for kv, begin in zip(kvs, at, strict=True)]) for name in "qkv"
    )


@pytest.fixture(autouse=True)
def all_is_shared(monkeypatch):
    """Also what is too short to pay."""
    for where in ("step", "host_steps"):
        monkeypatch.setattr(f"kvdb.session.{where}.SHARED_TOKENS_MIN", 0)


class Texts:
    """Two documents that begin alike, and sessions behind and within them, each twice: for one call, and for one after the
    other."""

    def __init__(self, db, spec, make_kv):
        self.spec = spec
        first, second = make_kv(spec, 400), make_kv(spec, 400, seed=1)
        second.tokens[:150] = first.tokens[:150]
        for name in ("q", "k", "v"):
            getattr(second, name)[:, :, :150] = getattr(first, name)[:, :, :150]
        db.import_context(spec, first.tokens[:300], first.pairs(0, 300), name="first")
        db.import_context(spec, second.tokens[:300], second.pairs(0, 300), name="second")
        self.kvs = [first, second, first, second, make_kv(spec, 100, seed=2), first, first]
        self.at = [300, 300, 300, 310, 20, 150, 207]
        opened = list(zip(self.kvs, self.at, strict=True))
        self.together, self.apart = ([self.open(db, *one) for one in opened] for _ in range(2))

    def open(self, db, kv, n):
        """A session that holds n tokens."""
        session = db.create_session(self.spec, kv.tokens[:n])
        for layer, (k, v) in enumerate(kv.pairs(session.reused, n)):
            session.update(layer, k, v)
        return session

    def close(self):
        for session in (*self.together, *self.apart):
            session.close()


@pytest.fixture(params=["float32", "bfloat16"])
def texts(db, spec, make_kv, request):
    texts = Texts(db, replace(spec, dtype=request.param), make_kv)
    yield texts
    texts.close()


@pytest.mark.parametrize("n", [1, 3])
def test_one_call_is_one_after_the_other_and_dense_attention(db, texts, n):
    for step in range(4):
        at = [begin + step * n for begin in texts.at]
        for layer in range(texts.spec.layers):
            q, k, v = stack(texts.kvs, layer, at, n)
            out = db.attend(texts.together, layer, q, k, v, starts=at)
            one_by_one = np.stack([s.attend(layer, q[i], k[i], v[i]) for i, s in enumerate(texts.apart)])
            assert out.dtype == one_by_one.dtype
            assert out.shape == q.shape
            assert relative_error(out, one_by_one) <= ROUNDING[texts.spec.dtype]
            for i, kv in enumerate(texts.kvs):
                end = at[i] + n
                dense, _ = attention(q[i], kv.k[layer][:, :end], kv.v[layer][:, :end], texts.spec.softmax_scale, new=n)
                assert relative_error(out[i], dense) <= TOLERANCE[texts.spec.dtype]
            assert (db.attention(texts.together, layer, q) == out).all()
    for one, other in zip(texts.together, texts.apart, strict=True):
        assert one.stats().tokens == other.stats().tokens
        assert one.stats().queries == 2 * other.stats().queries
        assert one.stats().tokens_retrieved == pytest.approx(2 * other.stats().tokens_retrieved)
        assert one.stats().rules.keys() == other.stats().rules.keys()


def test_what_is_shared_is_read_once(db, spec, make_kv):
    kv = make_kv(spec, 301)
    db.import_context(spec, kv.tokens[:300], kv.pairs(0, 300), name="doc")
    sessions = [db.create_session(spec, kv.tokens) for _ in range(6)]
    db.attend(sessions, 0, *stack([kv] * 6, 0, [300] * 6))
    read = [session.stats().bytes_read for session in sessions]
    assert read == [(300 // 6 + 1) * spec.token_nbytes] * 6, "a sixth of the document, and the own token"
    db.attend(sessions[:1], 1, *stack([kv], 1, [300]))
    assert sessions[0].stats().bytes_read - read[0] == 301 * spec.token_nbytes


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_short_is_not_shared(db, spec, make_kv, monkeypatch, shared):
    for where in ("step", "host_steps"):
        monkeypatch.setattr(f"kvdb.session.{where}.SHARED_TOKENS_MIN", 301 - shared)
    kv = make_kv(spec, 301)
    db.import_context(spec, kv.tokens[:300], kv.pairs(0, 300), name="doc")
    sessions = [db.create_session(spec, kv.tokens) for _ in range(3)]
    db.attend(sessions, 0, *stack([kv] * 3, 0, [300] * 3))
    assert sessions[0].stats().bytes_read == (300 // (3 if shared else 1) + 1) * spec.token_nbytes


def test_moved_chunks_are_shared_where_they_stand_alike(db, spec, make_kv):
    spec = replace(spec, rope=kvdb.Rope())
    chunks = [make_kv(spec, 200, seed) for seed in range(3)]
    for i, kv in enumerate(chunks):
        db.import_chunk(spec, kv.tokens, kv.pairs(), name=f"{i}", base=7 * i)
    orders = ["012", "012", "102", "02", "20"]
    together, apart = ([db.create_session(spec, parts=list(order)) for order in orders] for _ in range(2))
    for group in (together, apart):  # of one session something is recomputed, so that it stands alone
        group[1].overlay(0, [3, 250], chunks[0].k[0][:, :2], chunks[0].v[0][:, :2])
    new = make_kv(spec, 30, seed=5)
    for step in range(3):
        q, k, v = stack([new] * 5, 0, [6 * step + i for i in range(5)])
        out = db.attend(together, 0, q, k, v)
        assert relative_error(out, np.stack([s.attend(0, q[i], k[i], v[i]) for i, s in enumerate(apart)])) <= TOLERANCE["float32"]
    assert together[0].stats().bytes_read < apart[0].stats().bytes_read
    assert together[1].stats().bytes_read == apart[1].stats().bytes_read


def test_forks_share_what_is_stored(db, spec, make_kv):
    kv, other = make_kv(spec, 120), make_kv(spec, 120, seed=1)
    db.import_context(spec, kv.tokens[:100], kv.pairs(0, 100), name="doc")
    session = db.create_session(spec, kv.tokens)
    session.update(0, *kv.pairs(100, 110)[0])
    twin = session.fork()
    q, k, v = stack([kv, other], 0, [110, 110])
    out = db.attend([session, twin], 0, q, k, v)
    for i, one in enumerate((kv, other)):
        keys, values = (np.concatenate([a[0][:, :110], b[0][:, 110:111]], axis=1) for a, b in ((kv.k, one.k), (kv.v, one.v)))
        assert relative_error(out[i], attention(q[i], keys, values, spec.softmax_scale, new=1)[0]) <= 1e-5


def test_torch_in_is_torch_out(db, spec, make_kv):
    torch = pytest.importorskip("torch")
    kv = make_kv(spec, 4)
    sessions = [db.create_session(spec, []) for _ in range(2)]
    q, k, v = (torch.from_numpy(array) for array in stack([kv] * 2, 0, [0, 1]))
    out = db.attend(sessions, 0, q, k, v)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(db.attention(sessions, 0, q), out)


def test_queries_that_search_find_the_same(make_kv):
    window, indexes = WindowConfig(16, 64), IndexConfig(segment_tokens_min=256, automatic=False)
    with Client(Database(Config(window=window, indexes=indexes, optimizer=OptimizerConfig(short_context_tokens=128)))) as db:
        spec = kvdb.ModelSpec("searched", 1, 4, 2, 32, "float32")
        kv = make_kv(spec, 2100)
        kv.q *= 3  # sharp enough to need few
        db.import_context(spec, kv.tokens[:2048], kv.pairs(0, 2048), name="doc")
        db.build_index("doc", "flat")
        prompts = [kv.tokens[:2048], kv.tokens[:2048], kv.tokens[:1800]]
        together, apart = ([db.create_session(spec, tokens) for tokens in prompts] for _ in range(2))
        flat = kvdb.Hints("flat")
        for step in range(3):
            q, k, v = stack([kv] * 3, 0, [2048 + step, 2060 + step, 1800 + step])
            for wanted in (
                {"retrieval": kvdb.Dipr(0.05), "hints": flat},
                {"retrieval": kvdb.TopK(20), "max_missed_mass": 0.5, "hints": flat},
                {"estimate_tail": True},
            ):
                out = db.attend(together, 0, q, k, v, **wanted)
                one_by_one = np.stack([s.attend(0, q[i], k[i], v[i], **wanted) for i, s in enumerate(apart)])
                assert relative_error(out, one_by_one) <= TOLERANCE["float32"]
        assert together[0].explain(0, retrieval=kvdb.Dipr(0.05), hints=flat).searches
        assert together[0].stats().tokens_retrieved == apart[0].stats().tokens_retrieved


class Refused:
    """Three sessions over one document, and a step of theirs that nothing is wrong with."""

    def __init__(self, db, spec, make_kv):
        self.db, self.spec, self.kv = db, spec, make_kv(spec, 170)
        db.import_context(spec, self.kv.tokens[:100], self.kv.pairs(0, 100), name="doc")
        self.sessions = [db.create_session(spec, self.kv.tokens) for _ in range(3)]
        for i, session in enumerate(self.sessions):  # one is empty, one in the middle of a block, one at its end
            session.update(0, *self.kv.pairs(100, 100 + 32 * i)[0])
        self.good = dict(zip("qkv", stack([self.kv] * 3, 0, [100, 132, 164], 2), strict=True))

    def attend(self, sessions=None, layer=0, starts=None, **arrays):
        arrays = {**self.good, **arrays}
        return self.db.attend(sessions or self.sessions, layer, arrays["q"], arrays["k"], arrays["v"], starts=starts)

    def seen(self):
        stats = [session.stats() for session in self.sessions]
        return [(one.tokens, one.tail_nbytes, one.queries) for one in stats]


@pytest.fixture
def refused(db, spec, make_kv):
    return Refused(db, spec, make_kv)


def poisoned(array, session, value=np.nan):
    bad = array.copy()
    bad[session, -1, -1, -1] = value
    return bad


@pytest.mark.parametrize("what", "qkv")
@pytest.mark.parametrize("session", range(3))
def test_one_poisoned_session_leaves_all_as_they_were(refused, what, session):
    before = refused.seen()
    with pytest.raises(NonFiniteError, match=rf"^sessions\[{session}\]: "):
        refused.attend(**{what: poisoned(refused.good[what], session)})
    assert refused.seen() == before
    for i, one in enumerate(refused.sessions):
        end = 100 + 32 * i
        q = refused.kv.q[0][:, :1]
        dense, _ = attention(q, refused.kv.k[0][:, :end], refused.kv.v[0][:, :end], refused.spec.softmax_scale, new=1)
        assert relative_error(one.attention(0, q), dense) <= 1e-5
    refused.attend(starts=[100, 132, 164])


def test_wrong_arguments_leave_all_as_they_were(refused):
    before, good = refused.seen(), refused.good
    wrong = [
        (ShapeError, {"q": good["q"][:2]}),
        (ShapeError, {"q": good["q"][0]}),
        (ShapeError, {"q": good["q"][:, :3]}),
        (ShapeError, {"q": good["q"][:, :, :1]}),
        (ShapeError, {"k": good["k"][:, :, :1]}),
        (ShapeError, {"v": good["v"][..., :8]}),
        (DtypeError, {"k": good["k"].astype(np.float64)}),
        (LayerError, {"layer": 2}),
        (LayerError, {"layer": "0"}),
        (InvalidArgument, {"starts": [100, 132]}),
        (InvalidArgument, {"starts": [100, 132, "164"]}),
        (PositionError, {"starts": [100, 132, 165]}),
        (InvalidArgument, {"sessions": [*refused.sessions[:2], refused.sessions[0]]}),
        (InvalidArgument, {"sessions": [*refused.sessions[:2], None]}),
        (ShapeError, {"sessions": refused.sessions[:2]}),
    ]
    for error, arguments in wrong:
        with pytest.raises(error):
            refused.attend(**arguments)
    with pytest.raises(InvalidArgument, match="no sessions"):
        refused.db.attend([], 0, good["q"][:0], good["k"][:0], good["v"][:0])
    with pytest.raises(PositionError, match=r"sessions\[0\]: q asks for the last 101"):
        refused.db.attention(refused.sessions, 0, np.zeros((3, 4, 101, 16), np.float32))
    assert refused.seen() == before


def test_sessions_of_two_models_are_refused(refused):
    other = refused.db.create_session(replace(refused.spec, fingerprint="other"), [])
    with pytest.raises(SpecMismatch, match=r"sessions\[2\]: it is of"):
        refused.attend([*refused.sessions[:2], other])


def test_a_closed_session_is_refused(refused):
    before = refused.seen()
    closed = refused.db.create_session(refused.spec, [])
    closed.close()
    with pytest.raises(SessionClosed, match=r"sessions\[1\]: the session is closed"):
        refused.attend([refused.sessions[0], closed, refused.sessions[2]])
    assert refused.seen() == before


def test_sessions_of_another_database_are_refused(refused):
    with kvdb.connect() as other:
        foreign = other.create_session(refused.spec, [])
        with pytest.raises(InvalidArgument, match="another database's"):
            refused.attend([*refused.sessions[:2], foreign])
        with pytest.raises(InvalidArgument, match="another database's"):
            other.attend(refused.sessions, 0, *refused.good.values())
    with pytest.raises(Unavailable, match="closed"):
        other.attend([foreign], 0, *(array[:1] for array in refused.good.values()))


def test_a_gap_that_holds_nothing_is_refused(db, spec, make_kv):
    spec = replace(spec, rope=kvdb.Rope())
    kv = make_kv(spec, 20)
    db.import_chunk(spec, kv.tokens, kv.pairs(), name="chunk")
    sessions = [db.create_session(spec, parts=parts) for parts in (["chunk"], [[1, 2], "chunk"])]
    with pytest.raises(PositionError, match=r"sessions\[1\]: 2 tokens of layer 0 hold nothing"):
        db.attend(sessions, 0, *stack([kv] * 2, 0, [0, 0]))
    assert sessions[0].stats().tail_tokens == 0


def test_a_full_tier_leaves_all_as_they_were(spec, make_kv):
    """Blocks of the first sessions are given back when the last finds none."""
    nbytes = 64 * spec.token_nbytes
    with Database(Config(storage=StorageConfig(cpu_bytes_max=7 * nbytes, arena_bytes=1 << 20))) as engine:
        refused = Refused(Client(engine), spec, make_kv)  # four blocks of the document, one of each session that holds any
        out, before = refused.sessions[1].attention(0, refused.kv.q[0][:, :1]), refused.seen()
        more = {name: array.repeat(32, axis=2) for name, array in refused.good.items()}  # a block of the first, one of the second
        with pytest.raises(CapacityError, match=r"^sessions\[1\]: "):
            refused.attend(**more)
        assert refused.seen() == before
        assert (refused.sessions[1].attention(0, refused.kv.q[0][:, :1]) == out).all()
        engine.check_integrity()


def test_a_step_larger_than_a_message_is_refused_whole(engine, spec, make_kv):
    from kvdb.config import ServerConfig
    from kvdb.server.serve import Server

    server = Server(engine, ServerConfig(port=0, message_bytes_max=1 << 20, local_socket=""))
    server.start()
    try:
        with kvdb.connect(server.target) as db:
            sessions = [db.create_session(spec, []) for _ in range(2)]
            kv = make_kv(spec, 2000)
            with pytest.raises(MessageTooLarge, match="the step of 2 sessions"):
                db.attend(sessions, 0, *stack([kv] * 2, 0, [0, 0], 2000))
            assert [session.stats().tokens for session in sessions] == [0, 0]
    finally:
        server.stop(grace=0)


def test_calls_on_the_same_sessions_in_other_orders_take_turns(db, spec, make_kv):
    kv = make_kv(spec, 100)
    db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    sessions = [db.create_session(spec, kv.tokens) for _ in range(4)]
    arrays = stack([kv] * 4, 0, range(4))

    def call(order):
        for _ in range(20):
            db.attend([sessions[i] for i in order], 0, *arrays)

    threads = [Thread(target=call, args=(order,), daemon=True) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    sessions[0].update(1, *kv.pairs(0, 60)[1])
    assert [session.stats().tail_tokens for session in sessions] == [60, 0, 0, 0]
