"""`spec_of_checkpoint`: the spec of a model that lies in a folder, for engines that load its weights themselves."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import kvdb
from engine_adapter.transformers.spec import Weight, fingerprint, sample, spec_with
from engine_adapter.transformers.support import check_model, text_config
from kvdb.errors import Unsupported
from kvdb.types import DTYPES

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def spec_of_checkpoint(folder: Path, dtype: str) -> kvdb.ModelSpec:
    """The spec that `spec_of` gives once the model is loaded in this dtype. Of the weights only what goes into the fingerprint is
    read, and none is kept in memory.

    Raises Unsupported for a model that kvdb cannot serve, or whose weights are quantised, are not in safetensors, or have other
    names in the files than in the model.
    """
    if dtype not in DTYPES:
        raise Unsupported(f"the model computes in {dtype}; kvdb stores {', '.join(DTYPES)}")
    model = _empty_model(folder, dtype)
    check_model(model)
    return spec_with(model, fingerprint(text_config(model), _weights(model, folder)))


def _empty_model(folder: Path, dtype: str) -> PreTrainedModel:
    """The model without weights."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            raise Unsupported(f"the weights in {folder} are quantised; kvdb cannot tell which KV they give")
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise Unsupported(f"transformers cannot tell what model is in {folder}: {error}") from None
    return model


def _weights(model: PreTrainedModel, folder: Path) -> Iterator[Weight]:
    """The decoder's weights as they are once they are loaded, in the order of their names."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    files = _files(folder)
    for name, empty in sorted(decoder.state_dict().items()):
        stored = f"{prefix}.{name}" if prefix else name
        if stored not in files:
            raise Unsupported(f"{folder} has no weights of the name {stored}; kvdb cannot tell them from others")
        try:
            with safe_open(files[stored], framework="pt") as weights:
                tensor = weights.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise Unsupported(f"{files[stored]} cannot be read: {error}") from None
        if tensor.shape != empty.shape or tensor.dtype not in FLOATING:
            raise Unsupported(f"{stored} is {tensor.dtype} {tuple(tensor.shape)}; the model has {tuple(empty.shape)}")
        yield Weight(name, tuple(empty.shape), sample(tensor).to(empty.dtype))


def _files(folder: Path) -> dict[str, Path]:
    """Which file holds the weights of each name."""
    try:
        if (folder / INDEX).exists():
            names = json.loads((folder / INDEX).read_text())["weight_map"]
            return {str(name): folder / str(file) for name, file in names.items()}
        with safe_open(folder / ONE, framework="pt") as weights:
            return dict.fromkeys(weights.keys(), folder / ONE)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise Unsupported(f"{folder} has no weights in safetensors: {error}") from None
