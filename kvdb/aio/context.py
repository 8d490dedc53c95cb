"""A stored context on a server, for asyncio."""

from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from kvdb.aio.awaited import awaited
from kvdb.aio.session import AsyncSession
from kvdb.client.context import Context
from kvdb.types import ContextInfo, ModelSpec, PromptPart


class AsyncContext:
    """What `kvdb.Context` is, with methods to be awaited; arguments, results and errors are the same. In an `async with`, the
    sessions opened through it are closed at the end."""

    def __init__(self, inner: Context) -> None:
        self.inner = inner

    @property
    def info(self) -> ContextInfo:
        """What is known of it."""
        return self.inner.info

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def spec(self) -> ModelSpec:
        return self.inner.spec

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return self.inner.tokens

    token_ids = awaited(Context.token_ids)
    read = awaited(Context.read)
    create_session = awaited(Context.create_session, AsyncSession)
    drop = awaited(Context.drop)
    close = awaited(Context.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self.inner).removeprefix('<')}"


def inner_parts(parts: Any) -> Any:
    """The parts of a prompt as the inner client takes them; it says what is wrong with anything else."""
    return [_inner_part(part) for part in parts] if isinstance(parts, Iterable) else parts


def _inner_part(part: Any) -> Any:
    if isinstance(part, PromptPart) and isinstance(part.source, AsyncContext):
        return replace(part, source=part.source.inner)
    return part.inner if isinstance(part, AsyncContext) else part
