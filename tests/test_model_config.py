"""config.json -> ModelConfig: what is read, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.model_config import parse_model_config
from lab import LLAMA_8B

PLAIN: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "torch_dtype": "bfloat16",
}


def heads(**fields: Any) -> tuple[int, int]:
    """(KV heads, head_dim) of a config."""
    model = parse_model_config({**PLAIN, **fields})
    return model.num_key_value_heads, model.head_dim


def test_llama_3_1_8b() -> None:
    model = parse_model_config(LLAMA_8B)
    assert (model.architecture, model.num_hidden_layers, model.num_attention_heads) == ("LlamaForCausalLM", 32, 32)
    assert (model.num_key_value_heads, model.head_dim, model.dtype) == (8, 128, "bfloat16")


def test_multi_head_attention_has_as_many_kv_heads_as_heads() -> None:
    assert heads() == (32, 128)


def test_grouped_query_attention() -> None:
    assert heads(num_key_value_heads=8) == (8, 128)


def test_multi_query_attention_by_switch_is_one_head() -> None:
    falcon_7b = {"architectures": ["FalconForCausalLM"], "multi_query": True, "num_kv_heads": 71, "num_attention_heads": 71}
    assert heads(**falcon_7b, hidden_size=4544) == (1, 64)


def test_falcon_new_decoder_keeps_its_kv_heads() -> None:
    falcon_40b = {"architectures": ["FalconForCausalLM"], "multi_query": True, "new_decoder_architecture": True}
    assert heads(**falcon_40b, num_kv_heads=8, num_attention_heads=128, hidden_size=8192) == (8, 64)


def test_head_dim_that_is_given_wins_over_the_derived_one() -> None:
    assert heads(num_key_value_heads=8, head_dim=256) == (8, 256)


def test_null_counts_as_not_given() -> None:
    assert heads(num_key_value_heads=None, head_dim=None) == (32, 128)


def test_old_field_names() -> None:
    model = parse_model_config({"architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_head": 12, "n_embd": 768})
    assert (model.num_hidden_layers, model.num_key_value_heads, model.head_dim, model.dtype) == (12, 12, 64, None)


def test_language_model_inside_a_multimodal_config() -> None:
    """The nested part counts, two levels deep as well, and not the vision numbers beside it; dtype may stand outside."""
    text = {**PLAIN, "num_key_value_heads": 8, "model_type": "qwen3", "architectures": None, "torch_dtype": None}
    for wrapped in ({"text_config": text}, {"thinker_config": {"text_config": text}}):
        outer = {"architectures": ["InternVLChatModel"], "num_hidden_layers": 24, "hidden_size": 1024, "torch_dtype": "float16"}
        model = parse_model_config({**outer, **wrapped})
        assert (model.num_hidden_layers, model.num_key_value_heads, model.dtype) == (32, 8, "float16")


def test_model_type_stands_in_for_a_missing_architecture() -> None:
    assert parse_model_config({**PLAIN, "architectures": None, "model_type": "llama"}).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("fields", [{"dtype": "float16", "torch_dtype": "bfloat16"}, {"torch_dtype": "torch.float16"}])
def test_dtype_spellings(fields: Mapping[str, str]) -> None:
    assert parse_model_config({**PLAIN, **fields}).dtype == "float16"


def test_sliding_window_that_is_switched_off_is_full_attention() -> None:
    assert heads(architectures=["Qwen2ForCausalLM"], sliding_window=4096, use_sliding_window=False) == (32, 128)
    assert heads(architectures=["MistralForCausalLM"], sliding_window=None) == (32, 128)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8"}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8"),
    ],
)
def test_cache_format_of_the_checkpoint(quantization: Mapping[str, Any], expected: str | None) -> None:
    """FP8 weights alone leave the cache as it is."""
    assert parse_model_config({**PLAIN, "quantization_config": quantization}).kv_cache_dtype == expected


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"architectures": ["NewDesignForCausalLM"]},
            "architecture NewDesignForCausalLM is not known to be plain full attention, so its KV-cache bytes are not stated; "
            "figures in blocks go on",
        ),
        (
            {"kv_lora_rank": 512},
            "LlamaForCausalLM with kv_lora_rank = 512 is not plain full attention, so its KV-cache bytes are not stated; "
            "figures in blocks go on",
        ),
        (
            {"architectures": ["MistralForCausalLM"]},
            "MistralForCausalLM with sliding_window = 4096 is not plain full attention, so its KV-cache bytes are not stated; "
            "figures in blocks go on",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "LlamaForCausalLM with layer_types = ['sliding_attention'] is not plain full attention, so its KV-cache bytes are "
            "not stated; figures in blocks go on",
        ),
        ({"num_key_value_heads": 0}, "LlamaForCausalLM: num_key_value_heads = 0 is not a positive whole number"),
        ({"num_key_value_heads": 5}, "LlamaForCausalLM: 32 attention heads cannot share 5 KV heads evenly"),
        (
            {"num_hidden_layers": None},
            "LlamaForCausalLM: config.json has no num_hidden_layers or n_layer or num_layers or n_layers",
        ),
        (
            {"hidden_size": 4100},
            "LlamaForCausalLM: hidden_size 4100 is not a multiple of 32 attention heads and no head_dim is given",
        ),
        ({"torch_dtype": "int3"}, "LlamaForCausalLM: dtype 'int3' is not one of bfloat16, float16, float32"),
        (
            {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}},
            "LlamaForCausalLM: the checkpoint's kv_cache_quant_algo = 'NVFP4' is not a KV-cache format that this exporter knows",
        ),
    ],
)
def test_refusal_names_field_and_value(fields: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        parse_model_config({**PLAIN, **fields})
    assert str(refusal.value) == sentence


def test_unknown_model_inside_a_known_wrapper_is_refused() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {**PLAIN, "architectures": ["NewForCausalLM"]}}
    with pytest.raises(UnsupportedModelError, match="LlavaForConditionalGeneration with a language model NewForCausalLM"):
        parse_model_config(config)
