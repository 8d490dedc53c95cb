"""Whatever a caller hands in: a call is answered, or raises an error of ours."""

import contextlib
import re

import numpy as np
import pytest

import kvdb

ODD = {
    "None": None,
    "True": True,
    "number": 5,
    "negative": -1,
    "fraction": 1.5,
    "NaN": float("nan"),
    "huge": 1 << 70,
    "text": "x",
    "half a pair": "\ud800",
    "bytes": b"x",
    "list": ["x"],
    "ragged": [[1], [1, 2]],
    "object": object(),
    "table": {"a": 1},
    "array": np.zeros((2, 2), np.float32),
    "no array": np.float32(1),
    "objects": np.array([object()]),
    "type": int,
}


def ones(*shape):
    return np.ones(shape, np.float32)


Q, K = ones(4, 1, 16), ones(2, 1, 16)
QUERY = {"retrieval": None, "max_missed_mass": None, "hints": None, "error_max": None, "options": None}
OF_A_SESSION = {
    "update": {"layer": 0, "k": K, "v": K, "start": 3},
    "attention": {"layer": 0, "q": Q, **QUERY},
    "attend": {"layer": 0, "q": Q, "k": K, "v": K, "start": 3, **QUERY},
    "explain": {"layer": 0, "analyze": False, **QUERY},
    "plan_recompute": {"seconds": 1.0, "floor": 0.1, "ratio": 0.5},
    "store": {"name": "other", "tokens": [1, 2, 3], "chunk": False},
}
OF_A_LAID_OUT_SESSION = {
    "attention": {"layer": 0, "q": Q, "positions": [0]},
    "overlay": {"layer": 0, "positions": [0], "k": K, "v": K},
    "deviation": {"layer": 0, "positions": [0], "k": K, "v": K, "score": None},
}
OF_A_DATABASE = {
    "import_context": {"tokens": [4, 5], "kv": [(ones(2, 2, 16), ones(2, 2, 16))] * 2, "name": "new", "queries": [Q, None]},
    "import_chunk": {"tokens": [4, 5], "kv": [(ones(2, 2, 16), ones(2, 2, 16))] * 2, "name": "new", "base": 0, "queries": None},
    "name_chunk": {"tokens": [4, 5], "name": "new"},
    "create_session": {"tokens": [1, 2, 3], "error_max": 0.1},
    "get": {"name": "doc"},
    "indexes": {"name": "doc"},
    "build_index": {"name": "doc", "kind": "flat", "wait": True},
    "verify": {"name": "doc"},
    "statistics": {"name": "doc"},
    "offload": {"name": "doc"},
    "explain": {"name": "doc", "layer": 0, "analyze": False, **QUERY},
    "contexts": {"prefix": "", "limit": 3, "after": ""},
}


@pytest.fixture
def rotated():
    """A model with RoPE, so that chunks can be laid out."""
    return kvdb.ModelSpec("tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32", rope=kvdb.Rope())


@pytest.fixture
def stored(db, rotated):
    db.import_context(rotated, [1, 2, 3], [(ones(2, 3, 16), ones(2, 3, 16))] * 2, name="doc")
    return db


def answered_or_refused(call, arguments):
    """Also with each argument in turn replaced by what it cannot be."""
    for name in arguments:
        for what, odd in ODD.items():
            try:
                with contextlib.suppress(kvdb.KvdbError):
                    call(**{**arguments, name: odd})
            except Exception as error:
                raise AssertionError(f"{name}={what} raised {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("method", OF_A_SESSION)
def test_calls_of_a_session(stored, rotated, method):
    with stored.create_session(rotated, [1, 2, 3]) as session:
        answered_or_refused(getattr(session, method), OF_A_SESSION[method])


@pytest.mark.parametrize("method", OF_A_LAID_OUT_SESSION)
def test_calls_of_a_session_of_parts(stored, rotated, method):
    with stored.create_session(rotated, parts=["doc", [7, 8]]) as session:
        answered_or_refused(getattr(session, method), OF_A_LAID_OUT_SESSION[method])


@pytest.mark.parametrize("method", OF_A_DATABASE)
def test_calls_of_a_database(stored, rotated, method):
    arguments = dict(OF_A_DATABASE[method])
    if method.startswith(("import", "name", "create")):
        arguments["spec"] = rotated

    def call(**given):
        made = getattr(stored, method)(**given)
        if isinstance(made, kvdb.Session):
            made.close()

    answered_or_refused(call, arguments)


def test_parts(stored, rotated):
    def call(part, visible, at):
        stored.create_session(rotated, parts=[kvdb.PromptPart(part, visible, at)]).close()

    answered_or_refused(call, {"part": "doc", "visible": 2, "at": 0})
    answered_or_refused(lambda parts: stored.create_session(rotated, parts=parts).close(), {"parts": ["doc"]})


def test_calls_of_several_sessions(stored, rotated):
    with stored.create_session(rotated, [1, 2, 3]) as session:
        several = {"sessions": [session], "layer": 0, "q": Q[None]}
        answered_or_refused(stored.attention, several)
        answered_or_refused(stored.attend, {**several, "k": K[None], "v": K[None], "starts": [3]})
        answered_or_refused(stored.store, {"session": session, "name": "other", "tokens": None, "chunk": False})


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (kvdb.Dipr, {"alpha": 0.5}),
        (kvdb.TopK, {"k": 1}),
        (kvdb.TopP, {"p": 0.5}),
        (kvdb.Hints, {"index": None, "rules_off": (), "memory_budget": None}),
        (kvdb.QueryOptions, {"retrieval": None, "max_missed_mass": None, "estimate_tail": False, "hints": None}),
        (kvdb.QueryOptions, {"error_max": 0.5, "hints": None}),
        (kvdb.Rope, {"theta": 1e4, "rotary_dims": None, "layout": "half", "scaling": ()}),
        (
            kvdb.ModelSpec,
            dict.fromkeys(("layers", "q_heads", "kv_heads"), 1)
            | {"name": "m", "head_dim": 8, "dtype": "float32", "rope": None, "fingerprint": "", "scale": None},
        ),
        (kvdb.Recompute, {"ratio": None, "strategy": "deviation", "floor": 0.15, "check_layer": 1}),
        (kvdb.ModelSpec.from_dict, {"values": {}}),
        (kvdb.Plan.from_dict, {"values": {}}),
        (kvdb.Choice.from_dict, {"values": {}}),
        (kvdb.connect, {"target": None, "token": "", "config": None, "rules": ()}),
    ],
    ids=[
        "Dipr",
        "TopK",
        "TopP",
        "Hints",
        "QueryOptions",
        "budget",
        "Rope",
        "ModelSpec",
        "Recompute",
        "spec",
        "plan",
        "choice",
        "connect",
    ],
)
def test_values(make, fields, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # text may be the name of a store
    answered_or_refused(make, fields)


@pytest.mark.parametrize("address", ["localhost:7700", "10.0.0.1:7700", "[::1]:7700"])
def test_an_address_without_its_beginning(address):
    with pytest.raises(kvdb.KvdbError, match=rf"expected kvdb://{re.escape(address)}"):
        kvdb.connect(address)


def test_a_closed_client_is_unavailable(db, rotated):
    session = db.create_session(rotated, [1])
    db.close()
    for call in (
        db.contexts,
        db.tiers,
        lambda: db.get("doc"),
        lambda: db.drop("doc"),
        lambda: db.offload("doc"),
        lambda: db.indexes("doc"),
        lambda: db.build_index("doc"),
        lambda: db.verify("doc"),
        lambda: db.statistics("doc"),
        lambda: db.explain("doc"),
        lambda: db.create_session(rotated, [1]),
        lambda: db.create_session(rotated, parts=["doc"]),
        lambda: db.import_context(rotated, [1], [(K, K)] * 2, name="doc"),
        lambda: db.attention([session], 0, Q[None]),
    ):
        with pytest.raises(kvdb.errors.Unavailable, match="closed"):
            call()
    with pytest.raises(kvdb.errors.SessionClosed):
        session.stats()
