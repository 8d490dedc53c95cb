"""The client for asyncio has all that the other one has."""

import inspect
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvdb
import kvdb.aio
from kvdb import errors
from kvdb.client.client import Client
from kvdb.client.remote.aio import carried
from kvdb.config import ServerConfig
from kvdb.server.serve import Server
from tests.kvdb.aio.behaviour import run

HANDLES = [(kvdb.Client, kvdb.aio.AsyncClient), (kvdb.Context, kvdb.aio.AsyncContext), (kvdb.Session, kvdb.aio.AsyncSession)]


@pytest.mark.parametrize(("plain", "awaited"), HANDLES, ids=["client", "context", "session"])
def test_nothing_is_missing(plain, awaited):
    """A property stays one; everything else has the same parameters, and is to be awaited."""
    for name in {name for name in dir(plain) if not name.startswith("_")}:
        one, other = inspect.getattr_static(plain, name), inspect.getattr_static(awaited, name)
        assert isinstance(one, property) == isinstance(other, property), name
        if not isinstance(one, property):
            assert inspect.signature(one) == inspect.signature(other), name
            assert inspect.iscoroutinefunction(other), name
    assert hasattr(awaited, "__aenter__")
    assert hasattr(awaited, "__aexit__")


def same(one, other):
    """Whether two answers are the same, as far as they are made of arrays, values and plans."""
    if isinstance(one, list | tuple) and not hasattr(one, "_fields"):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return str(one) == str(other)


def test_calls_on_a_session_of_parts(connect, server, spec, make_kv, engine):
    turned = replace(spec, rope=kvdb.Rope())
    kv, plain = make_kv(turned, 40), Client(engine)
    q, (k, v) = kv.q[0][:, :5], (array[:, :5] for array in kv.pairs()[0])
    one, at = (q[:, :1], k[:, :1], v[:, :1]), np.arange(3, 8)
    calls = [
        ("overlay", (0, at, k, v), {}),
        ("attention", (0, q), {"positions": at}),
        ("deviation", (0, at + 5, k, v), {}),
        ("plan_recompute", (), {"seconds": 1e-3}),
        ("attend", (0, *one), {}),
        ("update", (1, k, v), {}),
        ("explain", (0,), {"retrieval": kvdb.TopK(4)}),
        ("read", (0, 0, 20), {}),
        ("read", ([1, 0],), {}),
    ]

    async def behaviour():
        async with connect(server.target, token="secret") as db:
            context = await db.import_chunk(turned, kv.tokens, kv.pairs(), name="part")
            found = await db.name_chunk(turned, kv.tokens, name="again")
            assert (await db.name_chunk(turned, [1], name="nothing"), found.name) == (None, "again")
            alone = plain.create_session(turned, parts=[plain.get("part"), kvdb.PromptPart("part"), [1, 2]])
            session = await db.create_session(turned, parts=[context, kvdb.PromptPart(found), [1, 2]])
            assert (session.layout, session.start, session.error_max) == (alone.layout, 80, alone.error_max)
            for name, given, named in calls:
                assert same(await getattr(session, name)(*given, **named), getattr(alone, name)(*given, **named)), name
            alone.close()
            await session.close()

    run(behaviour)


def test_calls_on_stored_contexts(connect, server, spec, make_kv, engine):
    kv, plain = make_kv(spec, 40), Client(engine)
    same_calls = [
        *((name, ("new",)) for name in ("indexes", "statistics", "explain")),
        *((name, ()) for name in ("verify_store", "unknown_files", "sessions", "space", "tiers")),
    ]

    async def behaviour():
        async with connect(server.target, token="secret") as db:
            await db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
            await db.pin("doc")
            assert (await db.update("doc", metadata={"a": 1})).info.pinned
            await db.unpin("doc")
            context = await db.rename("doc", "new")
            assert (context.name, context.tokens, context.spec) == ("new", 40, spec)
            np.testing.assert_array_equal(await context.token_ids(), kv.tokens)
            out = np.empty_like(kv.k[1]), np.empty_like(kv.v[1])
            assert await context.read(1, out=out) is out
            assert same(out, (kv.k[1], kv.v[1]))
            session = await context.create_session(kv.tokens)
            labelled = await db.create_session(spec, kv.tokens, label="mine")
            assert (await db.sessions())[0].label == "mine"
            assert len(await db.explain_session("mine", 0)) == 1
            await labelled.close()
            assert (await db.status()).sessions == 1
            assert isinstance(await db.build_index("new", "flat"), list)
            assert (await db.verify("new")).indexes == len(await db.indexes("new"))
            for name, given in same_calls:
                assert same(await getattr(db, name)(*given), getattr(plain, name)(*given)), name
            assert (await db.drop_all("new")).in_use == ("new",)
            await context.close()
            with pytest.raises(errors.SessionClosed):
                await session.stats()
            assert await db.compact() >= 0
            for call in (db.offload("new"), db.backup("/nowhere/at/all")):
                with pytest.raises(errors.Unsupported):
                    await call
            await context.drop()
            with pytest.raises(errors.NotFound):
                await context.read(0)

    run(behaviour)


def test_calls_on_many_sessions(connect, server, spec, make_kv):
    kv = make_kv(spec, 5)

    async def behaviour():
        async with connect(server.target, token="secret") as db:
            sessions = await db.create_sessions(spec, [[1], [2]])
            for layer in range(spec.layers):
                twice = (np.stack([array[layer], array[layer]]) for array in (kv.k, kv.v))
                assert await db.update_sessions(sessions, layer, *twice, starts=[0, 0]) == [None, None]
            assert await db.truncate_sessions(sessions, [4, 3]) == [None, None]
            stored = await db.store(sessions[1], name="kept", tokens=[2, 3, 4])
            assert (stored.name, stored.tokens) == ("kept", 3)
            assert (await sessions[0].store("other", [1, 2, 3, 4])).tokens == 4
            with pytest.raises(errors.InvalidArgument, match=r"sessions\[1\]"):
                await db.update_sessions([sessions[0], 1], 0, kv.k[:1], kv.v[:1])
            await db.close_sessions(sessions)
            with pytest.raises(errors.SessionClosed):
                await sessions[1].stats()

    run(behaviour)


def test_more_than_fits_into_a_message(connect, engine, spec, make_kv):
    kv, config = make_kv(spec, 9000), ServerConfig(port=0, message_bytes_max=1 << 20, request_bytes_max=2 << 20, local_socket="")
    assert kv.q[0].nbytes > config.request_bytes_max

    async def behaviour(target):
        async with connect(target) as db:
            session = await db.create_session(spec, [1])
            await session.update(0, kv.k[0], kv.v[0])
            await session.update(1, kv.k[1], kv.v[1])
            assert same(await session.read([0, 1]), kv.pairs())
            assert (await session.attention(0, kv.q[0][:, -5000:])).shape[1] == 5000
            with pytest.raises(errors.MessageTooLarge):
                await session.attention(0, kv.q[0])

    server = Server(engine, config)
    server.start()
    try:
        run(lambda: behaviour(server.target))
    finally:
        server.stop(grace=0)


def test_without_greenlet_it_says_what_to_install(monkeypatch):
    path = Path(carried.__file__)
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kvdb\[aio\]'"):
        runpy.run_path(str(path))
