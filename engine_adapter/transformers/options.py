"""The settings of a call of `generate`, and the refusal of those that kvdb cannot do."""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from engine_adapter.transformers.prompts import PromptBatch
from kvdb.client.known_keywords import meant
from kvdb.client.query_keywords import QueryKeywords
from kvdb.errors import Unsupported

OWN = frozenset(inspect.signature(GenerationMixin.generate).parameters)
PASSED_ON = frozenset({"tokenizer", "logits_to_keep", "return_dict"})
MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
REFUSED = {
    "output_attentions": "attention weights never leave the database; ask for output_scores or output_logits",
    "output_hidden_states": "the hidden states of reused tokens are not computed; ask for output_scores or output_logits",
    "token_healing": "it changes the prompt after kvdb has read it; heal the tokens before",
    "cache_implementation": "kvdb is the cache; leave it out",
    "assistant_early_exit": "its drafts would be kept in the same cache; give an assistant_model, or prompt_lookup_num_tokens",
    "use_mtp": "its drafts would be kept in the same cache; give an assistant_model, or prompt_lookup_num_tokens",
}


def answer_tokens(settings: GenerationConfig) -> int | None:
    """How many tokens an answer has at most, None where nobody said it."""
    return None if settings.max_new_tokens is None else int(settings.max_new_tokens)


def settings_of(model: PreTrainedModel, options: Mapping[str, Any]) -> GenerationConfig:
    """The generation config that `model.generate(**options)` will work with.

    Transformers itself makes it: it merges the call, the given config and the model's by rules of its own. Raises
    Unsupported for a generation mode that is not among MODES, for inputs other than token ids, and for what is in REFUSED.
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
            known = [*vars(settings), *QueryKeywords.__annotations__]
            raise Unsupported(
                f"generate was called with {name}=, which is no setting of generation; "
                f"kvdb takes no inputs but input_ids and attention_mask{meant(name, known)}"
            )
    if settings.use_cache is False:
        raise Unsupported("generate was called with use_cache=False; kvdb is the cache, so call the model's own generate instead")
    mode = settings.get_generation_mode(options.get("assistant_model"))
    if mode not in MODES:
        raise Unsupported(f"generate was asked for {mode.value}; kvdb does {', '.join(mode.value for mode in MODES)}")
    assert isinstance(settings, GenerationConfig)
    return settings


def drafts(settings: GenerationConfig, assistant: PreTrainedModel | None) -> bool:
    """Whether drafts are checked, of which rejected tokens are taken back. assistant: the assistant_model of the call."""
    return bool(settings.get_generation_mode(assistant) == GenerationMode.ASSISTED_GENERATION)


def check_mode(settings: GenerationConfig, prompts: PromptBatch | None, *, drafted: bool, held: bool) -> None:
    """Raises Unsupported where a mode and its prompts do not go together. prompts: None for one prompt of parts. drafted: as
    `drafts` says. held: whether a cache is given to go on with."""
    if held and prompts is None:
        raise Unsupported("generate was given past_key_values= and parts=; expected one of the two")
    rows = [] if prompts is None else prompts.rows
    if held and beams_of(settings) > 1:
        raise Unsupported("generate was given past_key_values= and several answers for a prompt; its rows go on with one each")
    if drafted and (len(rows) > 1 or beams_of(settings) > 1):
        raise Unsupported("drafts were asked for with several rows; transformers checks them for one prompt at a time")
    if drafted and any(row.ends_in_padding for row in rows):
        raise Unsupported("drafts were asked for behind a prompt that ends in padding; pad on the left, or leave the padding out")


def beams_of(settings: GenerationConfig) -> int:
    """The number of rows of the model's batch that each prompt becomes."""
    return max(settings.num_beams or 1, settings.num_return_sequences or 1)
