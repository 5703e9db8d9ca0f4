"""Mistral's own params.json, told in the field names of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_seq_len": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "kv_lora_rank": "kv_lora_rank",
    "qk_rope_head_dim": "qk_rope_head_dim",
}


def is_params_json(config: Mapping[str, Any]) -> bool:
    """Whether a file is params.json: it names no architecture, and its width is `dim`."""
    return "dim" in config and "n_layers" in config and not config.get("architectures") and "model_type" not in config


def config_from_params(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same facts as config.json would state them. A length that is not in the file stays unknown."""
    config: dict[str, Any] = {name: params[field] for field, name in _FIELDS.items() if field in params}
    latent = "kv_lora_rank" in params
    config["architectures"] = ["DeepseekV3ForCausalLM" if latent else "MistralForCausalLM"]
    # Here no window means none; in config.json a missing field means Hugging Face's default of 4096.
    config["sliding_window"] = params.get("sliding_window")
    return config
