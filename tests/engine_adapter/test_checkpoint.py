"""The spec of a checkpoint is that of the model that is loaded from it."""

import json

import pytest
import torch
import transformers

from engine_adapter.transformers import spec_of
from engine_adapter.transformers.checkpoint import spec_of_checkpoint
from kvdb.errors import Unsupported
from tests.engine_adapter.tiny import KINDS, build


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_spec_of_the_loaded_model(tmp_path, kind, dtype):
    build(kind).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    assert spec_of_checkpoint(tmp_path, dtype) == spec_of(loaded)


def test_weights_in_several_files_are_read(tmp_path):
    model = build()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert spec_of_checkpoint(tmp_path, "float32") == spec_of(model)


def test_what_it_cannot_tell_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="cannot tell what model"):
        spec_of_checkpoint(tmp_path, "float32")
    build().save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="float64"):
        spec_of_checkpoint(tmp_path, "float64")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(Unsupported, match="no weights of the name"):
        spec_of_checkpoint(tmp_path, "float32")
    file.write_text(json.dumps(config | {"intermediate_size": 8}))
    with pytest.raises(Unsupported, match="the model has"):
        spec_of_checkpoint(tmp_path, "float32")
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(Unsupported, match="quantised"):
        spec_of_checkpoint(tmp_path, "float32")
    file.write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(Unsupported, match="safetensors"):
        spec_of_checkpoint(tmp_path, "float32")
