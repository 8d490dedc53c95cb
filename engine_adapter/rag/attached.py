"""The model of a RAG engine, attached to a database, and whose turn it is to use it."""

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Lock
from typing import Any

from transformers import PreTrainedModel

import kvdb
from engine_adapter.rag.prompts import digest
from engine_adapter.transformers import attach
from engine_adapter.transformers.support import positions_max
from kvdb.errors import AlreadyExists, SessionClosed


class FairLock:
    """A lock that is handed on in the order in which it was asked for. A `threading.Lock` may let one thread starve others."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._taken = False
        self._waiting: deque[Lock] = deque()

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Wait for one's turn; it ends with the `with`."""
        self._take()
        try:
            yield
        finally:
            self._hand_on()

    def _take(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            gate = Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()  # opened by the holder that hands the lock on
        except BaseException:  # an interrupt; the turn that may have come in the meantime goes to the next
            with self._guard:
                came = gate not in self._waiting
                if not came:
                    self._waiting.remove(gate)
            if came:
                self._hand_on()
            raise

    def _hand_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


class AttachedModel:
    """A model that is attached until `close`. Thread-safe: callers take turns, in their order.

    engine: to be used by the caller whose turn it is.
    """

    def __init__(self, model: PreTrainedModel, db: kvdb.Client, namespace: str) -> None:
        self.model = model
        self.db = db
        self._namespace = namespace
        self._turns = FairLock()
        self._closed = False
        with ExitStack() as stack:
            self.engine = stack.enter_context(attach(model, db))
            self._resources = stack.pop_all()

    @property
    def spec(self) -> kvdb.ModelSpec:
        return self.engine.spec

    @property
    def positions(self) -> int:
        """The most tokens that the model can read; all that memory holds where its config does not say."""
        return positions_max(self.model) or sys.maxsize

    @contextmanager
    def turn(self) -> Iterator[Any]:
        """Only the caller uses the model for the time of the `with`, by the engine that is given. Raises SessionClosed."""
        with self._turns.mine():
            self.check_open()
            yield self.engine

    def store_beginning(self, ids: list[int]) -> None:
        """Store what every prompt begins with, and what documents are computed behind, unless it is stored. To be called within
        a turn."""
        if ids:
            with suppress(AlreadyExists):  # by an engine before this one, or earlier
                self.engine.store(name=f"{self._namespace}/instruction-{digest(ids)}", input_ids=ids)

    def check_open(self) -> None:
        """Raises SessionClosed."""
        if self._closed:
            raise SessionClosed("the RAG engine was closed; make another, it finds the documents in the database")

    def close(self) -> None:
        """Wait for calls under way, and restore the model. Closing twice does nothing."""
        with self._turns.mine():
            self._closed = True
            self._resources.close()


def vocabulary_of(model: PreTrainedModel) -> int:
    """The number of tokens that a model knows."""
    return int(model.config.get_text_config(decoder=True).vocab_size)
