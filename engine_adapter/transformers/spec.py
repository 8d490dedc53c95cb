"""`spec_of`: the spec of a transformers model, which fixes the meaning of its KV cache."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvdb
from engine_adapter.transformers.support import attention_modules, beside, check_model, head_dim, text_config
from kvdb.blend.rope import OWN_FREQUENCIES, inverse_frequencies
from kvdb.errors import Unsupported
from kvdb.types import DTYPES

SAMPLES = 1024
"""The number of values of each parameter that go into the fingerprint."""

NO_MATTER = frozenset(
    {
        "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
        "id2label", "initializer_range", "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
        "return_dict", "tie_word_embeddings", "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Fields of a config that change neither keys nor values, or that the spec has as fields of its own."""


def spec_of(model: PreTrainedModel) -> kvdb.ModelSpec:
    """The ModelSpec of a causal language model. Raises Unsupported for a model that kvdb cannot serve.

    The name is the kind of model, such as "qwen3": where the weights were loaded from says nothing about them. The fingerprint
    tells weights apart, see `fingerprint_of`.
    """
    check_model(model)
    config = text_config(model)
    dim = head_dim(config)
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise Unsupported(f"the model computes in {dtype}; kvdb stores {', '.join(DTYPES)}, so load the model in one of them")
    return kvdb.ModelSpec(
        name=config.model_type,
        layers=config.num_hidden_layers,
        q_heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=dim,
        dtype=dtype,
        rope=_rope(model, config, dim),
        fingerprint=fingerprint_of(model),
        scale=_scale(model, dim),
    )


def fingerprint_of(model: PreTrainedModel) -> str:
    """SHA-256, in hex, over the decoder's config and weights.

    It covers every field of the config but those in NO_MATTER, and of each parameter and persistent buffer, in the order of
    their names: name, dtype, shape and up to SAMPLES values at even distances. The head is left out, for it changes no key. A
    change that misses every sampled value, such as one edited embedding row, goes unseen. Raises Unsupported for weights that
    are not in memory.
    """
    digest = hashlib.sha256()
    fields = {name: value for name, value in text_config(model).to_dict().items() if name not in NO_MATTER}
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.get_decoder().state_dict().items()):
        if tensor.is_meta:
            raise Unsupported(f"the weights of {name} are not in memory; load the model whole, without offloading to disk")
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        step = max(1, tensor.numel() // SAMPLES)
        sample = tensor.detach().reshape(-1)[::step][:SAMPLES].contiguous()
        digest.update(sample.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _rope(model: PreTrainedModel, config: Any, dim: int) -> kvdb.Rope | None:
    given = dict(getattr(config, "rope_parameters", None) or {})
    theta = given.pop("rope_theta", None)
    if theta is None:
        if given:
            raise Unsupported(f"the layers of {config.model_type} rotate differently ({', '.join(given)}); kvdb wants them alike")
        return None
    partial = given.pop("partial_rotary_factor", None)
    if given.get("rope_type") == "default":
        del given["rope_type"]
    if not all(no_rope := getattr(config, "no_rope_layers", None) or [1]):
        given["no_rope_layers"] = no_rope  # 0 where a layer does not rotate: such keys cannot be moved
    scaling = tuple((name, value) for name, value in given.items() if value is not None)
    rope = kvdb.Rope(float(theta), int(dim * partial) if partial else None, _layout(model, config), scaling)
    own = _own_frequencies(model, rope, dim)
    return rope if own is None else replace(rope, scaling=(*scaling, (OWN_FREQUENCIES, own)))


def _own_frequencies(model: PreTrainedModel, rope: kvdb.Rope, dim: int) -> tuple[float, ...] | None:
    """The radians per position of each pair, if the model's differ from those that its parameters give; None if they do not.

    `model.to(torch.bfloat16)` rounds them with everything else; at positions of a few thousand such a model's angles are wrong by
    whole radians, and its keys can only be moved by the same angles. Loading with `dtype=torch.bfloat16` rounds nothing.
    """
    tensors = [
        module.inv_freq for module in model.get_decoder().modules() if isinstance(getattr(module, "inv_freq", None), Tensor)
    ]
    try:
        expected = inverse_frequencies(rope, dim)
    except Unsupported:
        return None
    if not tensors or tensors[0].shape != expected.shape:
        return None
    own = tensors[0].detach().double().cpu().numpy()
    return None if np.allclose(own, expected, rtol=1e-5, atol=0) else tuple(own.tolist())


def _layout(model: PreTrainedModel, config: Any) -> str:
    """Which dimensions a model pairs, found by applying its own `rotate_half` to the numbers 0 to 7."""
    rotate = beside(attention_modules(model)[0], "rotate_half")
    if rotate is not None:
        turned = rotate(torch.arange(8.0)).tolist()
        if turned == [-4.0, -5.0, -6.0, -7.0, 0.0, 1.0, 2.0, 3.0]:
            return "half"
        if turned == [-1.0, 0.0, -3.0, 2.0, -5.0, 4.0, -7.0, 6.0]:
            return "interleaved"
    raise Unsupported(f"kvdb cannot tell how {config.model_type} rotates its keys; it knows the half and the interleaved layout")


def _scale(model: PreTrainedModel, dim: int) -> float | None:
    """None for the usual 1/sqrt(head_dim). Layers with another scale than the first are refused when they are called."""
    scaling = getattr(attention_modules(model)[0], "scaling", None)
    return None if scaling is None or scaling == dim**-0.5 else float(scaling)
