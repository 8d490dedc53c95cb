"""Segments that lie on disk answer as they did from memory, as soon as each layer is there, or say with a type why not."""

import errno
import os
import resource
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest

import kvdb
from kvdb.client.client import Client
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import CapacityError, IntegrityError, NotFound, Unavailable, Unsupported
from kvdb.server.serve import Server
from kvdb.storage.loader import Loader
from kvdb.storage.stored_segment import StoredSegment
from tests.kvdb.catalog.offloading import ARENA, SPEC, answers, asked, change, held, opened, same, the_file
from tests.waiting import until


@pytest.fixture
def databases(tmp_path):
    with opened(tmp_path) as both:
        yield both


@pytest.fixture
def doc(databases, make_kv):
    """A stored document of 200 tokens, named "doc"."""
    kv = make_kv(SPEC, 200)
    databases[1].import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
    return kv


class Prompt(NamedTuple):
    tokens: np.ndarray
    q: np.ndarray


class Gate:
    """Reads of layers wait until they are let; `read` tells which were read, `loadings` which segments are being loaded."""

    def __init__(self, monkeypatch):
        self.read, self.loadings = [], []
        load = Loader.load

        def noted(*arguments):
            self.loadings.append(load(*arguments))
            return self.loadings[-1]

        monkeypatch.setattr(Loader, "load", noted)
        self.reading = threading.Event()
        self._let = threading.Semaphore(0)
        read_layer = StoredSegment.read_layer

        def gated(file, layer, table):
            self.reading.set()
            assert self._let.acquire(timeout=20)
            self.read.append(layer)
            read_layer(file, layer, table)

        monkeypatch.setattr(StoredSegment, "read_layer", gated)

    def let(self, layers):
        self._let.release(layers)

    def let_once_given_up(self):
        """Let the layer under way be read as soon as nobody wants its segment any more, which whoever gives it up waits for."""

        def let():
            until(lambda: self.loadings[-1].ended)
            self.let(1)

        threading.Thread(target=let).start()


def test_an_offloaded_context_takes_no_blocks_and_answers_the_same_bits(databases, doc):
    engine, db = databases
    before, blocks, nbytes = asked(db, doc), held(engine, "cpu"), db.get("doc").info.nbytes
    for _ in range(2):
        assert db.offload("doc") == nbytes
        assert (held(engine, "cpu"), held(engine, "disk")) == (0, blocks)
        assert db.get("doc").info.nbytes == nbytes
        engine.check_integrity()
        assert db.offload("doc") == 0
        assert same(asked(db, doc), before)
        assert held(engine, "cpu") == blocks
        engine.check_integrity()


def test_a_session_with_a_tail_goes_on_over_a_context_of_several_segments(databases, doc, make_kv):
    _, db = databases
    more = make_kv(SPEC, 90, seed=3)
    outs = []
    for offload in (False, True):
        tokens = np.concatenate([doc.tokens, more.tokens])
        if offload:
            db.offload("doc")
            db.drop("more")
        session = db.create_session(SPEC, tokens)
        assert session.reused == 200
        for layer, (k, v) in enumerate(more.pairs()):
            session.update(layer, k, v)
        out = answers(session, more)
        db.store(session, name="more")
        session.close()
        if offload:
            db.offload("more")
        outs += [out, asked(db, Prompt(tokens, more.q))]
    assert same(outs[0], outs[2])
    assert same(outs[1], outs[3])
    assert same(outs[0], outs[1])


@pytest.fixture
def chunks(databases, make_kv):
    kvs = [make_kv(SPEC, n, seed=i) for i, n in enumerate((70, 64, 130))]
    for i, kv in enumerate(kvs):
        databases[1].import_chunk(SPEC, kv.tokens, kv.pairs(), name=f"chunk-{i}", base=5 * i)
    return kvs


def blended(db, chunks):
    """What a session over moved chunks, a gap and recomputed tokens answers."""
    gap = np.arange(10, dtype=np.int32)
    parts = [db.get("chunk-2"), gap, db.get("chunk-0"), db.get("chunk-2"), db.get("chunk-1")]
    session = db.create_session(SPEC, parts=parts)
    rng = np.random.default_rng(0)
    at = np.concatenate([np.arange(130, 140), np.sort(rng.choice(np.arange(140, session.start), 25, replace=False))])
    out = []
    for layer in range(SPEC.layers):
        k, v = (rng.standard_normal((SPEC.kv_heads, len(at), SPEC.head_dim)).astype(SPEC.numpy_dtype) for _ in range(2))
        q = rng.standard_normal((SPEC.q_heads, len(at), SPEC.head_dim)).astype(SPEC.numpy_dtype)
        out.append(session.deviation(layer, at, k, v))
        session.overlay(layer, at, k, v)
        out.append(session.attention(layer, q, positions=at))
        fresh = chunks[0].k[layer][:, :1], chunks[0].v[layer][:, :1]
        out.append(session.attend(layer, q[:, :1], *fresh))
    session.close()
    return out


def test_chunks_are_blended_from_disk_as_from_memory(databases, chunks):
    engine, db = databases
    before = blended(db, chunks)
    for name in ("chunk-0", "chunk-2"):  # one stays in memory
        assert db.offload(name)
    assert same(blended(db, chunks), before)
    for name in ("chunk-0", "chunk-1", "chunk-2"):
        assert db.offload(name)
    assert held(engine, "cpu") == 0
    assert same(blended(db, chunks), before)


def test_a_layer_is_answered_before_the_last_is_read(databases, doc, monkeypatch):
    _, db = databases
    before = asked(db, doc)
    db.offload("doc")
    gate = Gate(monkeypatch)
    session = db.create_session(SPEC, doc.tokens)
    for layer in range(SPEC.layers):
        assert gate.read == list(range(layer))
        gate.let(1)
        assert same(answers(session, doc, [layer]), before[layer : layer + 1])
    session.close()


def test_two_sessions_load_once(databases, doc, monkeypatch):
    _, db = databases
    before = asked(db, doc)
    db.offload("doc")
    gate = Gate(monkeypatch)
    sessions = [db.create_session(SPEC, doc.tokens) for _ in range(2)]
    sessions.append(sessions[0].fork())
    gate.let(SPEC.layers)
    for session in sessions:
        assert same(answers(session, doc), before)
        session.close()
    assert gate.read == list(range(SPEC.layers))


def test_what_a_session_reads_leaves_when_the_last_one_closes(databases, doc):
    engine, db = databases
    first, second = (db.create_session(SPEC, doc.tokens) for _ in range(2))
    before = answers(first, doc)
    assert db.offload("doc") == 0
    first.close()
    assert held(engine, "disk") == held(engine, "cpu") > 0
    assert same(answers(second, doc), before)
    second.close()
    assert held(engine, "cpu") == 0
    assert same(asked(db, doc), before)


def test_who_opens_a_session_before_it_left_keeps_it_in_memory(databases, doc):
    engine, db = databases
    first = db.create_session(SPEC, doc.tokens)
    db.offload("doc")
    second = db.create_session(SPEC, doc.tokens)
    first.close()
    second.close()
    assert held(engine, "cpu") > 0


@pytest.mark.needs_folder
def test_a_changed_byte_is_never_served(databases, doc, tmp_path, monkeypatch):
    engine, db = databases
    before = asked(db, doc)
    db.offload("doc")
    path = the_file(tmp_path)
    contents = path.stat().st_size
    extent = (contents - 4096) // SPEC.layers
    at = 4096 + 2 * extent + 1234
    change(path, at)
    for _ in range(2):
        session = db.create_session(SPEC, doc.tokens)
        assert same(answers(session, doc, [0, 1]), before[:2])
        for layer in (2, 3):
            with pytest.raises(IntegrityError, match="of layer 2 does not match its checksum; nothing of it is used"):
                session.attention(layer, doc.q[layer, :, :3])
        with pytest.raises(IntegrityError):
            session.update(2, doc.k[2][:, :1], doc.v[2][:, :1])
        assert same(answers(session, doc, [0, 1]), before[:2])
        session.close()
        engine.check_integrity()
    change(path, at)  # back, as a disk may that erred while it read
    assert same(asked(db, doc), before)


@pytest.mark.needs_folder
def test_a_file_that_was_cut_short_or_is_gone_is_a_typed_error(databases, doc, tmp_path):
    _, db = databases
    db.offload("doc")
    path = the_file(tmp_path)
    good = path.read_bytes()
    os.truncate(path, len(good) - 4096)
    with pytest.raises(IntegrityError, match="it has"):
        asked(db, doc)
    path.unlink()
    with pytest.raises(Unavailable, match="cannot be read: No such file"):
        asked(db, doc)
    path.write_bytes(good)
    asked(db, doc)


@pytest.mark.needs_folder
def test_a_full_disk_leaves_the_segment_in_memory(databases, doc):
    engine, db = databases
    before = asked(db, doc)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    try:
        with pytest.raises(CapacityError, match=r"has no room .* [\d,]+ bytes free on its file system; .* storage\.disk_path "):
            db.offload("doc")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    engine.check_integrity()
    assert held(engine, "disk") == 0
    assert same(asked(db, doc), before)
    assert db.offload("doc")


@pytest.mark.needs_folder
def test_an_offload_that_breaks_off_leaves_the_segment_in_memory(databases, doc, monkeypatch):
    engine, db = databases
    before = asked(db, doc)
    write, calls = os.pwritev, []

    def pwritev(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(Unavailable, match="Input/output error; everything stays in main memory"):
        db.offload("doc")
    engine.check_integrity()
    assert same(asked(db, doc), before)


def test_without_a_folder_nothing_is_offloaded(engine, make_kv):
    kv = make_kv(SPEC, 10)
    db = Client(engine)
    db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
    with pytest.raises(Unsupported, match="set storage.disk_path to a folder"):
        db.offload("doc")
    with pytest.raises(NotFound):
        db.offload("none")


def test_a_folder_that_cannot_be_used_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="storage.disk_path .* cannot be used"):
        Database(Config(storage=StorageConfig(disk_path=str(tmp_path / "file" / "folder"))))


@pytest.mark.needs_folder
def test_dropping_an_offloaded_context_removes_its_file(databases, doc, tmp_path, monkeypatch):
    engine, db = databases
    db.offload("doc")
    gate = Gate(monkeypatch)
    session = db.create_session(SPEC, doc.tokens)
    db.drop("doc")
    the_file(tmp_path)
    gate.let(SPEC.layers)
    answers(session, doc)
    session.close()
    assert not list(tmp_path.glob("*/*.segment"))
    assert (held(engine, "cpu"), held(engine, "disk")) == (0, 0)


def test_nothing_is_read_into_blocks_of_a_segment_that_died(databases, doc, monkeypatch):
    engine, db = databases
    db.offload("doc")
    gate = Gate(monkeypatch)
    session = db.create_session(SPEC, doc.tokens)
    assert gate.reading.wait(20)
    db.drop("doc")
    gate.let_once_given_up()
    session.close()  # waits for the layer under way
    assert gate.read == [0]
    assert held(engine, "cpu") == 0
    engine.check_integrity()


def test_what_comes_in_can_be_offloaded_before_it_is_there(databases, doc, monkeypatch):
    engine, db = databases
    before = asked(db, doc)
    db.offload("doc")
    gate = Gate(monkeypatch)
    db.create_session(SPEC, doc.tokens).close()
    assert gate.reading.wait(20)
    gate.let_once_given_up()
    assert db.offload("doc")
    assert held(engine, "cpu") == 0
    gate.let(SPEC.layers)
    assert same(asked(db, doc), before)


def test_closing_while_a_session_waits_ends_the_waiting(tmp_path, make_kv, monkeypatch):
    kv = make_kv(SPEC, 100)
    raised = []
    with opened(tmp_path) as (_engine, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        db.offload("doc")
        gate = Gate(monkeypatch)
        session = db.create_session(SPEC, kv.tokens)

        def ask():
            with pytest.raises(Unavailable, match="was closed while a segment was loaded"):
                session.attention(3, kv.q[3, :, :1])
            raised.append(True)

        asking = threading.Thread(target=ask)
        asking.start()
        assert gate.reading.wait(20)
        gate.let_once_given_up()
        db.close()
        asking.join(20)
    assert raised


@pytest.mark.needs_folder
def test_closing_waits_for_what_is_being_written(tmp_path, make_kv, monkeypatch):
    kv = make_kv(SPEC, 100)
    settling, settled, sync = threading.Event(), threading.Event(), os.fsync

    def fsync(file):
        settling.set()
        assert settled.wait(20)
        sync(file)

    with opened(tmp_path) as (_, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        monkeypatch.setattr(os, "fsync", fsync)
        offloading, closing = threading.Thread(target=db.offload, args=("doc",)), threading.Thread(target=db.close)
        offloading.start()
        assert settling.wait(20)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        settled.set()
        offloading.join(20)
        closing.join(20)
        assert not closing.is_alive()


@pytest.mark.needs_folder
def test_a_server_offloads_and_says_what_was_changed(databases, doc, tmp_path):
    engine, db = databases
    server = Server(engine, ServerConfig(port=0))
    server.start()
    try:
        with kvdb.connect(server.target) as remote:
            before, nbytes = asked(db, doc), db.get("doc").info.nbytes
            assert remote.offload("doc") == nbytes
            assert held(engine, "cpu") == 0
            assert same(asked(remote, doc), before)
            with pytest.raises(NotFound):
                remote.offload("none")
            remote.offload("doc")
            change(the_file(tmp_path), 4096)
            session = remote.create_session(SPEC, doc.tokens)
            with pytest.raises(IntegrityError, match="of layer 0 does not match"):
                session.attention(0, doc.q[0, :, :1])
            change(the_file(tmp_path), 4096)
            session.close()
            assert same(asked(remote, doc), before)
    finally:
        server.stop(grace=0)


def test_without_room_for_one_layer_in_memory_it_stays_on_disk(tmp_path, make_kv):
    kv, other = make_kv(SPEC, 2500), make_kv(SPEC, 4600, seed=1)
    with opened(tmp_path, cpu_bytes_max=5 * ARENA) as (engine, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        before = asked(db, kv)
        db.offload("doc")
        db.import_context(SPEC, other.tokens, other.pairs(), name="other")
        db.pin("other")
        in_use = held(engine, "cpu")
        for _ in range(2):
            with pytest.raises(CapacityError, match="cpu_bytes_max"):
                db.create_session(SPEC, kv.tokens)
            assert held(engine, "cpu") == in_use
            engine.check_integrity()
        with pytest.raises(CapacityError):
            db.build_index("doc")
        with pytest.raises(CapacityError):
            db.explain("doc")
        db.offload("other")
        assert same(asked(db, kv), before)


def test_indexes_leave_with_the_keys_and_can_be_built_again(tmp_path, make_kv):
    kv = make_kv(SPEC, 3000)
    with opened(tmp_path, automatic=False, on_demand="") as (engine, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        db.build_index("doc", "flat")

        def retrieved():
            session = db.create_session(SPEC, kv.tokens)
            out = [session.attention(layer, kv.q[layer, :, :1], retrieval=kvdb.TopK(50)) for layer in range(SPEC.layers)]
            assert session.stats().tokens_retrieved < session.stats().tokens_scanned or session.stats().rules
            session.close()
            return out

        before = retrieved()
        assert db.verify("doc").indexes == SPEC.layers
        db.offload("doc")
        assert db.indexes("doc") == []
        assert db.verify("doc").indexes == 0
        assert held(engine, "cpu") == 0
        (info,) = db.build_index("doc", "flat")
        assert (info.state, info.layers) == ("ready", SPEC.layers)
        assert db.verify("doc").indexes == SPEC.layers
        assert same(retrieved(), before)


def test_a_build_over_a_segment_keeps_it_until_it_is_done(tmp_path, make_kv, monkeypatch):
    kv = make_kv(SPEC, 3000)
    with opened(tmp_path, automatic=False, on_demand="") as (engine, db):
        db.import_context(SPEC, kv.tokens, kv.pairs(), name="doc")
        db.offload("doc")
        gate = Gate(monkeypatch)
        db.build_index("doc", "flat", wait=False)
        until(lambda: [info.state for info in db.indexes("doc")] == ["building"])
        assert db.offload("doc") == 0
        gate.let(SPEC.layers)
        assert engine.wait_for_builds(20)
        assert held(engine, "cpu") == 0
        assert [info.state for info in db.indexes("doc")] == ["stored"]


def test_sessions_and_offloads_in_any_order_give_the_same_bits(databases, doc, make_kv):
    engine, db = databases
    other = make_kv(SPEC, 150, seed=5)
    db.import_chunk(SPEC, other.tokens, other.pairs(), name="other")
    tokens = [doc.tokens, other.tokens]
    expected = [asked(db, doc), asked(db, other)]
    wrong, end, answered = [], time.monotonic() + 1.5, threading.Event()

    def ask(seed):
        rng = np.random.default_rng(seed)
        while time.monotonic() < end:
            which = int(rng.integers(2))
            session = db.create_session(SPEC, tokens[which])
            layers = range(int(rng.integers(SPEC.layers + 1)))
            if not same(answers(session, (doc, other)[which], layers), expected[which][: len(layers)]):
                wrong.append(which)
            session.close()

    def offload(seed):
        rng = np.random.default_rng(seed)
        while not answered.wait(float(rng.uniform(0, 0.003))):
            db.offload(("doc", "other")[int(rng.integers(2))])

    asking = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    offloading = [threading.Thread(target=offload, args=(i,)) for i in range(2)]
    for thread in asking + offloading:
        thread.start()
    for thread in asking:
        thread.join(30)
    answered.set()
    for thread in offloading:
        thread.join(30)
    assert not wrong
    engine.check_integrity()
    for name in ("doc", "other"):
        db.offload(name)
    assert held(engine, "cpu") == 0
