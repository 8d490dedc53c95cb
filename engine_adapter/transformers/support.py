"""Checks whether kvdb can serve a model before anything is computed. Features that only show in a call are refused in
`attention`."""

import sys
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvdb.errors import InvalidArgument, Unsupported
from kvdb.types import HEAD_DIM_MAX

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
SAME_IN_EVERY_LAYER = frozenset({"head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads"})
"""Fields of a config that give the shape of a layer's queries, keys and values."""
SERVED = "kvdb serves decoders with causal attention, full or of a sliding window, such as Llama, Mistral, Qwen3 and Gemma 3"


def text_config(model: PreTrainedModel) -> Any:
    """The config of the text decoder, which in a multimodal model is a part of the model's."""
    return model.config.get_text_config(decoder=True)


def head_dim(config: Any) -> int:
    """The dimensions of one head, which older configs do not state."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_types(config: Any) -> set[str]:
    """The types of RoPE of a config's layers, which may be of several kinds."""
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in given.values() if isinstance(kind, dict)] or [given]
    return {str(kind.get("rope_type")) for kind in kinds}


def attention_modules(model: PreTrainedModel) -> list[Any]:
    """The attention layers of the text decoder, in order."""
    modules = [m for m in model.get_decoder().modules() if hasattr(m, "layer_idx") and type(m).__name__.endswith("Attention")]
    return sorted(modules, key=lambda module: int(module.layer_idx))


def decoder_layers(model: PreTrainedModel) -> list[Any]:
    """The decoder layers, in order: each holds one of the attention layers, and takes and returns hidden states."""
    decoder = model.get_decoder()
    attentions = {id(module) for module in attention_modules(model)}
    names = [name for name, module in decoder.named_modules() if id(module) in attentions]
    layers = {decoder.get_submodule(name).layer_idx: decoder.get_submodule(name.rpartition(".")[0]) for name in names}
    return [layers[number] for number in sorted(layers)]


def beside(module: torch.nn.Module, name: str) -> Any:
    """The object of this name in the file that defines the module's class, or a class that it extends; None if there is none."""
    homes = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)


def check_kept(model: PreTrainedModel) -> None:
    """Raises Unsupported, naming the feature, for a model of which nothing that is stored could be right for another prompt."""
    if model.config.is_encoder_decoder or getattr(model.config, "add_cross_attention", False):
        raise Unsupported(f"{_name(model)} has cross attention to an encoder; {SERVED}")
    if not model.can_generate():
        raise Unsupported(f"{_name(model)} cannot generate; load the model with its head, as AutoModelForCausalLM does")
    decoder, config = model.get_decoder(), text_config(model)
    if not isinstance(decoder, PreTrainedModel):
        raise Unsupported(f"what {_name(model)} calls its decoder is a {type(decoder).__name__}; expected one that reads tokens")
    if not getattr(config, "is_causal", True):
        raise Unsupported(
            f"{_name(model)} attends to later tokens (is_causal=False), so what it keeps of a text is no beginning of another"
        )
    if getattr(config, "use_bidirectional_attention", None) not in {None, False, "vision"}:
        raise Unsupported(
            f"{_name(model)} attends to later tokens (use_bidirectional_attention), so what it keeps of a text is no "
            "beginning of another"
        )
    for rope_type in rope_types(config) & set(LENGTH_DEPENDENT_ROPE):
        raise Unsupported(
            f"{_name(model)} has RoPE of type {rope_type!r}, whose keys depend on the length of the whole prompt and so cannot "
            "be stored for another"
        )


def check_model(model: PreTrainedModel) -> None:
    """Raises Unsupported, naming the layer or the feature, for a model whose attention kvdb does not compute."""
    check_kept(model)
    config = text_config(model)
    _check_alike(model, config)
    _check_config(model, config)
    _check_layers(model, config)
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        raise Unsupported(f"{_name(model)} does not call its attention through transformers' AttentionInterface; {SERVED}")
    if not attention_modules(model):
        raise Unsupported(f"{_name(model)} has no attention layers of the usual names in its decoder; {SERVED}")


def windows_of(model: PreTrainedModel) -> tuple[int | None, ...]:
    """How many tokens a query of each layer sees, its own included; None for all before it."""
    layers = DynamicCache(config=text_config(model)).layers
    return tuple(layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers)


def full_layers(model: PreTrainedModel) -> list[int]:
    """The numbers of the layers without a window, whose queries the database answers."""
    return [number for number, window in enumerate(windows_of(model)) if window is None]


def check_movable(model: PreTrainedModel) -> None:
    """Raises Unsupported for a model with windows, whose chunks cannot be laid out elsewhere: where the parts of a prompt are
    recomputed, every layer attends to all of them."""
    if len(full_layers(model)) < len(windows_of(model)):
        raise Unsupported(f"{_name(model)} has sliding windows; kvdb moves chunks of models without; store the text as a context")


def check_padding(model: PreTrainedModel, padding: int, end: int) -> None:
    """Raises Unsupported for a prompt of a model with windows that has padding elsewhere than before its tokens, because windows
    count columns. padding: the number of its columns without a token; end: the column behind the last of them."""
    if padding != end and len(full_layers(model)) < len(windows_of(model)):
        raise Unsupported(
            f"a prompt has padding behind its first token, and {_name(model)} has sliding windows, which count columns; "
            "pad on the left"
        )


def positions_max(model: PreTrainedModel) -> int | None:
    """The most positions of a prompt, if the config states them. A RoPE that stretches positions multiplies them."""
    config = text_config(model)
    positions = getattr(config, "max_position_embeddings", None)
    if not positions:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    trained = {"linear": positions, "yarn": rope.get("original_max_position_embeddings") or positions}
    return max(int(positions), int(trained.get(str(rope.get("rope_type")), 0) * float(rope.get("factor") or 1)))


def check_positions(model: PreTrainedModel, tokens: int) -> None:
    """Raises InvalidArgument for a prompt with more tokens than the model has positions, because its answer would be noise."""
    most = positions_max(model)
    if most is not None and tokens > most:
        raise InvalidArgument(
            f"the prompt has {tokens} tokens; the model has {most} positions (max_position_embeddings), so shorten the prompt, "
            "or load the model with a RoPE scaling that reaches as far"
        )


def check_dropout(model: PreTrainedModel) -> None:
    """Raises Unsupported for a model in training mode with dropout, because noisy keys would be stored."""
    if not model.training:
        return
    dropped = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout) and module.p]
    if getattr(text_config(model), "attention_dropout", 0.0):
        dropped.append("attention")
    if dropped:
        raise Unsupported(f"{_name(model)} is in training mode with dropout ({dropped[0]}); call model.eval() first")


def _check_alike(model: PreTrainedModel, config: Any) -> None:
    """Raises Unsupported where the layers have heads of several shapes. Such a config has no value of what differs."""
    differing = set(getattr(config, "per_layer_attributes", None) or ()) & SAME_IN_EVERY_LAYER
    layers = list(config.per_layer_config) if differing else []
    for name in sorted(differing):
        first, *values = (getattr(layer, name) for layer in layers)
        number = next(number for number, value in enumerate(values, 1) if value != first)
        raise Unsupported(
            f"layer {number} of {_name(model)} has {name} {values[number - 1]}, layer 0 has {first}; kvdb serves models whose "
            "layers have heads of one shape"
        )


def _check_config(model: PreTrainedModel, config: Any) -> None:
    dim = head_dim(config)
    if getattr(config, "kv_lora_rank", None) is not None:
        raise Unsupported(f"{_name(model)} has multi-head latent attention (kv_lora_rank={config.kv_lora_rank}); {SERVED}")
    if getattr(config, "v_head_dim", None) not in {None, dim}:
        raise Unsupported(f"{_name(model)} has keys of {dim} and values of {config.v_head_dim} dimensions; {SERVED}")
    if dim % 8 or dim > HEAD_DIM_MAX:
        raise Unsupported(f"{_name(model)} has head_dim {dim}; kvdb serves multiples of 8 up to {HEAD_DIM_MAX}")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise Unsupported(f"{_name(model)} has a soft cap on its attention scores ({config.attn_logit_softcapping}); {SERVED}")


def _check_layers(model: PreTrainedModel, config: Any) -> None:
    kinds = getattr(config, "layer_types", None) or []
    layers = DynamicCache(config=config).layers
    if len(layers) != config.num_hidden_layers:
        raise Unsupported(f"{_name(model)} has {config.num_hidden_layers} layers, which share {len(layers)} caches; {SERVED}")
    for number, layer in enumerate(layers):
        if number < len(kinds) and kinds[number] not in {"full_attention", "sliding_attention"}:
            raise Unsupported(
                f"layer {number} of {_name(model)} is of the kind {kinds[number]}, a {type(layer).__name__}; {SERVED}"
            )
        if type(layer) not in {DynamicLayer, DynamicSlidingWindowLayer}:
            raise Unsupported(f"layer {number} of {_name(model)} caches a {type(layer).__name__}, not plain attention; {SERVED}")
    for module in attention_modules(model):
        if getattr(module, "sinks", None) is not None:
            raise Unsupported(f"layer {module.layer_idx} of {_name(model)} has attention sinks; {SERVED}")


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
