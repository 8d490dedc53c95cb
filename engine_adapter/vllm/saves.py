"""Saving what vLLM computed: a step copies its blocks, and a thread of its own unpacks them and hands them to the database."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from torch import Tensor

from engine_adapter.contexts import ModelContexts
from engine_adapter.vllm.journal import Journal
from engine_adapter.vllm.layout import PackedLayout
from engine_adapter.vllm.log import LOG
from engine_adapter.vllm.requests import Transfer
from kvdb.errors import KvdbError
from kvdb.hardware.priority import NICEST, work_in_background

Packed = list[Tensor]
"""Blocks of a request as vLLM packs them, of layer after layer."""
Done = TypeVar("Done")

WAITING_MAX = 2 << 30
"""Bytes of copies that wait to be stored; what a step would copy beyond them is not saved."""


class Saves:
    """The saves of a step, and those of earlier steps that are not stored yet. caches: of each layer, by its number. journal:
    where saves are written down once they are stored. awaited: whether somebody waits for what is stored; else the thread that
    stores leaves the processor to vLLM's own."""

    def __init__(
        self,
        contexts: ModelContexts,
        layout: PackedLayout,
        caches: Mapping[int, Tensor],
        journal: Journal,
        *,
        waiting_max: int = WAITING_MAX,
        awaited: bool = False,
    ) -> None:
        self._contexts = contexts
        self._layout = layout
        self._caches = caches
        self._journal = journal
        self._waiting_max = waiting_max
        self._thread = ThreadPoolExecutor(1, "kvdb-save", initializer=None if awaited else partial(work_in_background, NICEST))
        self._step: list[tuple[Transfer, Packed]] = []
        self._waiting: dict[Future[None], int] = {}

    def begin(self, transfers: Sequence[Transfer], tails: Sequence[Transfer] = ()) -> None:
        """Take the saves of a step, which `finish` ends. tails: those of requests that ended; they are copied here, because
        nothing is written into their blocks until the step is over."""
        self._waiting = {future: nbytes for future, nbytes in self._waiting.items() if not future.done()}
        if self._journal.presence.skips("saved", len(transfers)):
            transfers, tails = (), ()
        if (transfers or tails) and sum(self._waiting.values()) > self._waiting_max:
            count = len(transfers) + len(tails)
            LOG.warning("kvdb steps aside: %d requests are not saved, because others wait to be stored", count)
            transfers, tails = (), ()
        self._step = [(transfer, []) for transfer in transfers]
        for tail in tails:
            self._submit(tail, [self._copy(tail, self._caches[layer]) for layer in sorted(self._caches)])

    def take(self, layer: int, cache: Tensor) -> None:
        """Copy what a layer's attention has just written. The layers come in order."""
        for transfer, packed in self._step:
            if len(packed) == layer:
                packed.append(self._copy(transfer, cache))

    def finish(self, failed: frozenset[int]) -> None:
        """End a step, and let its saves go on. failed: blocks whose loads failed; what stands in them is not saved."""
        step, self._step = self._step, []
        for transfer, packed in step:
            if len(packed) == len(self._caches) and not failed.intersection(transfer.blocks):
                self._submit(transfer, packed)

    def behind(self, action: Callable[[], Done]) -> Future[Done]:
        """Carry something out once everything that waits now is stored, or has failed."""
        return self._thread.submit(action)

    def wait(self) -> None:
        """Wait until everything is stored, or has failed."""
        wait(self._waiting)

    def close(self) -> None:
        self._thread.shutdown()

    def _submit(self, transfer: Transfer, packed: Packed) -> None:
        nbytes = sum(blocks.nbytes for blocks in packed)
        self._waiting[self._thread.submit(self._store, transfer, packed)] = nbytes

    def _copy(self, transfer: Transfer, cache: Tensor) -> Tensor:
        return self._layout.copy(cache, transfer.blocks, transfer.start, transfer.stop).cpu()

    def _store(self, transfer: Transfer, packed: Packed) -> None:
        if self._journal.presence.skips("saved"):
            return
        began, nbytes = time.monotonic(), 0
        try:
            with self._contexts.open(transfer.tokens, transfer.salt) as session:
                start = session.reused
                if not transfer.start <= start < transfer.stop:
                    return  # another one stored it, or what it follows is not stored any more
                skip = start - transfer.start
                for layer, blocks in enumerate(packed):
                    k, v = self._layout.unpack(blocks, transfer.start, transfer.stop)
                    nbytes += k.nbytes + v.nbytes
                    session.update(layer, k[:, skip:], v[:, skip:], start=start)
                self._contexts.keep(session, transfer.tokens, transfer.salt)
            self._journal.saved(transfer, time.monotonic() - began, nbytes)
        except KvdbError as error:
            if not self._journal.presence.lost(error, "saved"):
                LOG.warning("kvdb steps aside: %s is not saved: %s", transfer.request, error)
