"""What Hugging Face's config classes take where a file leaves a field out (`transformers` 5.19, the one of vLLM 0.32).

A file states nearly all its fields, but the nested language model of a multimodal one leaves out what has these values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

_HEAD_FIELDS = ("num_key_value_heads", "head_dim", "max_position_embeddings")

# By model_type, in the order of _HEAD_FIELDS. None: no value of its own, the class derives it or has no such field.
_HEADS: Mapping[str, tuple[int | None, ...]] = {
    "apertus": (None, None, 65536),
    "arcee": (None, None, 4096),
    "bamba": (8, None, 262144),
    "cohere": (None, None, 8192),
    "cohere2": (None, None, 8192),
    "deepseek_v2": (None, None, 2048),
    "deepseek_v3": (128, None, 4096),
    "deepseek_v32": (128, 64, 163840),
    "deepseek_v4": (1, 512, 1048576),
    "dots1": (32, None, 2048),
    "ernie4_5": (2, 128, 131072),
    "ernie4_5_moe": (4, None, 131072),
    "exaone4": (32, None, 2048),
    "falcon": (None, None, 2048),
    "falcon_h1": (8, None, 8192),
    "gemma": (16, 256, 8192),
    "gemma2": (4, 256, 8192),
    "gemma3": (4, 256, 131072),
    "gemma3_text": (4, 256, 131072),
    "gemma3n": (2, 256, 32768),
    "gemma3n_text": (2, 256, 32768),
    "gemma4": (4, 256, 131072),
    "gemma4_text": (4, 256, 131072),
    "glm": (2, 128, 131072),
    "glm4": (2, 128, 131072),
    "glm4_moe": (8, None, 131072),
    "glm4_moe_lite": (20, None, 202752),
    "glm4v": (2, None, 32768),
    "glm4v_moe": (8, None, 65536),
    "glm4v_moe_text": (8, None, 65536),
    "glm4v_text": (2, None, 32768),
    "glm_moe_dsa": (64, 64, 202752),
    "gpt_neox": (None, None, 2048),
    "gpt_oss": (8, 64, 131072),
    "granite": (None, None, 2048),
    "granitemoe": (None, None, 2048),
    "granitemoehybrid": (None, None, 2048),
    "hunyuan_v1_dense": (None, None, 2048),
    "hunyuan_v1_moe": (None, None, 2048),
    "jamba": (8, None, 262144),
    "kimi_linear": (32, None, 1048576),
    "lfm2": (8, None, 128000),
    "lfm2_moe": (8, None, 128000),
    "llama": (None, None, 2048),
    "llama4": (8, 128, 131072),
    "llama4_text": (8, 128, 131072),
    "mimo_v2_flash": (4, 192, 131072),
    "minimax": (8, None, 131072),
    "minimax_m2": (8, 128, 196608),
    "ministral3": (8, 128, 262144),
    "mistral": (8, None, 131072),
    "mixtral": (8, None, 131072),
    "mllama": (8, None, 131072),
    "mllama_text_model": (8, None, 131072),
    "nemotron": (None, None, 4096),
    "nemotron_h": (8, 128, 4096),
    "olmo": (None, None, 2048),
    "olmo2": (None, None, 2048),
    "olmo3": (None, None, 2048),
    "olmoe": (None, None, 4096),
    "opt": (None, None, 2048),
    "persimmon": (None, None, 16384),
    "phi": (None, None, 2048),
    "phi3": (None, None, 4096),
    "phimoe": (8, None, 131072),
    "qwen2": (32, None, 32768),
    "qwen2_5_omni": (4, None, 32768),
    "qwen2_5_omni_text": (4, None, 32768),
    "qwen2_5_vl": (8, None, 32768),
    "qwen2_5_vl_text": (8, None, 32768),
    "qwen2_moe": (16, None, 32768),
    "qwen2_vl": (8, None, 32768),
    "qwen2_vl_text": (8, None, 32768),
    "qwen3": (32, 128, 32768),
    "qwen3_5": (4, 256, 32768),
    "qwen3_5_moe": (2, 256, 32768),
    "qwen3_5_moe_text": (2, 256, 32768),
    "qwen3_5_text": (4, 256, 32768),
    "qwen3_moe": (4, None, 32768),
    "qwen3_next": (2, 256, 32768),
    "qwen3_omni_moe": (4, None, 32768),
    "qwen3_omni_moe_text": (4, None, 32768),
    "qwen3_vl": (32, 128, 128000),
    "qwen3_vl_moe": (16, None, 128000),
    "qwen3_vl_moe_text": (16, None, 128000),
    "qwen3_vl_text": (32, 128, 128000),
    "seed_oss": (8, 128, 524288),
    "smollm3": (4, None, 32768),
    "stablelm": (32, None, 4096),
    "starcoder2": (2, None, 4096),
    "zamba2": (None, None, 4096),
}

_SIZE_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads")

# Only of those that stand inside multimodal files without them; elsewhere a file without layers and heads is a broken one.
_SIZES: Mapping[str, tuple[int, ...]] = {
    "cohere2": (8192, 40, 64),
    "gemma": (3072, 28, 16),
    "gemma2": (2304, 26, 8),
    "gemma3": (2304, 26, 8),
    "gemma3_text": (2304, 26, 8),
    "gemma3n": (2048, 35, 8),
    "gemma3n_text": (2048, 35, 8),
    "gemma4": (2304, 30, 8),
    "gemma4_text": (2304, 30, 8),
    "llama": (4096, 32, 32),
    "llama4": (5120, 48, 40),
    "llama4_text": (5120, 48, 40),
    "mistral": (4096, 32, 32),
    "mllama": (4096, 40, 32),
    "mllama_text_model": (4096, 40, 32),
}

_GATED_DELTA_NET = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_INDEXED_LATENT = {**_LATENT, "index_head_dim": 128, "index_topk": 2048}
_MAMBA2 = {"mamba_n_heads": 128, "mamba_d_state": 256}
_LLAMA4 = {"attention_chunk_size": 8192}
_GEMMA3N = {"sliding_window": 512, "num_kv_shared_layers": 15}

# What only some designs have.
_DESIGN: Mapping[str, Mapping[str, Any]] = {
    "bamba": _MAMBA2,
    "cohere2": {"sliding_window": 4096},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED_LATENT,
    "exaone4": {"sliding_window": 4096},
    "falcon": {"multi_query": True},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 1024},
    "gemma2": {"sliding_window": 4096},
    "gemma3": {"sliding_window": 4096},
    "gemma3_text": {"sliding_window": 4096},
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"sliding_window": 512},
    "gemma4_text": {"sliding_window": 512},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _INDEXED_LATENT,
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": {"sliding_window": 128},
    "granitemoehybrid": _MAMBA2,
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4},
    "lfm2": {"conv_L_cache": 3},
    "lfm2_moe": {"conv_L_cache": 3},
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "mimo_v2_flash": {"sliding_window": 128, "v_head_dim": 128},
    "mistral": {"sliding_window": 4096},
    "nemotron_h": {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
    "olmo3": {"sliding_window": 4096},
    "qwen3_5": _GATED_DELTA_NET,
    "qwen3_5_moe": _GATED_DELTA_NET,
    "qwen3_5_moe_text": _GATED_DELTA_NET,
    "qwen3_5_text": _GATED_DELTA_NET,
    "qwen3_next": _GATED_DELTA_NET,
}


def defaults_of(model_types: Sequence[object]) -> Mapping[str, Any]:
    """The defaults of the first model_type that is known here; none for models whose config class is not part of transformers."""
    for model_type in model_types:
        if isinstance(model_type, str) and (model_type in _HEADS or model_type in _DESIGN):
            stated = (
                *zip(_HEAD_FIELDS, _HEADS.get(model_type, ()), strict=False),
                *zip(_SIZE_FIELDS, _SIZES.get(model_type, ()), strict=False),
            )
            return {name: size for name, size in stated if size is not None} | dict(_DESIGN.get(model_type, {}))
    return MappingProxyType({})
