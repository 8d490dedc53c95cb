"""The identity of KV that vLLM computes: the spec of its model, and the salt of a request.

What cannot be told exactly is left alone: a wrong spec or salt would let one model read another's KV.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import kvdb
from engine_adapter.transformers.checkpoint import spec_of_checkpoint
from kvdb.errors import Unsupported

LOADED_AS_STORED = ("auto", "safetensors", "hf")
"""vLLM's load formats under which its weights are those of the folder's safetensors."""
ADAPTER = "lora "
"""How the salt of a request with a LoRA adapter begins."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def spec_of_engine(config: Any) -> kvdb.ModelSpec:
    """The spec of the KV of an engine. config: vLLM's `VllmConfig`. Raises Unsupported for one whose KV is not that of its
    checkpoint alone, or is spread over several workers."""
    model, cache_config, parallel = config.model_config, config.cache_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    load_format, quantization = str(config.load_config.load_format), model.quantization
    reasons = (
        (parallel.world_size > 1, f"the model is spread over {parallel.world_size} workers"),
        (quantization is not None, f"the weights are quantised ({quantization})"),
        (cache_config.cache_dtype not in {"auto", dtype}, f"the cache is {cache_config.cache_dtype}, not the model's {dtype}"),
        (load_format not in LOADED_AS_STORED, f"weights are loaded as {load_format}"),
        (bool(getattr(model, "hf_overrides", None)), "hf_overrides change the model"),
        (config.speculative_config is not None, "its blocks may hold drafts of speculative decoding"),
    )
    for holds, reason in reasons:
        if holds:
            raise Unsupported(f"{reason}, so kvdb cannot tell what its KV is")
    return spec_of_checkpoint(_folder(model.model, model.revision), dtype)


def salt_of(request: Any) -> str | None:
    """What lookups of a request have to say beside its tokens; None for one whose KV depends on more than kvdb can tell.

    A plain request has "", one of a tenant its `cache_salt`, and one of a LoRA adapter a digest of its weights too.
    """
    own = request.cache_salt or ""
    if getattr(request, "mm_features", None) or getattr(request, "prompt_embeds", None) is not None:
        return None
    if request.pooling_params is not None or own.startswith(ADAPTER):
        return None
    if request.lora_request is None:
        return str(own)
    adapter = adapter_digest(request.lora_request.lora_path)
    return None if adapter is None else f"{ADAPTER}{adapter} {own}"


@cache
def adapter_digest(path: str) -> str | None:
    """SHA-256, in hex, of the files of an adapter, None where they are not those that kvdb knows. A path is read once."""
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        try:
            digest.update(hashlib.sha256((Path(path) / name).read_bytes()).digest())
        except OSError:
            return None
    return digest.hexdigest()


def _folder(model: str, revision: str | None) -> Path:
    """Where the checkpoint lies. Raises Unsupported for one that is not on this machine."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # a folder needs no hub

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise Unsupported(f"the checkpoint of {model} is not on this machine: {json.dumps(str(error)[:200])}") from None
