"""Calls of the engine, on threads of their own and in their order."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Lock
from typing import Any, TypeVar

from engine_adapter.rag import Answer
from engine_adapter.rag_server.errors import Busy, Stopping

T = TypeVar("T")
Ask = Callable[[Callable[[str], object], Event], Answer]
"""Answers, and hands on each piece of text; ends at the next token once the event is set."""


class CallQueue:
    """Threads and what waits for them. Thread-safe."""

    def __init__(self, threads: int, waiting_max: int, name: str) -> None:
        """waiting_max: the most calls that wait for a thread."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._open_max = threads + waiting_max
        self._guard = Lock()
        self._open: dict[Future[Any], Event] = {}
        self._ended = False

    def submit(self, call: Callable[[], T], stop: Event | None = None) -> Future[T]:
        """Have it called. stop: set when it is to end. Raises Busy where too much waits, and Stopping."""
        with self._guard:
            if self._ended:
                raise Stopping
            if len(self._open) >= self._open_max:
                raise Busy(len(self._open))
            future = self._threads.submit(call)
            self._open[future] = stop or Event()
        future.add_done_callback(self._done)
        return future

    async def call(self, call: Callable[[], T]) -> T:
        """What the call returns, or raises. It goes on when nobody waits for it any more."""
        future = self.submit(call)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if future.cancelled():
                raise Stopping from None
            raise

    def cut(self) -> None:
        """Begin nothing any more, and have what runs end at its next token."""
        with self._guard:
            self._ended = True
            running = list(self._open.items())
        for future, stop in running:
            future.cancel()
            stop.set()

    @property
    def is_cut(self) -> bool:
        return self._ended

    def close(self) -> None:
        """Wait for what runs."""
        self.cut()
        self._threads.shutdown()

    def _done(self, future: Future[Any]) -> None:
        with self._guard:
            self._open.pop(future, None)


class Generation:
    """An answer under way. For one asyncio loop, in which it is made. Raises what `CallQueue.submit` raises."""

    def __init__(self, work: CallQueue, ask: Ask) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._stop = Event()
        self._future = work.submit(lambda: ask(self._hand_over, self._stop), self._stop)
        self._future.add_done_callback(lambda _: self._hand_over(None))

    async def pieces(self) -> AsyncIterator[str]:
        """The text, piece by piece; the model does not wait for whoever reads them."""
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def answer(self) -> Answer:
        """The whole, once it is there. Raises what the engine raises, and Stopping where the server's end cut it."""
        while not self._future.done():
            await self._pieces.get()
        if self._future.cancelled() or (self._work.is_cut and self._stop.is_set()):
            raise Stopping
        return self._future.result()

    def end(self) -> None:
        """Have it end at its next token, or before it has begun."""
        self._future.cancel()
        self._stop.set()

    def _hand_over(self, piece: str | None) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
