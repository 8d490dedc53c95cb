"""The attention function and the mask function that transformers calls by the name `kvdb`.

Both serve any number of attached models and hold no state: they recognise calls that belong to kvdb by the key tensor and by the
type of the length, and pass all others on to the implementation that the model used before, whose name is part of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine_adapter.transformers.cache import StoredLength, layer_of
from engine_adapter.transformers.support import beside
from kvdb.errors import Unsupported

NAME = "kvdb"
EXTRAS = {
    "sliding_window": "a sliding window of another size than its cache",
    "softcap": "a soft cap on its scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}
"""Arguments that change what attention computes, and what they are called."""


class Attached(str):
    """The name `kvdb` in the config of an attached model.

    before: the implementation it stands in for. models: ids of the attached models; several can share one config.
    """

    __slots__ = ("before", "models")
    before: str
    models: set[int]

    def __new__(cls, before: str) -> "Attached":
        name = super().__new__(cls, NAME)
        name.before = before
        name.models = set()
        return name


def register() -> None:
    """Make the name known to transformers. Doing it twice does nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **extras: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of the new tokens over everything before them, `[batch, n, q_heads, head_dim]`, and no weights.

    query: `[batch, q_heads, n, head_dim]`, after RoPE; key, value: `[batch, kv_heads, n, head_dim]`, only of the new tokens where
    the key carries a kvdb layer. Raises Unsupported, naming the layer, and what `Session.attend` raises.
    """
    layer = layer_of(key)
    if layer is None:
        before = _function_before(module)
        answer: tuple[torch.Tensor, torch.Tensor | None] = before(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **extras
        )
        return answer
    for name, what in EXTRAS.items():
        if extras.get(name) is not None and (name != "sliding_window" or extras[name] != layer.window):
            raise Unsupported(f"layer {layer.number} has {what}, which kvdb does not compute; it does causal attention")
    if attention_mask is not None:
        raise Unsupported(f"layer {layer.number} has a mask of its own; kvdb does full causal attention, with left padding")
    if dropout:
        raise Unsupported(f"layer {layer.number} has attention dropout of {dropout} in training; call model.eval() first")
    return layer.attend(query, key, value, scaling), None


def mask(*, config: Any, kv_length: int, **given: Any) -> Any:
    """No mask if the keys lie in kvdb, which masks by position itself; otherwise the mask of the implementation before."""
    if isinstance(kv_length, StoredLength):
        return None
    before = getattr(config._attn_implementation, "before", "sdpa")
    if before not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[before](config=config, kv_length=kv_length, **given)


def _function_before(module: Any) -> Callable[..., Any]:
    """The function that the module calls when it is not attached. Eager attention is not registered; it stands in the file of the
    module's class."""
    before = getattr(module.config._attn_implementation, "before", "sdpa")
    eager: Any = beside(module, "eager_attention_forward")
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(before, eager)
    return function
