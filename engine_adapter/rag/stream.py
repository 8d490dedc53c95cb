"""The text of an answer, piece by piece as it comes."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from typing import Protocol

from engine_adapter.rag.answers import Answer, Usage
from kvdb.errors import InvalidArgument


class Ask(Protocol):
    """Answers, and hands on each piece of text; ends early, with the text so far, once `stop` is set."""

    def __call__(self, stream: Callable[[str], object], stop: Event) -> Answer: ...


class AnswerStream:
    """An iterator over the pieces of a text, to be used once; afterwards `answer`, `text` and `usage` have the whole.

    The model works in a thread of its own, which starts with the iteration and has ended when the iteration ends: after the last
    piece, by a `break`, or by an error, which the iteration raises.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._begun = False
        self._answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        if self._begun:
            raise InvalidArgument("the stream was iterated over before; ask again for another")
        self._begun = True
        pieces: SimpleQueue[str | None] = SimpleQueue()
        stop = Event()
        with ThreadPoolExecutor(1, thread_name_prefix="kvdb-rag") as worker:
            future: Future[Answer] = worker.submit(self._ask, pieces.put, stop)
            future.add_done_callback(lambda _: pieces.put(None))
            try:
                while (piece := pieces.get()) is not None:
                    yield piece
            finally:
                stop.set()
                self._answer = future.result()

    @property
    def answer(self) -> Answer:
        """Raises InvalidArgument before the iteration has ended."""
        if self._answer is None:
            raise InvalidArgument("the answer is not there yet; iterate over the stream to its end first, or leave the loop")
        return self._answer

    @property
    def text(self) -> str:
        return self.answer.text

    @property
    def usage(self) -> Usage:
        return self.answer.usage
