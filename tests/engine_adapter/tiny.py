"""Tiny decoders with random weights, and prompts for them."""

import torch
import transformers

KINDS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 24}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "num_key_value_heads": 4}),
    "gemma3_text": (transformers.Gemma3TextConfig, {"query_pre_attn_scalar": 16}),
}
VOCABULARY = 101


def build(kind="llama", seed=0, **changes):
    """A decoder of two layers. Its weights are large enough that the best token is far from the second best."""
    make, fields = KINDS[kind]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    specials = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(make(**{**shape, **specials, **fields, **changes})).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model


def prompts(rows, columns, seed=0):
    return torch.randint(2, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(seed))


def left_padded(rows, columns, seed=0):
    """Ids and mask; row i begins with 3 * i columns of padding."""
    ids, mask = prompts(rows, columns, seed), torch.ones(rows, columns, dtype=torch.long)
    for i in range(rows):
        ids[i, : 3 * i] = 0
        mask[i, : 3 * i] = 0
    return ids, mask
