"""One engine behind two transports: whatever is done embedded and remote has the same result, to the bit."""

import re

import numpy as np
import pytest

import kvdb
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import KvdbError
from kvdb.server.serve import Server

SPEC = kvdb.ModelSpec(
    "model",
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    dtype="bfloat16",
    rope=kvdb.Rope(theta=5e5, scaling={"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}),
    fingerprint="0123",
    scale=0.3,
)
STORAGE = StorageConfig(arena_bytes=1 << 20)


@pytest.fixture
def databases():
    """An embedded database, and a server of its own with a client."""
    engine = Database(Config(storage=STORAGE))
    server = Server(engine, ServerConfig(port=0))
    server.start()
    with kvdb.connect(config=Config(storage=STORAGE)) as embedded, kvdb.connect(server.target) as remote:
        yield embedded, remote
    server.stop(grace=0)
    engine.check_integrity()
    engine.close()


class Trace:
    """What a scenario saw, in a form that can be compared."""

    def __init__(self):
        self.seen = []

    def __call__(self, value):
        """Note a result, and hand it on."""
        self.seen.append(plain(value))
        return value

    def error(self, call, *arguments, **named):
        """Note the error a call must raise."""
        with pytest.raises(KvdbError) as raised:
            call(*arguments, **named)
        self.seen.append((type(raised.value), plain(str(raised.value))))


def plain(value):
    match value:
        case np.ndarray():
            return (value.shape, value.dtype, value.flags.writeable, value.tobytes())
        case kvdb.Context():
            return value.info
        case kvdb.SessionStats():
            return {**vars(value), "kernel_seconds": value.kernel_seconds > 0}
        case str():
            return re.sub(r"segment \d+", "segment #", value)  # numbered over the whole process
        case list():
            return [plain(one) for one in value]
    return value


def importing(db, note, kv):
    note(db.import_context(SPEC, kv.tokens[:100], kv.pairs(0, 100), name="first"))
    note(db.import_context(SPEC, kv.tokens, kv.pairs(), name="second"))
    note(db.import_context(SPEC, kv.tokens, iter(kv.pairs()), name="the same under another name, größer"))
    note(db.contexts())
    note(db.get("first"))
    note.error(db.import_context, SPEC, kv.tokens, kv.pairs(), name="first")
    others = kv.tokens + 1
    note.error(db.import_context, SPEC, others, kv.pairs()[:1], name="half")
    note.error(db.import_context, SPEC, others, kv.pairs() * 2, name="twice")
    note.error(db.import_context, SPEC, kv.tokens, kv.pairs(), name="a\0b")
    note.error(db.get, "none")
    db.drop("first")
    note.error(db.drop, "first")
    note(db.contexts())


def decoding(db, note, kv):
    db.import_context(SPEC, kv.tokens[:130], kv.pairs(0, 130), name="doc")
    with db.create_session(SPEC, kv.tokens) as session:
        note(session.spec)
        note(session.reused)
        for layer, (k, v) in enumerate(kv.pairs(130, 190)):
            note(session.attend(layer, kv.q[layer][:, 130:190], k, v, start=130))
        for at in range(190, 200):
            for layer, (k, v) in enumerate(kv.pairs(at, at + 1)):
                note(session.attend(layer, kv.q[layer][:, at : at + 1], k, v))
        note(session.attention(1, kv.q[1][:, -7:]))
        note(session.attention(1, kv.q[1][:, -7:], retrieval=kvdb.Exact()))
        note(session.attend(1, *(array[:, :0] for array in (kv.q[1], *kv.pairs()[1]))))
        note(str(session.explain(0)))
        note(session.explain(1, hints=kvdb.Hints(rules_off=("short_context",))).explain(verbose=True))
        note(session.explain(1, analyze=True).outcome.output_error)
        note([str(plan) for plan in db.explain("doc")])
        note.error(session.explain, 0, hints=kvdb.Hints("tree"))
        note.error(db.explain, "doc", 0, analyze=True)
        note(session.stats())


def forking(db, note, kv):
    with db.create_session(SPEC, kv.tokens[:90]) as session:
        for layer, (k, v) in enumerate(kv.pairs(0, 90)):
            session.update(layer, k, v)
        with session.fork() as twin, twin.fork() as third:
            note(twin.attend(0, kv.q[0][:, 90:95], *(x[:, 90:95] for x in kv.pairs()[0])))
            note(third.attend(0, kv.q[0][:, 95:99], *(x[:, 95:99] for x in kv.pairs()[0])))
            note(session.attention(0, kv.q[0][:, :90]))
            note([s.stats() for s in (session, twin, third)])
        note.error(twin.stats)
        note(db.store(session, name="kept"))
        note.error(db.store, session, name="kept")
        note.error(db.store, session, name="x", tokens=kv.tokens[:91])
        note.error(session.store, "", kv.tokens[:90])
    with db.get("kept").create_session(kv.tokens) as again:
        note(again.reused)
        note(again.attention(1, kv.q[1][:, :90]))
    db.drop("kept")
    note(db.contexts())


def going_wrong(db, note, kv):
    k, v = kv.pairs(0, 3)[0]
    q = kv.q[0][:, :3]
    with db.create_session(SPEC, kv.tokens) as session:
        session.update(0, k, v)
        for layer in (2, -1, 1 << 70, "0", None, 1.0):
            note.error(session.attend, layer, q, k, v)
            note.error(session.explain, layer)
        for start in (0, -1, 2, 1 << 40, -(1 << 40)):
            note.error(session.update, 0, k, v, start=start)
        for wrong in (q[:3], q[..., :8], q[0], q[:, :2], q.astype(np.float32), q * np.nan):
            note.error(session.attend, 0, wrong, k, v)
            note.error(session.attend, 0, q, wrong, v)
            note.error(session.update, 0, k, wrong)
        note.error(session.attention, 0, kv.q[0][:, :4])
        note.error(session.attention, 0, kv.q[0].astype("complex64"))
        note.error(session.attention, 0, [1.0])
        note(session.attention(0, q))
        note(session.stats())
    note.error(session.update, 0, k, v)
    note.error(session.fork)
    for tokens in ([[1]], [0.5], [-1], [1 << 40]):
        note.error(db.create_session, SPEC, tokens)
        note.error(db.import_context, SPEC, tokens, [], name="doc")
    note(db.create_session(SPEC, []).reused)


@pytest.mark.parametrize("scenario", [importing, decoding, forking, going_wrong], ids=lambda scenario: scenario.__name__)
def test_embedded_and_remote_do_the_same(databases, make_kv, scenario):
    traces = []
    for db in databases:
        trace = Trace()
        scenario(db, trace, make_kv(SPEC, 200))
        traces.append(trace.seen)
    embedded, remote = traces
    assert len(embedded) == len(remote)
    for one, other in zip(embedded, remote, strict=True):
        assert other == one
