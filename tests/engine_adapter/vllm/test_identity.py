"""Whose KV it is: the spec of an engine, and the salts of its requests."""

from types import SimpleNamespace

import pytest

from engine_adapter.transformers import spec_of
from engine_adapter.vllm.identity import ADAPTER_FILES, salt_of, spec_of_engine
from kvdb.errors import Unsupported
from tests.engine_adapter.tiny import build


def request(**fields):
    plain = {"cache_salt": None, "mm_features": [], "prompt_embeds": None, "pooling_params": None, "lora_request": None}
    return SimpleNamespace(**plain | fields)


def adapter(folder, content):
    folder.mkdir()
    for name in ADAPTER_FILES:
        (folder / name).write_text(content)
    return SimpleNamespace(lora_path=str(folder), lora_name="adapter")


def test_a_plain_request_has_no_salt_and_a_tenant_its_own():
    assert salt_of(request()) == ""
    assert salt_of(request(cache_salt="tenant")) == "tenant"


def test_adapters_are_told_apart_by_their_weights(tmp_path):
    one, same, other = (adapter(tmp_path / name, content) for name, content in (("a", "x"), ("b", "x"), ("c", "y")))
    salts = [salt_of(request(lora_request=lora)) for lora in (one, same, other)]
    assert salts[0] == salts[1] != salts[2]
    assert salt_of(request(lora_request=one, cache_salt="tenant")) not in {"tenant", salts[0]}


@pytest.mark.parametrize(
    "fields",
    [
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
        {"pooling_params": object()},
        {"cache_salt": "lora 0123 "},
        {"lora_request": SimpleNamespace(lora_path="/nowhere")},
    ],
)
def test_what_cannot_be_told_is_left_alone(fields):
    assert salt_of(request(**fields)) is None


@pytest.fixture
def configuration(tmp_path):
    """`configuration(**changes)` is what is read of a `VllmConfig`, over a saved tiny model."""
    build().save_pretrained(tmp_path)
    plain = {
        "model": str(tmp_path), "revision": None, "dtype": "torch.float32", "quantization": None, "hf_overrides": {},
        "cache_dtype": "auto", "world_size": 1, "load_format": "auto", "speculative_config": None,
    }  # fmt: skip

    def make(**changes):
        every = SimpleNamespace(**plain | changes)
        return SimpleNamespace(
            model_config=every,
            cache_config=every,
            parallel_config=every,
            load_config=every,
            speculative_config=every.speculative_config,
        )

    return make


def test_the_spec_is_that_of_the_loaded_model(configuration):
    assert spec_of_engine(configuration()) == spec_of(build())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "awq"}, "quantised"),
        ({"world_size": 2}, "2 workers"),
        ({"cache_dtype": "fp8"}, "fp8"),
        ({"load_format": "dummy"}, "dummy"),
        ({"hf_overrides": {"rope_theta": 1}}, "hf_overrides"),
        ({"speculative_config": object()}, "speculative"),
        ({"model": "nobody/nothing"}, "not on this machine"),
    ],
)
def test_what_cannot_be_identified_is_refused(configuration, changes, message):
    with pytest.raises(Unsupported, match=message):
        spec_of_engine(configuration(**changes))
