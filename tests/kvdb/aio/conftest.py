from contextlib import asynccontextmanager

import pytest

import kvdb.aio
from kvdb.config import ServerConfig
from kvdb.server.serve import Server
from tests.kvdb.aio.behaviour import connect_plain


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
