"""`KvdbConnector`: kvdb as a cache behind vLLM's own, loaded by vLLM by this module's path.

    --kv-transfer-config '{
        "kv_connector": "KvdbConnector", "kv_connector_module_path": "engine_adapter.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"target": "kvdb://127.0.0.1:7700"}}'

target: what `kvdb.connect` takes. Beside it may stand loads: "layerwise" ahead of the forward pass, the default, or "async",
while the request waits and others go on; attention, see `engine_adapter.vllm.attention_options`; and blend, see
`engine_adapter.vllm.marks`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from engine_adapter.contexts import ModelContexts
from engine_adapter.vllm.answers import Answers
from engine_adapter.vllm.attention_layers import answer_layers
from engine_adapter.vllm.attention_options import AttentionOptions
from engine_adapter.vllm.blend import Blending, Results
from engine_adapter.vllm.blends import BlendLoad, Blends
from engine_adapter.vllm.events import Announcements, KvdbEvents, events_of
from engine_adapter.vllm.identity import salt_of, spec_of_engine
from engine_adapter.vllm.journal import Journal
from engine_adapter.vllm.loads import BackgroundLoads, Filling, Loads
from engine_adapter.vllm.log import LOG, join_vllm
from engine_adapter.vllm.marks import BlendOptions
from engine_adapter.vllm.metrics import KvdbMetrics, KvdbStats
from engine_adapter.vllm.packing import block_size_of, layers_of, layout_of
from engine_adapter.vllm.presence import Lookups, Presence
from engine_adapter.vllm.requests import Requests, Step
from engine_adapter.vllm.saves import Saves
from engine_adapter.vllm.shared_client import acquire, release
from kvdb.errors import InvalidArgument, KvdbError, Unavailable, Unsupported

FOLDER = "vllm"
LOADS = {"layerwise": False, "async": True}
"""Whether requests wait for their loads while others go on."""
COMPLETE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""The ends of requests that have an answer."""


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # without vllm its base is not known
    """What the scheduler's side tells the worker's for one step."""

    step: Step
    blends: tuple[BlendLoad, ...] = ()


class KvdbConnector(KVConnectorBase_V1):  # type: ignore[misc]  # without vllm its base is not known
    """Prefixes of prompts that vLLM computed once, in this process or another, are loaded in place of computed.

    One of it serves the scheduler, another the worker. What kvdb cannot serve, and a database that is not there, is full or
    fails, is said in vLLM's log, a database that goes away once: vLLM computes as if there were none.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._target: str | None = None
        self._block_size = 0
        self._attention: AttentionOptions | None = None
        self._blend: BlendOptions | None = None
        self._waits = False
        self._presence = Presence()
        self._contexts = self._connect(vllm_config, kv_cache_config)
        find = Lookups(self._contexts, self._presence).find
        self._requests = Requests(find, self._block_size, self._decodes_from(), background=self._waits)
        self._blends = Blends(self._blend, self._block_size)
        events = getattr(vllm_config, "kv_events_config", None)
        enabled = self._contexts is not None and events is not None and events.enable_kv_cache_events
        self._announcements = Announcements(enabled=enabled, block_size=self._block_size)
        self._journal = Journal(self._presence)
        self._loads: Loads | None = None
        self._background: BackgroundLoads | None = None
        self._received: frozenset[str] = frozenset()
        self._saves: Saves | None = None
        self._answers: Answers | None = None
        self._blending: Blending | None = None
        self._layers: dict[str, int] = {}
        self._failed: frozenset[int] = frozenset()

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache hands nothing over that somebody waits for."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        salt = self._salt_of(request)
        if salt is None:
            return 0, False
        blended = self._blends.match(request.request_id, num_computed_tokens)
        if blended is not None:
            return (0 if getattr(request, "skip_reading_prefix_cache", False) else blended), False
        tokens = self._requests.match(
            request.request_id,
            request.all_token_ids,
            request.num_prompt_tokens,
            salt,
            num_computed_tokens,
            getattr(request, "max_tokens", None),
        )
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        return tokens, self._waits and tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        numbers = blocks.get_block_ids()[0]
        self._requests.allocate(request.request_id, numbers, num_external_tokens)
        self._blends.allocate(request.request_id, numbers, num_external_tokens)

    def on_new_request(self, request: Any) -> None:
        self._blends.begin(request, self._salt_of(request))
        self._announcements.begin(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a request that has its answer until a worker has copied what it generated."""
        blended = self._blends.result(request.request_id)
        if request.status.name not in COMPLETE:
            return False, blended
        computed = min(request.num_computed_tokens + 1, len(request.all_token_ids))
        return self._requests.end(request.request_id, request.all_token_ids[:computed], block_ids), blended

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            name = new.req_id
            self._requests.schedule(name, new.num_computed_tokens, scheduled[name], new.block_ids[0], all_blocks=True)
        cached = scheduler_output.scheduled_cached_reqs
        for name, computed, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            resumed = name in cached.resumed_req_ids
            self._requests.schedule(name, computed, scheduled[name], blocks[0] if blocks else (), all_blocks=resumed)
        self._requests.preempt(scheduler_output.preempted_req_ids or ())
        self._requests.forget(scheduler_output.finished_req_ids)
        self._blends.forget(scheduler_output.finished_req_ids)
        step = self._announcements.label(self._requests.take_step())
        self._announcements.forget(scheduler_output.finished_req_ids)
        return StepMetadata(step, self._blends.take_step())

    def update_connector_output(self, connector_output: Any) -> None:
        self._requests.distrust(connector_output.invalid_block_ids or ())
        self._announcements.receive(connector_output.kv_cache_events)
        if isinstance(connector_output.kv_connector_worker_meta, Results):
            self._blends.receive(connector_output.kv_connector_worker_meta.of)

    def take_events(self) -> Iterable[Any]:
        return self._announcements.take()

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        contexts = self._contexts
        if contexts is None:
            return
        try:
            layers = layers_of(kv_caches)
            layout = layout_of(self._vllm_config, kv_caches, self._block_size)
            if contexts.spec.layers != len(layers):
                raise Unsupported(f"vLLM caches {len(layers)} layers; the model's spec has {contexts.spec.layers}")
        except KvdbError as error:
            LOG.warning("kvdb steps aside: %s", error)
            return
        self._layers = layers
        caches = {number: kv_caches[name] for name, number in layers.items()}
        filling = Filling(contexts, layout, caches, self._journal)
        self._loads, self._background = Loads(filling), BackgroundLoads(filling)
        self._saves = Saves(contexts, layout, caches, self._journal, awaited=self._attention is not None)
        if self._blend is not None:
            self._blending = Blending.start(self._vllm_config, layers, contexts, layout, caches, self._presence)
        if self._attention is not None:
            self._answers = Answers(contexts, layout, caches, self._attention, self._saves.behind, self._presence)
            answer_layers(self._vllm_config, layers, self._answers)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._saves is not None:
            self._saves.begin(connector_metadata.step.saves, connector_metadata.step.tails)
        if self._answers is not None:
            self._answers.begin(connector_metadata.step.decodes, connector_metadata.step.ended)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        step = metadata.step
        if self._loads is not None and self._background is not None:
            self._loads.begin(step.loads)
            self._background.begin(step.background)
        else:  # the other side found what this one cannot read
            self._failed = frozenset(block for load in step.loads + step.background for block in load.span(self._block_size))
            self._received = frozenset(load.request for load in step.background)

        if self._blending is not None:
            self._failed |= self._blending.run(metadata.blends)
        else:
            self._failed |= {block for blend in metadata.blends for block in blend.load.span(self._block_size)}

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._loads is not None and layer_name in self._layers:
            self._loads.wait(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._saves is not None and layer_name in self._layers:
            self._saves.take(self._layers[layer_name], kv_layer)

    def wait_for_save(self) -> None:
        """End the step: nothing is loaded into blocks, or copied out of them, behind this."""
        if self._loads is not None:
            self._failed |= self._loads.finish()
        if self._saves is not None:
            self._saves.finish(self._failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose answers were copied in this step, and those whose loads ended."""
        received, self._received = self._received, frozenset()
        if self._background is not None:
            received, failed = self._background.finished()
            self._failed |= failed
        copied = {tail.request for tail in self._get_connector_metadata().step.tails}
        return copied or None, set(received) or None

    def get_kv_connector_stats(self) -> KvdbStats | None:
        """What was loaded and saved since the last step, and missed; a save is counted by the step behind its end."""
        stats = KvdbStats(self._journal.take_numbers())
        return None if stats.is_empty() else stats

    def get_kv_connector_kv_cache_events(self) -> KvdbEvents | None:
        return events_of(self._journal.take_changes(), self._block_size)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvdbStats:
        return KvdbStats(data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> KvdbMetrics:
        return KvdbMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def build_connector_worker_meta(self) -> Results | None:
        return None if self._blending is None else self._blending.take_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, frozenset()
        return set(failed)

    def shutdown(self) -> None:
        """Store what waits to be stored, and let go of the database."""
        for part in (self._answers, self._loads, self._background, self._saves):
            if part is not None:
                part.close()
        self._answers, self._loads, self._background, self._saves, self._contexts = None, None, None, None, None
        target, self._target = self._target, None
        if target is not None:
            release(target)

    def _connect(self, vllm_config: Any, kv_cache_config: Any) -> ModelContexts | None:
        """None where kvdb steps aside, which the log says."""
        given = vllm_config.kv_transfer_config
        join_vllm()
        try:
            target = given.kv_connector_extra_config.get("target")
            if not isinstance(target, str) or not target:
                raise InvalidArgument(f"kv_connector_extra_config names no target; see {__name__}")
            if given.kv_load_failure_policy != "recompute":
                raise Unsupported('a load that fails would end its request; set "kv_load_failure_policy": "recompute"')
            loads = given.kv_connector_extra_config.get("loads", "layerwise")
            if loads not in LOADS:
                raise InvalidArgument(f"loads is {loads!r}; expected one of {', '.join(LOADS)}")
            self._attention = AttentionOptions.parse(given.kv_connector_extra_config.get("attention"))
            self._blend = BlendOptions.parse(given.kv_connector_extra_config.get("blend"))
            self._block_size = block_size_of(kv_cache_config)
            spec = spec_of_engine(vllm_config)
            client, self._presence = acquire(target)
            contexts = ModelContexts(client, spec, FOLDER)
        except KvdbError as error:
            LOG.warning("kvdb steps aside, on the side of the %s: %s%s", self.role.name.lower(), error, _hint(error))
            return None
        self._target, self._waits = target, LOADS[loads]
        return contexts

    def _decodes_from(self) -> int | None:
        return None if self._attention is None else self._attention.from_tokens

    def _salt_of(self, request: Any) -> str | None:
        return None if self._contexts is None else salt_of(request)


def _hint(error: KvdbError) -> str:
    """What helps where the other side has the folder open in a process of its own."""
    if isinstance(error, Unavailable):
        return "; a folder is open in one process, and vLLM's scheduler and workers may be several: start kvdb serve for them"
    return ""
