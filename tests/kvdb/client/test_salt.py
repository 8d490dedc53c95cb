"""What is stored under one salt is never found under another, and all are asked in one call."""

from dataclasses import replace

import numpy as np
import pytest

import kvdb
from kvdb.errors import InvalidArgument, SpecMismatch
from tests.kvdb.blend.oracle import ROPES
from tests.reference import attention, relative_error

SALTS = ["", "tenant a", "größer"]


def imported(db, spec, make_kv, n=150):
    """The same ids under each salt, with KV of its own."""
    tokens = make_kv(spec, n).tokens
    kvs = {salt: make_kv(spec, n, seed=seed) for seed, salt in enumerate(SALTS)}
    for salt, kv in kvs.items():
        db.import_context(spec, tokens, kv.pairs(), name=f"doc {salt}", salt=salt)
    return tokens, kvs


def test_the_same_tokens_are_stored_and_found_once_for_each_salt(db, spec, make_kv):
    tokens, kvs = imported(db, spec, make_kv)
    new = make_kv(spec, 1, seed=9)
    sessions = [db.create_session(spec, tokens, salt=salt) for salt in SALTS]
    q, k, v = (np.stack([x[0]] * 3) for x in (new.q, new.k, new.v))
    outs = db.attend(sessions, 0, q, k, v)
    for session, out, (salt, kv) in zip(sessions, outs, kvs.items(), strict=True):
        assert session.reused == db.match(spec, tokens, salt=salt).tokens == len(tokens)
        keys, values = (np.concatenate([old[0], one[0]], axis=1) for old, one in ((kv.k, new.k), (kv.v, new.v)))
        assert relative_error(out, attention(new.q[0], keys, values, spec.softmax_scale, new=1)[0]) < 1e-5
        assert db.get(f"doc {salt}").info.salt == salt
    db.drop("doc tenant a")
    assert [db.match(spec, tokens, salt=salt).tokens for salt in SALTS] == [150, 0, 150]
    assert db.match(spec, tokens, salt="tenant b").tokens == 0


def test_a_session_and_its_forks_are_stored_under_their_salt(db, spec, make_kv):
    tokens, _ = imported(db, spec, make_kv)
    longer = np.append(tokens, [1, 2, 3]).astype(np.int32)
    new = make_kv(spec, 3, seed=9)
    with db.get("doc tenant a").create_session(longer) as session, session.fork() as twin:
        for layer, (k, v) in enumerate(new.pairs()):
            twin.update(layer, k, v)
        assert db.store(twin, name="longer").info.salt == "tenant a"
    assert [db.match(spec, longer, salt=salt).tokens for salt in SALTS] == [150, 153, 150]


def test_chunks_are_laid_out_where_their_salt_is(db, spec, make_kv):
    spec = replace(spec, rope=ROPES["half"])
    kv = make_kv(spec, 70)
    for salt in SALTS[:2]:
        db.import_chunk(spec, kv.tokens, kv.pairs(), name=f"chunk {salt}", salt=salt)
    assert db.name_chunk(spec, kv.tokens, name="another", salt="größer") is None
    assert db.name_chunk(spec, kv.tokens, name="another", salt="tenant a").info.salt == "tenant a"
    with db.create_session(spec, parts=[[1], "chunk tenant a", "another"], salt="tenant a") as session:
        assert session.start == 141
    for parts, salt in ((["chunk "], "tenant a"), (["chunk tenant a"], ""), (["chunk ", "another"], "")):
        with pytest.raises(SpecMismatch, match="another salt"):
            db.create_session(spec, parts=parts, salt=salt)


def test_a_store_keeps_salts(tmp_path, spec, make_kv):
    with kvdb.connect(str(tmp_path / "store")) as db:
        tokens, kvs = imported(db, spec, make_kv)
    with kvdb.connect(str(tmp_path / "store")) as db:
        assert [db.match(spec, tokens, salt=salt).tokens for salt in (*SALTS, "tenant b")] == [150, 150, 150, 0]
        for salt, kv in kvs.items():
            assert np.array_equal(db.get(f"doc {salt}").read(1)[0], kv.k[1])


@pytest.mark.parametrize("salt", [None, 3, b"bytes", "x" * 5000, "\ud800"])
def test_what_is_no_salt(db, spec, make_kv, salt):
    kv = make_kv(spec, 3)
    for call in (db.match, db.create_session):
        with pytest.raises(InvalidArgument):
            call(spec, kv.tokens, salt=salt)
    with pytest.raises(InvalidArgument):
        db.import_context(spec, kv.tokens, kv.pairs(), name="doc", salt=salt)
    assert db.contexts() == []
