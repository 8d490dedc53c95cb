"""The client for asyncio does what the other one does: the same behaviours, tried on both."""

import asyncio
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest

import kvdb
import kvdb.aio
from kvdb import errors
from kvdb.client.client import Client
from kvdb.client.context import Context
from kvdb.client.session import Session
from kvdb.config import ServerConfig
from kvdb.server.serve import Server
from kvdb.session.state import SessionState
from tests.waiting import until

SECONDS_MAX = 20.0


class Awaited:
    """The other client, or a session of it, with methods to be awaited."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        value = getattr(self.inner, name)
        if not callable(value):
            return value

        async def call(*arguments, **named):
            plain = [[one.inner for one in given] if _are_sessions(given) else given for given in arguments]
            return _wrapped(await asyncio.to_thread(value, *plain, **named))

        return call


def _are_sessions(given):
    return isinstance(given, list) and bool(given) and all(isinstance(one, Awaited) for one in given)


def _wrapped(value):
    if isinstance(value, Session | Client):
        return Awaited(value)
    if isinstance(value, Context):
        return value.info
    return [_wrapped(one) for one in value] if isinstance(value, list) else value


async def connect_plain(target, **named):
    return Awaited(await asyncio.to_thread(lambda: kvdb.connect(target, **named)))


@pytest.fixture(params=[kvdb.aio.connect, connect_plain], ids=["asyncio", "plain"])
def connect(request):
    """`async with connect(target) as db`."""

    @asynccontextmanager
    async def opened(target, **named):
        db = await request.param(target, **named)
        try:
            yield db
        finally:
            await db.close()

    return opened


@pytest.fixture
def server(engine):
    started = Server(engine, ServerConfig(port=0, token="secret"))
    started.start()
    yield started
    started.stop(grace=0)


def run(behaviour):
    asyncio.run(asyncio.wait_for(behaviour(), SECONDS_MAX))


def test_contexts_sessions_and_steps(connect, server, spec, make_kv, engine):
    kv = make_kv(spec, 60)

    async def behaviour():
        async with connect(server.target, token="secret") as db:
            info = await db.import_context(spec, kv.tokens, kv.pairs(), name="doc", metadata={"kind": "test"})
            assert (info.name, info.tokens) == ("doc", 60)
            assert [one.name for one in await db.contexts("d")] == ["doc"]
            assert (await db.get("doc")).metadata == {"kind": "test"}
            assert await db.match(spec, kv.tokens) == engine.match(spec, kv.tokens)
            session = await db.create_session(spec, kv.tokens)
            alone = engine.create_session(spec, kv.tokens)
            assert session.reused == alone.reused > 0
            np.testing.assert_array_equal(session.tokens, kv.tokens)
            q, k, v = kv.q[0][:, :3], kv.k[0][:, :3], kv.v[0][:, :3]
            out = await session.attend(0, q, k, v, start=session.start)
            np.testing.assert_array_equal(out, alone.attend(0, q, k, v, kvdb.QueryOptions()))
            await session.update(1, k, v)
            assert (await session.attention(1, q)).shape == q.shape
            twin = await session.fork()
            both = await db.attend([session, twin], 0, *(np.stack([array, array]) for array in (q, k, v)))
            np.testing.assert_array_equal(both[0], both[1])
            assert (await db.attention([session, twin], 0, np.stack([q, q]))).shape == both.shape
            await session.truncate(session.start)
            assert (await session.stats()).tokens == session.start
            alone.close()
            await session.close()
            await db.drop("doc")
            assert await db.contexts() == []

    run(behaviour)


def test_errors_are_the_same(connect, server, spec, make_kv):
    kv = make_kv(spec, 20)

    async def behaviour():
        with pytest.raises(errors.Unauthenticated):
            async with connect(server.target, token="wrong"):
                pass
        async with connect(server.target, token="secret") as db:
            with pytest.raises(errors.NotFound, match="doc"):
                await db.get("doc")
            with pytest.raises(errors.LayerError):
                await db.import_context(spec, kv.tokens, kv.pairs()[:1], name="doc")
            with pytest.raises(errors.ShapeError, match="all 20 tokens"):
                await db.import_context(spec, kv.tokens, kv.pairs(0, 5), name="doc")
            assert await db.contexts() == []
            session = await db.create_session(spec, [1])
            with pytest.raises(errors.LayerError):
                await session.update(9, kv.k[0], kv.v[0])
            with pytest.raises(errors.PositionError):
                await session.attention(0, kv.q[0])
            with pytest.raises(errors.InvalidArgument, match="timeout"):
                await session.stats(timeout=0)
            await session.close()
            await session.close()
            with pytest.raises(errors.SessionClosed):
                await session.stats()
        with pytest.raises(errors.Unavailable, match="connect again"):
            await db.contexts()

    run(behaviour)


@pytest.fixture
def stalled(monkeypatch):
    """Two events: an update is under way, and it may go on."""
    reached, opened = threading.Event(), threading.Event()
    update = SessionState.update

    def slowly(self, *arguments):
        reached.set()
        assert opened.wait(SECONDS_MAX)
        update(self, *arguments)

    monkeypatch.setattr(SessionState, "update", slowly)
    yield reached, opened
    opened.set()


def test_a_call_takes_no_longer_than_it_may(connect, server, spec, make_kv, stalled):
    kv = make_kv(spec, 5)

    async def behaviour():
        async with connect(server.target, token="secret") as db:
            session = await db.create_session(spec, [1], timeout=0.1)
            with pytest.raises(errors.DeadlineExceeded):
                await session.update(0, kv.k[0], kv.v[0])
            stalled[1].set()

    run(behaviour)


CANCELLED = {"method": "Update", "code": "CANCELLED"}


def test_a_cancelled_task_breaks_its_call_off(server, spec, make_kv, stalled):
    kv = make_kv(spec, 5)

    async def behaviour():
        async with await kvdb.aio.connect(server.target, token="secret") as db:
            session = await db.create_session(spec, [1])
            waiting = asyncio.create_task(session.update(0, kv.k[0], kv.v[0]))
            await asyncio.to_thread(stalled[0].wait, SECONDS_MAX)
            behind = asyncio.create_task(session.update(0, kv.k[0], kv.v[0]))  # its turn has not come
            await asyncio.to_thread(until, lambda: server._turns._waiting)
            behind.cancel()
            with pytest.raises(asyncio.CancelledError):
                await behind
            await asyncio.to_thread(until, lambda: server.registry.get_sample_value("kvdb_calls_total", CANCELLED))
            stalled[1].set()
            await waiting
            await session.update(0, kv.k[0], kv.v[0], start=5)

    run(behaviour)


def test_calls_of_many_tasks_go_on_at_once(server, spec, make_kv):
    kv = make_kv(spec, 5)

    async def behaviour():
        async with await kvdb.aio.connect(server.target, token="secret") as db:

            async def one(number):
                async with await db.create_session(spec, [number]) as session:
                    return await session.attend(0, kv.q[0], kv.k[0], kv.v[0])

            outs = await asyncio.gather(*[one(number) for number in range(8)])
            for out in outs:
                np.testing.assert_array_equal(out, outs[0])

    run(behaviour)


def test_a_server_that_is_not_there(connect):
    async def behaviour():
        with pytest.raises(errors.Unavailable, match="kvdb serve"):
            async with connect("kvdb://127.0.0.1:1"):
                pass

    run(behaviour)


CALLS = [
    lambda db, session: db.contexts(timeout=1e-9),
    lambda db, session: db.drop("a", timeout=1e-9),
    lambda db, session: session.fork(timeout=1e-9),
]


@pytest.mark.parametrize("call", CALLS, ids=["contexts", "drop", "fork"])
def test_a_call_ends_when_its_time_is_over(server, connect, spec, call):
    async def behaviour():
        async with connect(server.target, token="secret") as db:
            session = await db.create_session(spec, [1])
            with pytest.raises(errors.DeadlineExceeded):
                await call(db, session)

    run(behaviour)
