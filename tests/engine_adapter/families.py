"""Small decoders with random weights, one of each family of today, whose prompts exceed their windows and what they select.

Sizes are those of a test: float32, windows and selections of a few tokens, dimensions that are multiples of 8.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers

VOCABULARY = 101
WINDOW = 8
SELECTED = 8
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
}
INDEXER = {"index_topk": SELECTED, "index_head_dim": 16, "index_n_heads": 16}
DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3,
}
UNTIED = {"tie_word_embeddings": False}
"""Where a model would answer with one token again and again."""
SLIDING = ["sliding_attention", "full_attention"]
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
AUDIO = {"patch_sizes": [2], "hidden_sizes": [16], "depths": [1], "num_hidden_layers": 1, "out_hidden_size": 64}


@dataclass(frozen=True)
class Family:
    """A row of the table.

    config: the name of its text's config in transformers. fields: what differs from BASE. model: the name of its class, None for
    what AutoModelForCausalLM takes. around: the config that the text's is a part of, and its other fields. without: fields of
    BASE that its config does not have. std: of its weights.
    """

    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    around: tuple[str, dict[str, Any]] | None = None
    without: tuple[str, ...] = ()
    std: float = 0.2


FAMILIES = {
    "llama": Family("LlamaConfig"),
    "qwen3": Family("Qwen3Config", {"head_dim": 24}),
    "glm4": Family("Glm4Config", {"head_dim": 16}),
    "olmo2": Family("Olmo2Config"),
    "phi3": Family("Phi3Config"),
    "gpt_oss": Family(
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": SLIDING},
    ),
    "gemma2": Family("Gemma2Config", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": SLIDING, **UNTIED}),
    "gemma3": Family("Gemma3TextConfig", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": SLIDING, **UNTIED}),
    "gemma4": Family(
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 4,
            "layer_types": 2 * SLIDING,
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            **UNTIED,
        },
    ),
    "deepseek_v3": Family("DeepseekV3Config", {**LATENT, **EXPERTS, "first_k_dense_replace": 1}),
    "mistral4": Family("Mistral4Config", {**LATENT, **EXPERTS, "first_k_dense_replace": 1}, "Mistral4ForCausalLM"),
    "deepseek_v32": Family("DeepseekV32Config", {**LATENT, **EXPERTS, **INDEXER, "first_k_dense_replace": 1}),
    "glm_moe_dsa": Family(
        "GlmMoeDsaConfig",
        {
            **LATENT,
            **EXPERTS,
            **INDEXER,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "mistral_large4": Family(
        "MistralLarge4TextConfig",
        {
            **{name: value for name, value in LATENT.items() if name != "q_lora_rank"},
            **EXPERTS,
            **INDEXER,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 1, 1],
            "kv_source_layers": [0, 1, 0, 0],
            "indexer_types": ["full", "shared", "full", "shared"],
        },
        "MistralLarge4ForConditionalGeneration",
        ("MistralLarge4Config", {"vision_config": {"model_type": "pixtral", **VISION, "image_size": 28, "patch_size": 14}}),
    ),
    "deepseek_v4": Family(
        "DeepseekV4Config",
        {
            **EXPERTS,
            **INDEXER,
            "index_topk": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "q_lora_rank": 24,
            "partial_rotary_factor": 0.25,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "sliding_window": WINDOW,
            "o_groups": 2,
            "o_lora_rank": 16,
            "hc_mult": 2,
        },
        without=("intermediate_size",),
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": Family("Qwen3_5TextConfig", DELTA, "Qwen3_5ForCausalLM", std=0.1),
    "kimi_linear": Family(
        "KimiLinearConfig",
        {
            **LATENT,
            "n_shared_experts": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "minimax_m2": Family("MiniMaxM2Config", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax_m3_vl": Family(
        "MiniMaxM3VLTextConfig",
        {
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        "MiniMaxM3VLForCausalLM",
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        {
            "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
            "head_dim": 16,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
        without=("num_hidden_layers",),
    ),
    "muse_spark": Family(
        "MuseSparkTextConfig",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": SLIDING,
            "mlp_layer_types": ["dense", "sparse"],
            "moe_intermediate_size": 32,
            "moe_hidden_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "MuseSparkForConditionalGeneration",
        (
            "MuseSparkConfig",
            {"vision_config": {**VISION, "pos_emb_height": 4, "pos_emb_width": 4}, "audio_config": AUDIO, "out_hidden_size": 128},
        ),
    ),
    "inkling2": Family(
        "Inkling2TextConfig",
        {
            "unpadded_vocab_size": VOCABULARY,
            "head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "sliding_window_size": WINDOW,
            "d_rel": 8,
            "rel_extent": 16,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_layers_per_attn_res_block": 2,
        },
        "Inkling2ForCausalLM",
        without=("intermediate_size",),
    ),
    "llama4": Family(
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
        "Llama4ForCausalLM",
    ),
    "bloom": Family(
        "BloomConfig",
        {"n_layer": 2, "n_head": 4, **UNTIED},
        without=(
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ),
    ),
    "falcon": Family(
        "FalconConfig",
        {"alibi": True, "new_decoder_architecture": False, "multi_query": True, **UNTIED},
        without=("intermediate_size", "num_key_value_heads"),
    ),
}
"""The families by name. Gemma 3 and those before GPT-OSS are answered by kvdb; the others attend themselves."""


@cache
def family(name: str, seed: int = 0) -> Any:
    """A small model of a family, in evaluation mode. Nobody may change it."""
    return build(name, seed)


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A small model of a family that is nobody else's. changes: of the text's config."""
    given = FAMILIES[name]
    fields = {key: value for key, value in BASE.items() if key not in given.without}
    config = getattr(transformers, given.config)(**{**fields, **given.fields, **changes})
    if given.around is not None:
        outer, rest = given.around
        config = getattr(transformers, outer)(text_config=config, **rest)
    torch.manual_seed(seed)
    if given.model is None:
        model = transformers.AutoModelForCausalLM.from_config(config)
    else:
        model = getattr(transformers, given.model)(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=given.std)
    return model.float().eval()
