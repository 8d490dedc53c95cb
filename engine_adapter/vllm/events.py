"""KV events of vLLM for what kvdb holds: blocks that were stored, and blocks that were found to be gone."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Self

from vllm.distributed.kv_events import (
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVConnectorKVEvents,
    KVEventAggregator,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from engine_adapter.vllm.journal import Changes
from engine_adapter.vllm.requests import Step, Transfer


class KvdbEvents(KVConnectorKVEvents):  # type: ignore[misc]  # without vllm its base is not known
    """The events of a step of a worker."""

    def __init__(self, events: list[KVCacheEvent]) -> None:
        self._aggregator = KVEventAggregator(1)
        self._aggregator.add_events(events)

    def add_events(self, events: list[KVCacheEvent]) -> None:
        self._aggregator.add_events(events)

    def aggregate(self) -> Self:
        common = self._aggregator.get_common_events()
        self._aggregator.clear_events()
        self._aggregator.add_events(common)
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._aggregator.increment_workers(count)

    def get_all_events(self) -> list[KVCacheEvent]:
        return list(self._aggregator.get_all_events())

    def get_number_of_workers(self) -> int:
        return int(self._aggregator.get_number_of_workers())

    def clear_events(self) -> None:
        self._aggregator.clear_events()
        self._aggregator.reset_workers()


def events_of(changes: Changes, block_size: int) -> KvdbEvents | None:
    """The events of what a worker's transfers changed, None for none. Blocks that are not full have no hash, and no event."""
    events: list[KVCacheEvent] = []
    for transfer in changes.stored:
        if hashes := transfer.hashes[(first := transfer.start // block_size) :]:
            events.append(
                BlockStored(
                    block_hashes=list(hashes),
                    parent_block_hash=transfer.hashes[first - 1] if first else None,
                    token_ids=transfer.tokens[first * block_size : len(transfer.hashes) * block_size].tolist(),
                    block_size=block_size,
                    lora_id=None,
                    medium=MEDIUM_STORAGE,
                    lora_name=None,
                )
            )
    for transfer in changes.missing:
        if hashes := transfer.hashes[transfer.start // block_size :]:
            events.append(BlockRemoved(block_hashes=list(hashes), medium=MEDIUM_STORAGE))
    return KvdbEvents(events) if events else None


class Announcements:
    """The scheduler's side: the hashes of its requests' blocks on the way to the worker, and events on the way back.

    enabled: whether vLLM publishes events; transfers have no hashes otherwise.
    """

    def __init__(self, *, enabled: bool, block_size: int) -> None:
        self._enabled = enabled
        self._block_size = block_size
        self._requests: dict[str, Any] = {}
        self._events: list[KVCacheEvent] = []

    def begin(self, request: Any) -> None:
        if self._enabled:
            self._requests[request.request_id] = request

    def label(self, step: Step) -> Step:
        """The same step, whose transfers have the hashes of their full blocks."""
        if not self._requests:
            return step
        return replace(
            step,
            loads=tuple(map(self._labelled, step.loads)),
            background=tuple(map(self._labelled, step.background)),
            saves=tuple(map(self._labelled, step.saves)),
            tails=tuple(map(self._labelled, step.tails)),
        )

    def forget(self, names: Collection[str]) -> None:
        for name in names:
            self._requests.pop(name, None)

    def receive(self, events: KvdbEvents | None) -> None:
        if events is not None:
            self._events += events.get_all_events()

    def take(self) -> Iterator[KVCacheEvent]:
        events, self._events = self._events, []
        return iter(events)

    def _labelled(self, transfer: Transfer) -> Transfer:
        known = self._requests.get(transfer.request)
        hashes = () if known is None else known.block_hashes[: transfer.stop // self._block_size]
        return replace(transfer, hashes=tuple(map(maybe_convert_block_hash, hashes)))
