"""Loading what is stored into vLLM's blocks: layer by layer ahead of the forward pass, or behind it while a request waits."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

import kvdb
from engine_adapter.contexts import ModelContexts
from engine_adapter.vllm.journal import Journal
from engine_adapter.vllm.layout import PackedLayout
from engine_adapter.vllm.log import LOG
from engine_adapter.vllm.requests import Transfer
from kvdb.errors import KvdbError, NotFound


class Filling:
    """vLLM's blocks as loads fill them. caches: of each layer, by its number."""

    def __init__(self, contexts: ModelContexts, layout: PackedLayout, caches: Mapping[int, Tensor], journal: Journal) -> None:
        self._contexts = contexts
        self._layout = layout
        self._caches = caches
        self.journal = journal
        self.layers = sorted(caches)

    def open(self, transfer: Transfer) -> kvdb.Session:
        """The session that a load reads. Raises NotFound where less is stored than the load needs, and what opening raises."""
        session = self._contexts.open(transfer.tokens, transfer.salt)
        if session.reused < transfer.stop:
            stored = session.reused
            session.close()
            raise NotFound(f"{stored} of its {transfer.stop} tokens are stored")
        return session

    def fill(self, layer: int, transfer: Transfer, session: kvdb.Session) -> int:
        """Put a layer's KV into the blocks. Returns its bytes. Raises what reading raises."""
        cache = self._caches[layer]
        shape = session.spec.kv_heads, transfer.stop - transfer.start, session.spec.head_dim
        kv = torch.empty(shape, dtype=cache.dtype), torch.empty(shape, dtype=cache.dtype)
        session.read(layer, transfer.start, transfer.stop, out=kv)
        self._layout.write(cache, transfer.blocks, transfer.start, kv)
        return kv[0].nbytes + kv[1].nbytes

    def fail(self, transfer: Transfer, reason: KvdbError) -> tuple[int, ...]:
        """Say that a load failed. Returns its blocks, all of which vLLM computes anew."""
        if not self.journal.presence.lost(reason, "loaded"):
            LOG.warning("kvdb steps aside: %s is computed anew: %s", transfer.request, reason)
        if isinstance(reason, NotFound):
            self.journal.missed(transfer)
        return transfer.span(self._layout.block_size)


class Loads:
    """The loads of a step, done by a thread of their own in the order in which the forward pass needs them."""

    def __init__(self, filling: Filling) -> None:
        self._filling = filling
        self._thread = ThreadPoolExecutor(1, "kvdb-load")
        self._layers: dict[int, Future[int]] = {}
        self._open: list[tuple[Transfer, kvdb.Session]] = []
        self._failed: set[int] = set()
        self._began = 0.0
        self._ended = 0.0

    def begin(self, transfers: Sequence[Transfer]) -> None:
        """Start the loads of a step, which `finish` ends."""
        if transfers:
            self._began = time.monotonic()
            opening = self._thread.submit(self._open_all, transfers)
            self._layers = {layer: self._thread.submit(self._load, layer, opening) for layer in self._filling.layers}

    def wait(self, layer: int) -> None:
        """Wait until a layer's KV is in its blocks, or has failed."""
        if (future := self._layers.get(layer)) is not None:
            future.result()

    def finish(self) -> frozenset[int]:
        """Wait for the loads of all layers. Returns the blocks whose loads failed, all of which vLLM computes anew."""
        nbytes = sum(future.result() for future in self._layers.values())
        self._layers = {}
        for _, session in self._open:
            session.close()
        if self._open:
            self._filling.journal.loaded(self._ended - self._began, nbytes)
        self._open = []
        failed, self._failed = frozenset(self._failed), set()
        return failed

    def close(self) -> None:
        self._thread.shutdown()

    def _open_all(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            try:
                self._open.append((transfer, self._filling.open(transfer)))
            except KvdbError as error:
                self._failed.update(self._filling.fail(transfer, error))

    def _load(self, layer: int, opening: Future[None]) -> int:
        opening.result()
        nbytes = 0
        for transfer, session in tuple(self._open):
            try:
                nbytes += self._filling.fill(layer, transfer, session)
            except KvdbError as error:
                self._open = [(other, held) for other, held in self._open if held is not session]
                session.close()
                self._failed.update(self._filling.fail(transfer, error))
        self._ended = time.monotonic()
        return nbytes


class BackgroundLoads:
    """Loads whose requests wait, while vLLM computes others: one after the other, in a thread of their own."""

    def __init__(self, filling: Filling) -> None:
        self._filling = filling
        self._thread = ThreadPoolExecutor(1, "kvdb-load")
        self._waiting: dict[str, Future[tuple[int, ...]]] = {}

    def begin(self, transfers: Sequence[Transfer]) -> None:
        self._waiting |= {transfer.request: self._thread.submit(self._load, transfer) for transfer in transfers}

    def finished(self) -> tuple[frozenset[str], frozenset[int]]:
        """The requests whose loads ended since the last call, each told once, and the blocks of those that failed."""
        ended = {name: future.result() for name, future in self._waiting.items() if future.done()}
        for name in ended:
            del self._waiting[name]
        return frozenset(ended), frozenset(block for blocks in ended.values() for block in blocks)

    def close(self) -> None:
        self._thread.shutdown()

    def _load(self, transfer: Transfer) -> tuple[int, ...]:
        began = time.monotonic()
        try:
            with self._filling.open(transfer) as session:
                nbytes = sum(self._filling.fill(layer, transfer, session) for layer in self._filling.layers)
        except KvdbError as error:
            return self._filling.fail(transfer, error)
        self._filling.journal.loaded(time.monotonic() - began, nbytes)
        return ()
