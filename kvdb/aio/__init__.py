"""kvdb for asyncio: `async with await kvdb.aio.connect("kvdb://host:7700") as db: ...`"""

from kvdb.aio.client import AsyncClient, connect
from kvdb.aio.context import AsyncContext
from kvdb.aio.session import AsyncSession

__all__ = ["AsyncClient", "AsyncContext", "AsyncSession", "connect"]
