"""The settings of a call of `generate`, and the refusal of those that kvdb cannot do."""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvdb.errors import Unsupported

OWN = frozenset(inspect.signature(GenerationMixin.generate).parameters)
PASSED_ON = frozenset({"tokenizer", "logits_to_keep", "return_dict"})
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
REFUSED = {
    "output_attentions": "attention weights never leave the database; ask for output_scores or output_logits",
    "output_hidden_states": "the hidden states of reused tokens are not computed; ask for output_scores or output_logits",
    "token_healing": "it changes the prompt after kvdb has read it; heal the tokens before",
    "cache_implementation": "kvdb is the cache; leave it out",
}


def settings_of(model: PreTrainedModel, options: Mapping[str, Any]) -> GenerationConfig:
    """The generation config that `model.generate(**options)` will work with.

    Transformers itself makes it: it merges the call, the given config and the model's by rules of its own. Raises
    Unsupported for a generation mode that takes tokens back, for inputs other than token ids, and for what is in REFUSED.
    """
    loose = {name: value for name, value in options.items() if name not in OWN and value is not None}
    settings, inputs = model._prepare_generation_config(  # type: ignore[operator]  # transformers does not type it
        options.get("generation_config"), **loose
    )
    for name, why in REFUSED.items():
        if getattr(settings, name, None):
            raise Unsupported(f"generate was called with {name}={getattr(settings, name)!r}; {why}")
    for name in inputs:
        if name not in PASSED_ON:
            raise Unsupported(
                f"generate was called with {name}=, which is no setting of generation; "
                "kvdb takes no inputs but input_ids and attention_mask"
            )
    if settings.use_cache is False:
        raise Unsupported("generate was called with use_cache=False; kvdb is the cache, so call the model's own generate instead")
    mode = settings.get_generation_mode(options.get("assistant_model"))
    if mode not in MODES:
        raise Unsupported(f"generate was asked for {mode.value}; kvdb does {', '.join(mode.value for mode in MODES)}")
    assert isinstance(settings, GenerationConfig)
    return settings


def beams_of(settings: GenerationConfig) -> int:
    """The number of rows of the model's batch that each prompt becomes."""
    return max(settings.num_beams or 1, settings.num_return_sequences or 1)
