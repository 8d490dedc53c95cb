"""The requests of one scheduler whose prompts are laid out from stored documents, and what came of each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine_adapter.vllm.log import LOG
from engine_adapter.vllm.marks import BlendOptions, Marked
from engine_adapter.vllm.requests import Transfer
from kvdb.errors import InvalidArgument

RESULT = "kvdb_blend"
"""Under which a request's result stands among the `kv_transfer_params` of its output."""


@dataclass(frozen=True)
class BlendLoad:
    """A prompt that a worker lays out, recomputes, and puts into vLLM's blocks. load: the tokens that vLLM is told are there; its
    tokens reach to the end of the last document."""

    load: Transfer
    marked: Marked


Result = dict[str, float | int | str]


@dataclass
class _KnownBlend:
    tokens: Sequence[int]
    salt: str
    marked: Marked | None
    result: Result
    start: int = 0


class Blends:
    """What the scheduler knows of marked prompts. options: None where none is blended. block_size: tokens of a block."""

    def __init__(self, options: BlendOptions | None, block_size: int) -> None:
        self._options = options
        self._block_size = block_size
        self._known: dict[str, _KnownBlend] = {}
        self._step: list[BlendLoad] = []

    def begin(self, request: Any, salt: str | None) -> None:
        """Look for documents in vLLM's new request, salt: whom it belongs to, None for one that kvdb leaves alone.

        A marked prompt's blocks get hashes of its own, so that vLLM's cache shows them to no other request; none was looked up
        yet. Marks that cannot be read leave the whole prompt to vLLM, which the log and the output say.
        """
        if self._options is None or salt is None or request.prompt_token_ids is None:
            return
        tokens = request.prompt_token_ids
        try:
            marked = self._options.find(tokens, _given(request))
            if marked is not None and request.lora_request is not None:
                raise InvalidArgument("its model has a LoRA adapter, which vLLM applies in its own steps only")
        except InvalidArgument as error:
            LOG.warning("kvdb steps aside: %s is computed as one text: %s", request.request_id, error)
            self._known[request.request_id] = _KnownBlend(tokens, salt, None, {"refused": str(error)})
            return
        if marked is None:
            return
        self._known[request.request_id] = _KnownBlend(tokens, salt, marked, {})
        request.cache_salt = f"kvdb blend {request.request_id}"
        request.block_hashes.clear()
        request.update_block_hashes()

    def match(self, name: str, computed: int) -> int | None:
        """How many tokens behind the `computed` ones are blended; None for a request without documents. The last token is left to
        vLLM, which needs its output."""
        known = self._known.get(name)
        if known is None or known.marked is None:
            return None
        known.start = computed
        if "refused" in known.result:
            return 0
        return max(0, min(known.marked.spans[-1][1], len(known.tokens) - 1) - computed)

    def allocate(self, name: str, blocks: Sequence[int], external: int) -> None:
        """Note the blocks of a request, `external` of whose tokens shall be in them."""
        known = self._known.get(name)
        if known is None or known.marked is None or not external:
            return
        stop = known.start + external
        tokens = np.asarray(known.tokens[: known.marked.spans[-1][1]], np.int32)
        held = tuple(blocks[: -(-stop // self._block_size)])
        self._step.append(BlendLoad(Transfer(name, tokens, known.salt, known.start, stop, held), known.marked))

    def take_step(self) -> tuple[BlendLoad, ...]:
        """What the worker blends in the step that was scheduled last."""
        step, self._step = tuple(self._step), []
        return step

    def receive(self, results: Mapping[str, Result]) -> None:
        """Note what came of blends. One that failed is not tried again."""
        for name, result in results.items():
            if name in self._known:
                self._known[name].result = dict(result)

    def result(self, name: str) -> dict[str, Any] | None:
        """What vLLM hands to whom a request's output goes; None for one without documents."""
        known = self._known.get(name)
        if known is None:
            return None
        own = known.result or {"refused": "the worker blended nothing; its log says why"}
        return {RESULT: own if "refused" in own else own | {"tail": len(known.tokens) - int(own["laid_out"])}}

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._known.pop(name, None)


def _given(request: Any) -> dict[str, Any]:
    """What a request says of its documents; the HTTP endpoint passes `kv_transfer_params` on."""
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    return {**(request.kv_transfer_params or {}), **extra}
