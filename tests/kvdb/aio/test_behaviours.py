"""The client for asyncio does what the other one does: the same behaviours, tried on both."""

import asyncio
import gc
import threading

import numpy as np
import pytest

import kvdb
import kvdb.aio
from kvdb import errors
from kvdb.session.state import SessionState
from tests.kvdb.aio.behaviour import SECONDS_MAX, run
from tests.waiting import until


def test_contexts_sessions_and_steps(connect, server, spec, make_kv, engine):
    kv = make_kv(spec, 60)

    async def behaviour():
        async with connect(server.target, token="secret") as db:
            info = await db.import_context(spec, kv.tokens, kv.pairs(), name="doc", metadata={"kind": "test"})
            assert (info.name, info.tokens) == ("doc", 60)
            assert [one.name for one in await db.contexts("d")] == ["doc"]
            assert (await db.get("doc")).info.metadata == {"kind": "test"}
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


def calls_cancelled(server, method):
    return server.registry.get_sample_value("kvdb_calls_total", {"method": method, "code": "CANCELLED"})


def test_a_cancelled_task_breaks_its_call_off(server, spec, make_kv, stalled):
    kv = make_kv(spec, 5)

    async def behaviour():
        async with await kvdb.aio.connect(server.target, token="secret") as db:
            session, other = await db.create_session(spec, [1]), await db.create_session(spec, [2])
            waiting = asyncio.create_task(session.update(0, kv.k[0], kv.v[0]))
            await asyncio.to_thread(stalled[0].wait, SECONDS_MAX)
            twice = np.stack([kv.k[0], kv.k[0]]), np.stack([kv.v[0], kv.v[0]])
            together = asyncio.create_task(db.update_sessions([session, other], 0, *twice))
            await asyncio.to_thread(until, lambda: server._turns._waiting)  # its turn has not come
            for task, method in ((together, "UpdateSessions"), (waiting, "Decode")):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await asyncio.to_thread(until, lambda name=method: calls_cancelled(server, name))
            stalled[1].set()
            await session.truncate(session.start)
            await session.update(0, kv.k[0], kv.v[0], start=session.start)
            assert (await other.stats()).tokens == other.start

    run(behaviour)


def test_a_session_that_is_busy_lets_its_next_call_wait(server, spec, make_kv, stalled):
    kv = make_kv(spec, 5)

    async def behaviour():
        async with await kvdb.aio.connect(server.target, token="secret") as db:
            session = await db.create_session(spec, [1])
            first = asyncio.create_task(session.update(0, kv.k[0], kv.v[0]))
            await asyncio.to_thread(stalled[0].wait, SECONDS_MAX)
            with pytest.raises(errors.DeadlineExceeded):
                await session.update(0, kv.k[0], kv.v[0], timeout=0.05)
            cancelled, last = (asyncio.create_task(session.update(0, kv.k[0], kv.v[0])) for _ in range(2))
            await asyncio.sleep(0)
            cancelled.cancel()
            stalled[1].set()
            await asyncio.gather(first, last)
            assert cancelled.cancelled()
            await session.update(0, kv.k[0], kv.v[0], start=10)

    run(behaviour)


def test_closing_waits_for_the_call_that_is_under_way(server, spec, make_kv, stalled):
    kv = make_kv(spec, 5)

    async def behaviour():
        db = await kvdb.aio.connect(server.target, token="secret")
        session = await db.create_session(spec, [1])
        update = asyncio.create_task(session.update(0, kv.k[0], kv.v[0]))
        await asyncio.to_thread(stalled[0].wait, SECONDS_MAX)
        closing = asyncio.create_task(db.close())
        await asyncio.sleep(0)
        with pytest.raises(errors.Unavailable, match="connect again"):
            await db.contexts()
        stalled[1].set()
        assert await asyncio.gather(update, closing) == [None, None]
        with pytest.raises(errors.SessionClosed):
            await session.stats()

    run(behaviour)


def test_a_cancelled_import_and_a_cancelled_read_leave_nothing(server, spec, make_kv, engine, monkeypatch):
    kv = make_kv(spec, 60)

    async def behaviour():
        async with await kvdb.aio.connect(server.target, token="secret") as db:
            importing = None

            def layers():
                yield kv.pairs()[0]
                importing.cancel()
                yield kv.pairs()[1]

            importing = asyncio.create_task(db.import_context(spec, kv.tokens, layers(), name="doc"))
            with pytest.raises(asyncio.CancelledError):
                await importing
            await asyncio.to_thread(until, lambda: not sum(tier.blocks_used for tier in engine.tiers()))
            context = await db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
            reading = asyncio.create_task(context.read(0))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            np.testing.assert_array_equal((await context.read(0))[0], kv.k[0])

    run(behaviour)


def test_calls_of_many_tasks_go_on_at_once(server, spec, make_kv):
    kv = make_kv(spec, 5)

    async def behaviour():
        async with await kvdb.aio.connect(server.target, token="secret") as db:

            async def one(number):
                assert db.last_timings is None  # of this task
                async with await db.create_session(spec, [number]) as session:
                    return await session.attend(0, kv.q[0], kv.k[0], kv.v[0])

            await db.status()
            assert db.last_timings is not None
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


def test_a_forgotten_session_gives_its_blocks_back(server, spec, make_kv, engine):
    kv = make_kv(spec, 5)

    async def behaviour():
        async with await kvdb.aio.connect(server.target, token="secret") as db:
            session = await db.create_session(spec, [1])
            await session.attend(0, kv.q[0], kv.k[0], kv.v[0])
            assert db.last_timings is not None
            assert engine.status().sessions == 1
            del session
            gc.collect()
            await asyncio.to_thread(until, lambda: not engine.status().sessions)

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
