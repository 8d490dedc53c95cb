"""The recomputed tokens of a blend outlive the database: what attention sees is what it saw before."""

import numpy as np
import pytest

from kvdb.errors import CapacityError, IntegrityError
from tests.stores import SPEC, connect, kv_of, names

CHUNK = np.arange(100) % 50
GAP = [1, 2, 3]
OVERLAID = (np.r_[np.arange(5, 75), np.arange(100, 103)], np.arange(100, 103))
"""The positions that each layer has recomputed: unlike many, more than a block of one."""
BLOCK_NBYTES = 2 * 64 * SPEC.kv_heads * SPEC.head_dim * 4


def blended(db, name="blend", overlaid=OVERLAID):
    """Store a context of a chunk, a gap and the chunk again."""
    if "chunk" not in names(db):
        db.import_chunk(SPEC, CHUNK, kv_of(CHUNK), name="chunk")
    rng = np.random.default_rng(5)
    with db.create_session(SPEC, parts=["chunk", GAP, "chunk"]) as session:
        for layer, positions in enumerate(overlaid):
            k, v = rng.standard_normal((2, SPEC.kv_heads, len(positions), SPEC.head_dim)).astype(np.float32)
            session.overlay(layer, positions, k, v)
        before = asked(session)
        session.store(name)
    return before


def asked(session):
    q = np.random.default_rng(6).standard_normal((SPEC.layers, SPEC.q_heads, 1, SPEC.head_dim)).astype(np.float32)
    return [session.attention(layer, q[layer], positions=[session.start - 1]) for layer in range(SPEC.layers)]


def answers(db, name="blend"):
    with db.create_session(SPEC, parts=[name]) as session:
        return asked(session)


def same(one, other):
    return all(np.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(one, other, strict=True))


def test_a_blend_answers_as_before_when_the_store_is_opened_again(tmp_path):
    with connect(tmp_path) as db:
        before = blended(db)
        assert same(answers(db), before)
        listed = repr(db.get("blend"))
        db._transport.check_integrity()
    for _ in range(2):
        with connect(tmp_path) as db:
            assert repr(db.get("blend")) == listed
            assert db.get("blend").info.blended
            assert same(answers(db), before)
            with db.create_session(SPEC, parts=["blend"]) as session, session.fork() as twin:
                db.drop("chunk") if "chunk" in names(db) else None
                assert same(asked(twin), before)
            db._transport.check_integrity()


def test_the_rows_wait_on_disk_until_a_session_needs_them(tmp_path):
    with connect(tmp_path) as db:
        blended(db)
        db.offload("chunk")
        (cpu, _) = db.tiers()
        assert cpu.blocks_used == 0
        with db.create_session(SPEC, parts=["blend"]):
            assert db.tiers()[0].blocks_used > 0
        db._transport.check_integrity()


def test_a_blend_without_recomputed_tokens_is_kept(tmp_path):
    with connect(tmp_path) as db:
        db.import_chunk(SPEC, CHUNK, kv_of(CHUNK), name="chunk")
        with db.create_session(SPEC, parts=["chunk", "chunk"]) as session:
            before = asked(session)
            session.store("blend")
    with connect(tmp_path) as db:
        assert same(answers(db), before)


@pytest.mark.needs_folder
def test_the_file_goes_with_its_context_even_while_sessions_stand_on_it(tmp_path):
    with connect(tmp_path) as db:
        before = blended(db)
        assert len(list(tmp_path.glob("segments/*.segment"))) == 2
        with db.create_session(SPEC, parts=["blend"]) as session:
            db.drop("blend")
            assert len(list(tmp_path.glob("segments/*.segment"))) == 1
            assert same(asked(session), before)
        db._transport.check_integrity()


@pytest.mark.needs_folder
def test_a_changed_file_is_never_answered_from(tmp_path):
    with connect(tmp_path) as db:
        blended(db)
    path = tmp_path / "segments" / "1.segment"
    content = bytearray(path.read_bytes())
    content[-BLOCK_NBYTES] ^= 1
    path.write_bytes(content)
    with connect(tmp_path) as db:
        with pytest.raises(IntegrityError, match="does not match its checksum"):
            answers(db)
        db._transport.check_integrity()
    path.unlink()
    with connect(tmp_path) as db:
        with pytest.raises(IntegrityError, match="'blend' was damaged"):
            answers(db)
        db.drop("blend")
        assert names(db) == ["chunk"]


def test_without_room_for_the_rows_nothing_is_stored_or_opened(tmp_path):
    with connect(tmp_path) as db:
        blended(db)
        nbytes = sum(path.stat().st_size for path in tmp_path.glob("segments/*"))
    with connect(tmp_path, disk_bytes_max=nbytes + 100, eviction="none") as db:
        with pytest.raises(CapacityError, match="the disk tier needs"):
            blended(db, "another")
        assert names(db) == ["blend", "chunk"]
        db._transport.check_integrity()
    with connect(tmp_path, cpu_bytes_max=5 * BLOCK_NBYTES) as db:  # the chunk takes four of them
        with pytest.raises(CapacityError):
            answers(db)
        db._transport.check_integrity()
