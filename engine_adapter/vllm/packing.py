"""vLLM's caches of an engine: which layer each is of, and how a block of it is packed."""

import re
from functools import partial
from typing import Any

from torch import Tensor

from engine_adapter.vllm.layout import PackedLayout
from kvdb.errors import Unsupported

NUMBER = re.compile(r"\.(\d+)\.")
LEARNT = "CPU_ATTN"
"""The name of the attention backend whose packing is learnt; it depends on the processor's instructions."""
NAMED = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
"""Those, for GPUs, whose layout has a name that says all."""
FULL = "FullAttentionSpec"
"""vLLM's name for a cache of every token's keys and values."""


def layers_of(kv_caches: dict[str, Tensor]) -> dict[str, int]:
    """The number of each layer by its name. Raises Unsupported for names that do not count the layers from 0 on, and for caches
    of several forms."""
    numbers = {name: NUMBER.findall(name) for name in kv_caches}
    layers = {name: int(found[0]) for name, found in numbers.items() if len(found) == 1}
    if len(layers) != len(kv_caches) or sorted(layers.values()) != list(range(len(layers))):
        raise Unsupported(f"kvdb cannot tell the layers of {', '.join(kv_caches)}")
    forms = {(tuple(cache.shape), cache.stride(), cache.dtype) for cache in kv_caches.values()}
    if len(forms) > 1:
        raise Unsupported(f"the layers' caches have several forms: {sorted(map(str, forms))}")
    return layers


def block_size_of(kv_cache_config: Any) -> int:
    """How many tokens a block of every layer holds. Raises Unsupported where layers differ in what they hold."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise Unsupported(f"vLLM has {len(groups)} kinds of caches, such as those of windows; kvdb knows one")
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ != FULL:
        raise Unsupported(f"vLLM caches {type(spec).__name__}; kvdb knows {FULL}")
    return int(spec.block_size)


def attention_of(vllm_config: Any, name: str) -> Any:
    """vLLM's attention of a layer."""
    return vllm_config.compilation_config.static_forward_context[name]


def layout_of(vllm_config: Any, kv_caches: dict[str, Tensor], block_size: int) -> PackedLayout:
    """The layout of an engine's caches, told by the attention of its first layer. Raises Unsupported for an attention backend
    or a layout that kvdb does not know."""
    name, cache = next(iter(kv_caches.items()))
    attention = attention_of(vllm_config, name)
    form = cache, attention.num_kv_heads, block_size, attention.head_size
    backend = attention.get_attn_backend().get_name()
    if backend == LEARNT:
        return PackedLayout.learn(partial(attention.impl.do_kv_cache_update, attention), *form)
    if backend in NAMED:
        return PackedLayout.named(vllm_config.cache_config.get_resolved_kv_cache_layout().name, *form)
    raise Unsupported(f"attention is computed by {backend}; kvdb knows the caches of {', '.join((LEARNT, *NAMED))}")
