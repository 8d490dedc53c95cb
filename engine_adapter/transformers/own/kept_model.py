"""A model as kvdb stores it: what each layer of its own cache keeps, and caches made of that."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

import kvdb
from engine_adapter.transformers.layers.base import LayerKind, Part, copied, needed_from
from engine_adapter.transformers.layers.registry import CacheFacts, Heads, kind_of
from engine_adapter.transformers.own.trial import evaluating, filled_by_trial
from engine_adapter.transformers.support import attention_modules, text_config
from kvdb.errors import Unsupported
from kvdb.types import DTYPES

SpecLayer = kvdb.Attention | kvdb.State | kvdb.Shares

Row = Sequence[tuple[Part, ...]]
"""What each layer of the model keeps of one sequence."""


class KeptModel:
    """What the layers of a model's cache keep.

    kinds: one a layer of the model. numbers: which layers of the spec each layer's parts are. states: whether some layer keeps
    states, which are there at some positions only.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises Unsupported, naming the layer, for a model whose cache kvdb cannot take and hand back."""
        self.model = model
        cache = filled_by_trial(model)
        if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
            raise Unsupported(
                f"layer 0 of {type(model).__name__} caches a {type(cache.layers[0]).__name__}, and no layer of it keeps tokens, "
                "by which kvdb finds what is stored"
            )
        self.kinds: list[LayerKind] = [kind_of(facts) for facts in _facts(model, cache)]
        self.numbers, self.layers = _numbered(text_config(model), self.kinds)
        self.states = any(isinstance(part, kvdb.State) for part in self.layers)
        self.padded = all(kind.padded for kind in self.kinds)

    def spec(self, fingerprint: str) -> kvdb.ModelSpec:
        """The spec of its cache. Raises Unsupported for a dtype that kvdb does not store."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise Unsupported(f"the model computes in {dtype}; kvdb stores {', '.join(DTYPES)}, so load the model in one of them")
        return kvdb.ModelSpec(text_config(self.model).model_type, layers=self.layers, dtype=dtype, fingerprint=fingerprint)

    def fresh(self) -> DynamicCache:
        """A cache that holds nothing, as the model's own generate makes it."""
        return fresh_cache(self.model)

    def cache(self, rows: Sequence[Row], columns: int) -> DynamicCache:
        """A cache of `columns` columns of a batch. Each row brings what its tokens need, see `LayerKind.filled`; the
        arrays of a single row are taken over."""
        cache = self.fresh()
        if columns:
            for number, (kind, layer) in enumerate(zip(self.kinds, cache.layers, strict=True)):
                kind.filled(layer, [row[number] for row in rows], columns)
        return cache

    def taken(self, cache: Any, row: int, padding: int = 0) -> list[tuple[Part, ...]]:
        """What a row of a cache needs to be gone on with, of all its tokens; padding: the columns before them."""
        return [self.taken_of(number, cache, row, padding) for number in range(len(self.kinds))]

    def taken_of(self, number: int, cache: Any, row: int, padding: int = 0) -> tuple[Part, ...]:
        """The same of one layer."""
        kind, end = self.kinds[number], columns_of(cache)
        first = [needed_from(part, end - padding) for part in kind.descriptions if isinstance(part, kvdb.Attention)]
        return kind.taken(cache.layers[number], row, padding + max(first, default=0), end)

    def decode(self, ids: Tensor, cache: Any) -> Any:
        """Put tokens `[n]` of one sequence through the decoder, behind what the cache holds."""
        with torch.no_grad():
            return self.model.get_decoder()(input_ids=ids[None].to(self.model.device), past_key_values=cache, use_cache=True)


def fresh_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache that holds nothing, as a model's own generate makes it."""
    return DynamicCache(config=text_config(model))


def columns_of(cache: Any) -> int:
    """The number of columns that a cache holds."""
    return int(cache.get_seq_length())


def check_handed_back(kept: KeptModel) -> None:
    """Raises Unsupported for a model that answers otherwise from a cache that was taken and handed back than from its own."""
    own = filled_by_trial(kept.model)
    handed = kept.cache([copied(kept.taken(own, 0))], columns_of(own))
    ids = torch.tensor([1, 0], device=kept.model.device)
    with evaluating(kept.model):
        want, got = (kept.decode(ids, cache)[0].float() for cache in (own, handed))
    if not torch.allclose(got, want, atol=1e-4 * float(want.abs().max()), rtol=1e-4):
        raise Unsupported(
            f"{type(kept.model).__name__} answers otherwise from a cache that was stored and handed back; some layer keeps more "
            "than its cache shows"
        )


def _numbered(config: Any, kinds: Sequence[LayerKind]) -> tuple[list[tuple[int, ...]], list[SpecLayer]]:
    """Which layers of the spec the parts of each layer are, and these layers. A layer that reads an earlier one's is one too."""
    sources = _sources(config)
    numbers: list[tuple[int, ...]] = []
    layers: list[SpecLayer] = []
    for number, kind in enumerate(kinds):
        numbers.append(tuple(range(len(layers), len(layers) + len(kind.descriptions))))
        layers += kind.descriptions
        if not kind.descriptions and number in sources:
            layers.append(kvdb.Shares(numbers[sources[number]][0]))
    return numbers, layers


def _sources(config: Any) -> dict[int, int]:
    """Which earlier layer's keys and values each layer reads that has none of its own."""
    modes = getattr(config, "kv_sharing_modes", None) or []
    given = getattr(config, "kv_source_layers", None)
    kinds = getattr(config, "layer_types", None) or []
    sources = {}
    for number, mode in enumerate(modes):
        if mode == "reuse":
            before = [n for n in range(number) if modes[n] == "store" and kinds[n] == kinds[number]]
            sources[number] = given[number] if given else before[-1]
    return sources


def _facts(model: PreTrainedModel, cache: Any) -> list[CacheFacts]:
    config = text_config(model)
    modules = {int(module.layer_idx): module for module in attention_modules(model)}
    facts = []
    for number, layer in enumerate(cache.layers):
        module = modules.get(number)
        scale = getattr(module, "scaling", None)
        heads = Heads(
            q_heads=_first_number(module, config, ("num_heads", "num_attention_heads")),
            scale=scale if isinstance(scale, float) else None,
            sinks=getattr(module, "sinks", None) is not None,
        )
        facts.append(CacheFacts(number, layer, heads, getattr(config, "kv_lora_rank", None), _indexer(config)))
    return facts


def _indexer(config: Any) -> tuple[int, int] | None:
    """The heads of a config's indexer, and how many tokens a query of it selects; None without one."""
    heads = getattr(config, "index_n_heads", None)
    if not heads:
        return None
    top = getattr(config, "index_topk", None) or config.index_topk_blocks * config.index_block_size
    return int(heads), int(top)


def _first_number(module: Any, config: Any, names: tuple[str, ...]) -> int:
    """The first of these attributes that a layer or its config has as a number; 1 without."""
    given = (getattr(home, name, None) for home in (module, config) for name in names)
    return next((value for value in given if isinstance(value, int) and value > 0), 1)
