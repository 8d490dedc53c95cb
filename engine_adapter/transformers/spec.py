"""The spec of a transformers model whose attention kvdb answers, and what tells weights apart."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvdb
from engine_adapter.transformers.support import attention_modules, beside, head_dim, text_config
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


def spec_with(model: PreTrainedModel, fingerprint: str) -> kvdb.ModelSpec:
    """The ModelSpec of a model with a fingerprint of its weights, which need not be in memory. Raises Unsupported."""
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
        fingerprint=fingerprint,
        scale=_scale(model, dim),
    )


@dataclass(frozen=True)
class Weight:
    """What goes into a fingerprint of a parameter or a persistent buffer. values: some of its numbers, in its dtype, `[n]`."""

    name: str
    shape: tuple[int, ...]
    values: Tensor


def sample(tensor: Tensor) -> Tensor:
    """Up to SAMPLES numbers of a tensor at even distances, `[n]`."""
    step = max(1, tensor.numel() // SAMPLES)
    return tensor.detach().reshape(-1)[::step][:SAMPLES].contiguous().cpu()


def fingerprint_of(model: PreTrainedModel) -> str:
    """The fingerprint of a loaded model, see `fingerprint`. Raises Unsupported for weights that are not in memory."""
    return fingerprint(text_config(model), _weights(model))


def fingerprint(config: Any, weights: Iterable[Weight]) -> str:
    """SHA-256, in hex, over the decoder's config and weights.

    It covers every field of the config but those in NO_MATTER, and of each parameter and persistent buffer, in the order of
    their names: name, dtype, shape and up to SAMPLES values at even distances. The head is left out, for it changes no key. A
    change that misses every sampled value, such as one edited embedding row, goes unseen.
    """
    digest = hashlib.sha256()
    fields = {name: value for name, value in config.to_dict().items() if name not in NO_MATTER}
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    for weight in weights:
        digest.update(f"{weight.name} {weight.values.dtype} {weight.shape}".encode())
        digest.update(weight.values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _weights(model: PreTrainedModel) -> Iterator[Weight]:
    for name, tensor in sorted(model.get_decoder().state_dict().items()):
        if tensor.is_meta:
            raise Unsupported(f"the weights of {name} are not in memory; load the model whole, without offloading to disk")
        yield Weight(name, tuple(tensor.shape), sample(tensor))


def _rope(model: PreTrainedModel, config: Any, dim: int) -> kvdb.Rope | None:
    given = dict(getattr(config, "rope_parameters", None) or {})
    if any(isinstance(kind, dict) for kind in given.values()):
        return _rope_by_kind(model, config, given)
    theta = given.pop("rope_theta", None)
    if theta is None:
        if given:
            raise Unsupported(
                f"the RoPE of {config.model_type} has no rope_theta ({', '.join(given)}); kvdb cannot tell its keys"
            )
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


def _rope_by_kind(model: PreTrainedModel, config: Any, given: dict[str, Any]) -> kvdb.Rope:
    """The RoPE of layers of several kinds, each with parameters of its own, as pairs of names and values under the kind's name.

    rope_kinds names the kind of each layer. Such keys are not moved (`kvdb.blend.rope`).
    """
    kinds = list(config.layer_types)
    thetas = [float(given[kind]["rope_theta"]) for kind in kinds]
    by_kind = {kind: [[name, value] for name, value in sorted(given[kind].items()) if value is not None] for kind in set(kinds)}
    scaling = tuple(sorted({**by_kind, "rope_kinds": kinds}.items()))
    return kvdb.Rope(max(thetas), None, _layout(model, config), scaling)


def _own_frequencies(model: PreTrainedModel, rope: kvdb.Rope, dim: int) -> tuple[float, ...] | None:
    """The radians per position of each pair, if the model's differ from those that its parameters give; None if they do not.

    `model.to(torch.bfloat16)` rounds them with everything else; at positions of a few thousand such a model's angles are wrong by
    whole radians, and its keys can only be moved by the same angles. Loading with `dtype=torch.bfloat16` rounds nothing, so a
    model whose weights are not in memory has none.
    """
    tensors = [
        module.inv_freq for module in model.get_decoder().modules() if isinstance(getattr(module, "inv_freq", None), Tensor)
    ]
    try:
        expected = inverse_frequencies(rope, dim)
    except Unsupported:
        return None
    if not tensors or tensors[0].is_meta or tensors[0].shape != expected.shape:
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
