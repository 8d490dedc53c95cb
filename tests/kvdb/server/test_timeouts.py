"""Every call takes `timeout=`, and ends when that is over."""

import inspect

import numpy as np
import pytest

import kvdb
from kvdb import errors

OF_OTHERS = {"update_indexer", "read_indexer", "state", "put_state", "put_sinks", "attend_selected"}
"""Calls for models whose layers differ, which those of the test's model do not."""
ENDS = {"close"}
"""What has no `timeout=`: it has to be done, and takes no longer than the connection's calls may."""
SUPPRESSING = {"close_sessions"}
"""What ends when its time is over, and then is done as far as the caller can tell."""
OVER = 1e-9


@pytest.fixture
def given(spec, make_kv):
    """The arguments of each call, by its name; the first two of calls on many sessions are made when they are made."""
    kv = make_kv(spec, 2)
    k, v = kv.pairs()[0]
    q, ids = kv.q[0][:, :1], kv.tokens
    one, at = (k[:, :1], v[:, :1]), np.array([0])
    stacked = k[None], v[None]
    return {
        "Client": {
            **dict.fromkeys(["get", "drop", "offload", "build_index", "indexes", "verify", "explain", "statistics"], ("doc",)),
            **dict.fromkeys(["contexts", "verify_store", "unknown_files", "compact", "status", "space", "sessions", "tiers"], ()),
            **dict.fromkeys(["pin", "unpin", "update"], ("doc",)),
            "rename": ("doc", "new"),
            "match": (spec, ids),
            "drop_all": ("doc",),
            "backup": ("/nowhere/at/all",),
            "explain_session": ("label",),
            "import_context": (spec, ids, kv.pairs(), {"name": "a"}),
            "import_chunk": (spec, ids, kv.pairs(), {"name": "a"}),
            "name_chunk": (spec, ids, {"name": "a"}),
            "create_session": (spec, ids),
            "create_sessions": (spec, [ids]),
            "update_sessions": (..., 0, *stacked),
            "truncate_sessions": (..., [0]),
            "close_sessions": (...,),
            "attend": (..., 0, q[None], *(array[None] for array in one)),
            "attention": (..., 0, q[None]),
            "store": (..., {"name": "a"}),
        },
        "Context": {"token_ids": (), "read": (0,), "create_session": (ids,), "drop": ()},
        "Session": {
            **dict.fromkeys(["fork", "stats", "plan_recompute"], ()),
            "update": (0, k, v),
            "overlay": (0, at, *one),
            "deviation": (0, at, *one),
            "attention": (0, q),
            "attend": (0, q, *one),
            "truncate": (0,),
            "read": (0, 0, 1),
            "store": ("a",),
            "explain": (0,),
        },
    }


def calls_of(kind):
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: function for name, function in found if not name.startswith("_")}


@pytest.mark.parametrize("kind", [kvdb.Client, kvdb.Context, kvdb.Session])
def test_every_call_takes_a_timeout(kind, given):
    calls = calls_of(kind)
    assert set(calls) - ENDS - OF_OTHERS == set(given[kind.__name__])
    for name in set(calls) - ENDS:
        timeout = inspect.signature(calls[name]).parameters.get("timeout")
        assert timeout is not None, name
        assert (timeout.kind, timeout.default) == (timeout.KEYWORD_ONLY, None)


@pytest.mark.parametrize("local_socket", ["", "auto"])
def test_every_call_ends_when_its_time_is_over(serve, local_socket, spec, make_kv, given):
    server, kv = serve(local_socket=local_socket), make_kv(spec, 40)
    with kvdb.connect(server.target) as db:
        context = db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        session = db.create_session(spec, parts=[context])
        for owner in (db, context, session):
            for name, arguments in given[type(owner).__name__].items():
                if name in SUPPRESSING:
                    continue
                call = getattr(owner, name)
                named = {key: value for one in arguments if isinstance(one, dict) for key, value in one.items()}
                many = session if name == "store" else [session]
                plain = [many if one is ... else one for one in arguments if not isinstance(one, dict)]
                with pytest.raises(errors.DeadlineExceeded):
                    call(*plain, **named, timeout=OVER)
        assert [known.name for known in db.contexts()] == ["doc"]
        assert session.stats().tokens == 40


def test_what_is_no_time_is_refused(db):
    for timeout in (0, -1.0, float("nan"), "1", True):
        with pytest.raises(errors.InvalidArgument, match="timeout"):
            db.tiers(timeout=timeout)
