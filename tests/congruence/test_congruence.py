"""One engine behind two transports: whatever is done embedded and remote has the same result, to the bit."""

import re
from dataclasses import replace

import numpy as np
import pytest

import kvdb
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import KvdbError
from kvdb.server.serve import Server

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SPEC = kvdb.ModelSpec(
    "model",
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    dtype="bfloat16",
    rope=kvdb.Rope(theta=5e5, scaling=LLAMA3),
    fingerprint="0123",
    scale=0.3,
)
STORAGE = StorageConfig(arena_bytes=1 << 20)


@pytest.fixture(params=["auto", ""], ids=["shared memory", "gRPC"])
def databases(request):
    """An embedded database, and a server of its own with a client, which shares memory with it or not."""
    engine = Database(Config(storage=STORAGE))
    server = Server(engine, ServerConfig(port=0, local_socket=request.param))
    server.start()
    with kvdb.connect(config=Config(storage=STORAGE)) as embedded, kvdb.connect(server.target) as remote:
        yield embedded, remote
    server.stop(grace=0)
    engine.check_integrity()
    engine.close()


class Trace:
    """The results of a scenario in a form that can be compared."""

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
            return replace(value.info, created=0.0, used=0.0)
        case kvdb.SessionStats():
            return {**vars(value), "kernel_seconds": value.kernel_seconds > 0}
        case str():
            return re.sub(r"segment \d+", "segment #", value)  # numbered over the whole process
        case list() | tuple():
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
    note(db.tiers())


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


def blending(db, note, kv):
    one = note(db.import_chunk(SPEC, kv.tokens[:100], kv.pairs(0, 100), name="one", base=3))
    note(db.import_chunk(SPEC, kv.tokens[:100], kv.pairs(0, 100), name="the same text", base=50))
    note(db.import_chunk(SPEC, kv.tokens[100:], kv.pairs(100), name="two"))
    note(db.name_chunk(SPEC, kv.tokens[100:], name="two again"))
    note(db.name_chunk(SPEC, kv.tokens[101:], name="nothing"))
    parts = [kv.tokens[:5], one, [7, 8], kvdb.PromptPart("two", visible=70), kvdb.PromptPart("one", at=177), [1, 2, 3]]
    with db.create_session(SPEC, parts=parts) as session:
        note([session.start, session.reused, session.layout, session.tokens])
        note([session.plan_recompute(), session.plan_recompute(seconds=1e-5), session.plan_recompute(ratio=0.5)])
        again = np.array([0, 1, 2, 3, 4, 40, 105, 106, 120, 276])
        for layer, (k, v) in enumerate(kv.pairs(0, 10)):
            note(session.deviation(layer, again, k, v))
            note(session.deviation(layer, again[5:6], k[:, 5:6], v[:, 5:6], score="relative"))
            note.error(session.attention, layer, kv.q[layer][:, :1], positions=[3])
            note.error(session.attention, layer, kv.q[layer][:, :1])
            session.overlay(layer, again, k, v)
            note(session.attention(layer, kv.q[layer][:, :10], positions=again))
            note(session.attend(layer, kv.q[layer][:, :3], k[:, :3], v[:, :3]))
            note(session.attention(layer, kv.q[layer][:, :1]))
        note(str(session.explain(0)))
        note(session.stats())
        with session.fork() as twin:
            note([twin.start, twin.reused, twin.layout, twin.tokens])
            note(twin.attention(1, kv.q[1][:, :3]))
        note(db.store(session, name="blended"))
        note.error(db.store, session, name="x", chunk=True)
    note([str(plan) for plan in db.explain("blended")])
    with db.create_session(SPEC, parts=["blended", "one"]) as session:
        note([session.start, session.reused, session.layout, session.tokens])
        note(session.attend(0, kv.q[0][:, :1], *(x[:, :1] for x in kv.pairs()[0])))
    with db.create_session(SPEC, []) as session:
        for layer, (k, v) in enumerate(kv.pairs(0, 30)):
            session.update(layer, k, v)
        note(db.store(session, name="three", tokens=kv.tokens[:30], chunk=True))
    with db.create_session(SPEC, parts=[]) as session:
        note([session.start, session.reused, session.layout, session.tokens])
    db.drop("one")
    note(db.contexts())


def blending_wrong(db, note, kv):
    db.import_chunk(SPEC, kv.tokens[:64], kv.pairs(0, 64), name="one")
    with db.create_session(SPEC, parts=["one", "one"]) as session:
        db.store(session, name="document")
    other = replace(SPEC, fingerprint="another")
    for base in (-1, 1.5, "0", True, 1 << 60):
        note.error(db.import_chunk, SPEC, kv.tokens, kv.pairs(), name="x", base=base)
    for rope in (None, kvdb.Rope(scaling={"rope_type": "dynamic", "factor": 2.0}), kvdb.Rope(scaling={"rope_type": "longrope"})):
        note.error(db.import_chunk, replace(SPEC, rope=rope), kv.tokens, kv.pairs(), name="x")
    for spec, parts in [
        (SPEC, ["none"]),
        (SPEC, [None]),
        (SPEC, [[0.5]]),
        (other, ["one"]),
        (SPEC, ["one", "document"]),
        (SPEC, [kvdb.PromptPart("document", visible=7), "one"]),
        (SPEC, [kvdb.PromptPart("one", visible=65)]),
        (SPEC, [kvdb.PromptPart("one", visible=0)]),
        (SPEC, [kvdb.PromptPart("one", visible=True)]),
        (SPEC, [kvdb.PromptPart("one", visible="3")]),
        (SPEC, ["one", kvdb.PromptPart("one", at=63)]),
        (SPEC, ["one", kvdb.PromptPart("one", at=65)]),
        (SPEC, ["one", kvdb.PromptPart("one", at="64")]),
        (SPEC, ["one", kvdb.PromptPart("one", at=1 << 70)]),
    ]:
        note.error(db.create_session, spec, parts=parts)
    note.error(db.create_session, SPEC)
    note.error(db.create_session, SPEC, kv.tokens, parts=[])
    k, v = kv.pairs(0, 2)[0]
    q = kv.q[0][:, :2]
    note.error(db.offload, "one")
    note.error(db.offload, "none")
    with db.create_session(SPEC, parts=[[5, 6], "one"]) as session:
        for wrong in (-0.1, 1.5, float("nan"), "0", True):
            note.error(session.plan_recompute, floor=wrong)
            note.error(session.plan_recompute, ratio=wrong)
        for wrong in ("0", True, [1]):
            note.error(session.plan_recompute, seconds=wrong)
        note.error(session.plan_recompute, floor=None)
        note([session.plan_recompute(seconds=seconds) for seconds in (0, -1, float("nan"), float("inf"))])
    with db.create_session(SPEC, parts=[[5, 6], "one"]) as session:
        for positions in ([3, 2], [2, 2], [-1, 2], [65, 66], [1], [0.5, 1.0], [[1, 2]], np.array([], np.int64)):
            note.error(session.overlay, 0, positions, k, v)
            note.error(session.deviation, 0, positions, k, v)
            note.error(session.attention, 0, q, positions=positions)
        for wrong in (k[:1], k[:, :1], k.astype(np.float32), k * np.nan, [1.0]):
            note.error(session.overlay, 0, [0, 1], wrong, v)
            note.error(session.overlay, 0, [0, 1], k, wrong)
        note.error(session.overlay, 2, [0, 1], k, v)
        note.error(session.deviation, 0, [0, 1], k, v, score="none")
        note.error(session.deviation, 0, [0, 1], k, v, score=3)
        note.error(session.attend, 0, q, k, v)
        note.error(db.store, session, name="x")
        session.overlay(0, [0, 1], k, v)
        note.error(session.overlay, 0, [1, 2], k, v)
        note(session.attention(0, q, positions=[0, 65]))
        note(session.stats())
    note.error(session.overlay, 0, [2, 3], k, v)
    note.error(session.attention, 0, q, positions=[0, 65])
    with db.create_session(SPEC, kv.tokens) as session:
        note.error(session.overlay, 0, [0, 1], k, v)
        note.error(session.deviation, 0, [0, 1], k, v)
        note.error(session.attention, 0, q, positions=[0, 1])


def together(db, note, kv):
    db.import_context(SPEC, kv.tokens[:130], kv.pairs(0, 130), name="doc")
    sessions = [db.create_session(SPEC, kv.tokens[:n]) for n in (200, 150, 130, 90, 0)]
    for n in (1, 3, 1):
        for layer in range(SPEC.layers):
            q, k, v = (np.stack([array[layer][:, i : i + n] for i in range(5)]) for array in (kv.q, kv.k, kv.v))
            note(db.attend(sessions, layer, q, k, v))
            note(db.attention(sessions[1:4], layer, q[1:4], retrieval=kvdb.Dipr(0.1)))
    note([session.stats() for session in sessions])
    arrays = {"q": q, "k": k, "v": v}
    for wrong in (
        {"starts": [1, 2, 3, 4, 5]},
        {"starts": [1]},
        {"starts": [1, 2, 3, 4, 1 << 70]},
        {"layer": 2},
        {"q": q[:4]},
        {"k": k[0]},
        {"v": v.astype(np.float32)},
        {"v": v * np.nan},
        {"q": q * np.inf},
        {"sessions": []},
        {"sessions": [*sessions[:4], sessions[0]]},
        {"sessions": [*sessions[:4], "session"]},
        {"hints": kvdb.Hints("tree")},
    ):
        note.error(db.attend, **{"sessions": sessions, "layer": 0, **arrays, **wrong})
    note.error(db.attention, sessions, 0, q.repeat(150, axis=2))
    other = db.create_session(replace(SPEC, fingerprint="4567"), [])
    note.error(db.attend, [*sessions[:4], other], 0, q, k, v)
    sessions[3].close()
    note.error(db.attend, sessions, 0, q, k, v)
    note([session.stats() for session in sessions[:3]])


def reading_and_truncating(db, note, kv):
    doc = db.import_context(SPEC, kv.tokens[:130], kv.pairs(0, 130), name="doc")
    note(doc.read([1, 0], 5, 99))
    note(doc.read(1))
    note(doc.read(0, 130))
    with db.create_session(SPEC, kv.tokens[:150]) as session:
        for layer, (k, v) in enumerate(kv.pairs(130, 170)):
            session.update(layer, k, v)
        session.update(0, *(x[:, 170:173] for x in kv.pairs()[0]))
        note(session.read(1))
        for source in (doc, session):
            for layers, start, stop in (
                (2, 0, 1), ("0", 0, 1), ([0, 1, 9], 0, 1), (None, 0, 1), (0, -1, 1), (0, 2, 1), (0, 0, 500), (0, 1 << 70, None),
            ):  # fmt: skip
                note.error(source.read, layers, start, stop)
            note.error(source.read, 0, 0, 2, out=kv.pairs(0, 3)[0])
            note.error(source.read, [0, 1], 0, 3, out=kv.pairs(0, 3)[0])
        for tokens in (172, 140, 130, 70, 70):
            session.truncate(tokens)
            note([session.start, session.reused, session.layout, session.tokens, session.stats()])
            note(session.attend(1, kv.q[1][:, :2], *(x[:, 150:152] for x in kv.pairs()[1])))
        for tokens in (73, 1 << 70, -1, None, "1", 1.0):
            note.error(session.truncate, tokens)
        note(str(session.explain(1)))
    note.error(session.truncate, 0)
    note.error(session.read, 0)
    note.error(session.read, 0, 0, 1)
    db.drop("doc")
    note.error(doc.read, 0)


SCENARIOS = [reading_and_truncating, importing, decoding, forking, together, going_wrong, blending, blending_wrong]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
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
