"""Laying prompts out from stored documents, on the side of vLLM's worker (CacheBlend, arXiv 2405.16444)."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

import kvdb
from engine_adapter.contexts import ModelContexts
from engine_adapter.recompute import Pass, Recomputed, SelectedTokens
from engine_adapter.vllm.blends import BlendLoad, Result
from engine_adapter.vllm.decoder import Decoder
from engine_adapter.vllm.layout import PackedLayout
from engine_adapter.vllm.log import LOG
from engine_adapter.vllm.packing import attention_of
from engine_adapter.vllm.presence import Presence
from kvdb.blend.strategies import Recompute
from kvdb.errors import AlreadyExists, KvdbError, NotFound
from kvdb.types import Tokens


@dataclass
class Results(KVConnectorWorkerMetadata):  # type: ignore[misc]  # without vllm its base is not known
    """What came of a worker's blends, by request."""

    of: dict[str, Result]

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "KVConnectorWorkerMetadata":
        return Results(self.of | other.of)


class Blending:
    """Blends into vLLM's blocks. contexts: where documents are stored as chunks. caches: of each layer, by its number. decoder:
    computes what is not stored, and recomputes."""

    def __init__(
        self, contexts: ModelContexts, layout: PackedLayout, caches: Mapping[int, Tensor], decoder: Decoder, presence: Presence
    ) -> None:
        self._contexts = contexts
        self._layout = layout
        self._caches = caches
        self._decoder = decoder
        self._presence = presence
        self._results: dict[str, Result] = {}

    @classmethod
    def start(
        cls,
        vllm_config: Any,
        layers: Mapping[str, int],
        contexts: ModelContexts,
        layout: PackedLayout,
        caches: Mapping[int, Tensor],
        presence: Presence,
    ) -> "Self | None":
        """One of an engine's own model; None where kvdb cannot run its layers, which the log says. layers: the number of each
        layer by its attention's name."""
        names = sorted(layers, key=layers.__getitem__)
        try:
            decoder = Decoder({name: attention_of(vllm_config, name) for name in names})
        except KvdbError as error:
            LOG.warning("kvdb steps aside: documents are not blended: %s", error)
            return None
        return cls(contexts, layout, caches, decoder, presence)

    def run(self, blends: Sequence[BlendLoad]) -> frozenset[int]:
        """Lay prompts out, recompute them and put them into their blocks, before vLLM computes what stands behind them. Returns
        the blocks of those that failed, which vLLM computes anew."""
        failed: set[int] = set()
        for blend in blends:
            load = blend.load
            result = self._results[load.request] = self._tried(blend)
            if "refused" in result:
                failed.update(load.span(self._layout.block_size))
        return frozenset(failed)

    def take_results(self) -> Results | None:
        results, self._results = self._results, {}
        return Results(results) if results else None

    def _tried(self, blend: BlendLoad) -> Result:
        if self._presence.skips("loaded"):
            return {"refused": "the database is away"}
        try:
            result = self._blend(blend)
        except KvdbError as error:
            if not self._presence.lost(error, "loaded"):
                LOG.warning("kvdb steps aside: %s is computed as one text: %s", blend.load.request, error)
            return {"refused": str(error)}
        self._presence.found()
        return result

    def _blend(self, blend: BlendLoad) -> Result:
        load, began = blend.load, time.perf_counter()
        spec, salt = self._contexts.spec, load.salt
        computed = sum(self._ensure(load.tokens[start:stop], salt) for start, stop in blend.marked.spans)
        with self._contexts.db.create_session(spec, parts=self._parts(blend), salt=salt) as session:
            selection = SelectedTokens(session, Recompute.of(blend.marked.ratio))
            self._decoder.recompute(Pass(session, selection))
            done = selection.result(session, began)
            for layer, cache in self._caches.items():
                k, v = session.read(layer, load.start, load.stop)
                self._layout.write(cache, load.blocks, load.start, (torch.as_tensor(k), torch.as_tensor(v)))
        return _result(done, len(load.tokens), computed)

    def _parts(self, blend: BlendLoad) -> list[kvdb.Context | Tokens]:
        """Documents, and the ids of what stands between them."""
        tokens, at = blend.load.tokens, 0
        parts: list[kvdb.Context | Tokens] = []
        for start, stop in blend.marked.spans:
            if at < start:
                parts.append(tokens[at:start])
            parts.append(self._contexts.db.get(self._name_of(tokens[start:stop], blend.load.salt)))
            at = stop
        return parts

    def _ensure(self, tokens: Tokens, salt: str) -> int:
        """Have a document stored as a chunk. Returns how many tokens were computed for it."""
        db, spec, name = self._contexts.db, self._contexts.spec, self._name_of(tokens, salt)
        with suppress(NotFound):
            db.get(name)
            return 0
        with suppress(AlreadyExists):
            if db.name_chunk(spec, tokens, name=name, salt=salt) is not None:
                return 0
            with db.create_session(spec, tokens[:0], salt=salt) as session:
                self._decoder.prefill(session, torch.from_numpy(tokens.astype(np.int64)))
                db.store(session, name=name, tokens=tokens, chunk=True)
        return len(tokens)

    def _name_of(self, tokens: Tokens, salt: str) -> str:
        return f"{self._contexts.name_of(tokens, salt)}/chunk"


def _result(done: Recomputed, laid_out: int, computed: int) -> Result:
    """reused, recomputed, fresh: as in `Recomputed`. stored: tokens of documents that were computed alone first, because they
    were not there. laid_out: tokens up to the end of the last document."""
    counts: Result = {"reused": round(done.reused), "recomputed": round(done.recomputed), "fresh": done.fresh, "stored": computed}
    return counts | {"ratio": done.choice.ratio, "laid_out": laid_out}
