"""kvdb for asyncio: `async with await kvdb.aio.connect("kvdb://host:7700") as db: ...`"""

from kvdb.client.remote.aio.client import AsyncClient, connect
from kvdb.client.remote.aio.session import AsyncSession

__all__ = ["AsyncClient", "AsyncSession", "connect"]
