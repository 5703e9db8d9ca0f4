"""config.json -> ModelConfig: what each layer keeps, and what is refused by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_exporter.capacity import num_gpu_blocks_for
from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec import EngineConfig, kv_cache_layout
from kvcache_exporter.model_config import ModelConfig, parse_model_config
from kvcache_exporter.model_config.layers import (
    AttentionLayer,
    CacheLayer,
    CompressedLatentLayer,
    CrossAttentionLayer,
    GatedDeltaNetLayer,
    KimiDeltaAttentionLayer,
    LinearAttentionLayer,
    Mamba1Layer,
    Mamba2Layer,
    MLALayer,
    ShortConvLayer,
    SlidingLatentLayer,
    SparseIndexerLayer,
)
from lab import DATA, LLAMA_8B

PLAIN: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "torch_dtype": "bfloat16",
}
MAMBA_2 = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128}


def read(architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelConfig:
    """A plain model of that architecture with these fields changed."""
    return parse_model_config({**PLAIN, "architectures": [architecture], **fields})


def real(name: str) -> ModelConfig:
    """A real model, by the name of its file."""
    return parse_model_config(json.loads((DATA / "models" / f"{name}.json").read_text()))


def attention(model: ModelConfig, index: int = 0) -> AttentionLayer:
    """The attention of one decoder layer."""
    return next(layer for layer in model.decoder_layers[index] if isinstance(layer, AttentionLayer))


def heads(architecture: str = "LlamaForCausalLM", **fields: Any) -> tuple[int, int]:
    """(KV heads, head_dim) of the first layer."""
    layer = attention(read(architecture, **fields))
    return layer.num_kv_heads, layer.head_size


def letter(layer: CacheLayer) -> str:
    """F full, S sliding, C chunked, X cross, L latent, I index, M a state."""
    if isinstance(layer, AttentionLayer):
        return "S" if layer.sliding_window else "C" if layer.attention_chunk_size else "F"
    return {CrossAttentionLayer: "X", MLALayer: "L", SparseIndexerLayer: "I"}.get(type(layer), "M")


def designs(model: ModelConfig) -> list[str]:
    """The letters of each decoder layer."""
    return ["".join(letter(layer) for layer in decoder_layer) for decoder_layer in model.decoder_layers]


def design(architecture: str, **fields: Any) -> str:
    """The letters of all decoder layers, a space between two; `-` is a layer that keeps nothing."""
    return " ".join(one or "-" for one in designs(read(architecture, **fields)))


def refusal(architecture: str = "LlamaForCausalLM", **fields: Any) -> str:
    with pytest.raises(UnsupportedModelError) as refused:
        read(architecture, **fields)
    return str(refused.value)


def test_llama_3_1_8b() -> None:
    model = parse_model_config(LLAMA_8B)
    assert (model.architecture, len(model.decoder_layers), model.num_attention_heads) == ("LlamaForCausalLM", 32, 32)
    assert set(model.decoder_layers) == {(AttentionLayer(8, 128, 128),)}
    assert (model.dtype, model.kv_cache_dtype, model.max_model_len) == ("bfloat16", None, 131_072)


# Heads


def test_multi_head_attention_has_as_many_kv_heads_as_heads() -> None:
    assert heads() == (32, 128)


def test_grouped_query_attention() -> None:
    assert heads(num_key_value_heads=8) == (8, 128)


def test_multi_query_attention_by_switch_is_one_head() -> None:
    assert heads("FalconForCausalLM", multi_query=True, num_kv_heads=71, num_attention_heads=71, hidden_size=4544) == (1, 64)


def test_falcon_new_decoder_keeps_its_kv_heads() -> None:
    falcon_40b = {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}
    assert heads("FalconForCausalLM", **falcon_40b, num_attention_heads=128, hidden_size=8192) == (8, 64)


@pytest.mark.parametrize(
    "field", ["n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"]
)
def test_spellings_of_kv_heads(field: str) -> None:
    assert attention(parse_model_config({**PLAIN, field: 4})).num_kv_heads == 4


def test_of_two_spellings_of_kv_heads_vllms_first_counts() -> None:
    assert heads(num_attention_groups=2, num_key_value_heads=8, n_head_kv=4) == (4, 128)


@pytest.mark.parametrize("field", ["head_dim", "hidden_size_per_head", "kv_channels", "attention_head_dim"])
def test_head_dim_that_is_given_wins_over_the_derived_one(field: str) -> None:
    assert attention(parse_model_config({**PLAIN, "num_key_value_heads": 8, field: 256})) == AttentionLayer(8, 256, 256)


def test_null_counts_as_not_given() -> None:
    assert heads(num_key_value_heads=None, head_dim=None) == (32, 128)


def test_old_field_names() -> None:
    model = parse_model_config({"architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_head": 12, "n_embd": 768})
    assert (len(model.decoder_layers), model.dtype, attention(model)) == (12, None, AttentionLayer(12, 64, 64))


@pytest.mark.parametrize("architecture", ["MPTForCausalLM", "DbrxForCausalLM"])
def test_kv_heads_in_attn_config(architecture: str) -> None:
    assert heads(architecture, attn_config={"kv_n_heads": 8}) == (8, 128)


def test_kv_heads_by_block_and_blocks_without_attention() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 8}},
        {"attention": {"no_op": True, "n_heads_in_group": None}},
        {"attention": {"n_heads_in_group": 16}},
        {"attention": {"replace_with_linear": True, "n_heads_in_group": None}},
    ]
    model = read("DeciLMForCausalLM", num_hidden_layers=4, block_configs=blocks)
    assert model.decoder_layers == ((AttentionLayer(4, 128, 128),), (), (AttentionLayer(2, 128, 128),), ())


def test_kv_heads_by_layer() -> None:
    model = read("DeciLMForCausalLM", num_hidden_layers=3, num_key_value_heads_per_layer=[4, 2, 1])
    assert [attention(model, index).num_kv_heads for index in range(3)] == [4, 2, 1]


# Windows and chunks


def test_sliding_window_that_is_switched_off_is_full_attention() -> None:
    assert set(designs(read("Qwen2ForCausalLM", sliding_window=4096, use_sliding_window=False))) == {"F"}
    assert set(designs(read("Qwen2ForCausalLM", sliding_window=4096))) == {"F"}
    assert set(designs(read("MistralForCausalLM", sliding_window=None))) == {"F"}


def test_window_that_is_switched_on_slides_from_max_window_layers_on() -> None:
    switched = {"sliding_window": 4096, "use_sliding_window": True, "num_hidden_layers": 4}
    assert design("Qwen2ForCausalLM", **switched, max_window_layers=3) == "F F F S"
    assert design("Qwen2ForCausalLM", **switched, max_window_layers=28) == "F F F F"
    types = ["sliding_attention", "full_attention"] * 2
    assert design("Qwen3ForCausalLM", **switched, layer_types=types) == "S F S F"


def test_window_alone_makes_all_layers_slide() -> None:
    assert design("Phi3ForCausalLM", num_hidden_layers=3, sliding_window=2047) == "S S S"
    assert attention(read("Phi3ForCausalLM", sliding_window=2047)).sliding_window == 2047


def test_mistral_without_the_field_has_the_default_window_of_hugging_face() -> None:
    assert attention(read("MistralForCausalLM")).sliding_window == 4096


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("Gemma2ForCausalLM", {}, "S F S F S F"),
        ("Gemma3ForCausalLM", {}, "S S S S S F"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 3}, "S S F S S F"),
        ("Gemma3ForCausalLM", {"_sliding_window_pattern": 2}, "S S S S S F"),
        ("Cohere2ForCausalLM", {}, "S S S F S S"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG"}, "S S S F S S"),
        ("LlamaForCausalLM", {"layer_types": ["full_attention", "sliding_attention", "attention"] * 2}, "F S F F S F"),
        # vLLM's class does not look at layer_types.
        ("GptOssForCausalLM", {"layer_types": ["full_attention"] * 6}, "S F S F S F"),
        ("GptOssForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "S S S S S S"),
        ("Olmo3ForCausalLM", {"sliding_window_pattern": 2}, "S S S F S S"),
        ("Gemma4ForCausalLM", {"num_hidden_layers": 7}, "S S S S S F F"),
        ("MistralForCausalLM", {"sliding_window_pattern": 2}, "S S S S S S"),
        # Classes that give no layer a window of its own.
        ("MixtralForCausalLM", {}, "S S S S S S"),
        ("MixtralForCausalLM", {"layer_types": ["full_attention", "sliding_attention"] * 3}, "F F F F F F"),
        ("MixtralForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "S S S S S S"),
        ("MixtralForCausalLM", {"sliding_window": 0}, "F F F F F F"),
        ("Qwen2MoeForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, "F F F F F F"),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, "S S S S S S"),
        ("Qwen3MoeForCausalLM", {}, "F F F F F F"),
        ("Qwen3VLForConditionalGeneration", {}, "S S S S S S"),
        ("Qwen3VLForConditionalGeneration", {"use_sliding_window": False}, "F F F F F F"),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, "F F F S F F"),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "no_rope_layers": [1, 0] * 3}, "F S F S F S"),
        ("SmolLM3ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"] * 3}, "F S F S F S"),
        ("FalconForCausalLM", {}, "F F F F F F"),
        ("MiMoV2FlashForCausalLM", {"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0]}, "F S S S S F"),
    ],
)
def test_which_layers_slide(architecture: str, fields: Mapping[str, Any], expected: str) -> None:
    assert design(architecture, **{"num_hidden_layers": 6, "sliding_window": 512, **fields}) == expected


def test_kinds_that_slide_without_a_window_are_full() -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6}
    assert design("LlamaForCausalLM", **kinds) == design("LlamaForCausalLM", **kinds, sliding_window=0) == "F F F F F F"


def test_window_that_looks_both_ways_counts_half() -> None:
    assert attention(read("Gemma3ForCausalLM", sliding_window=4096, use_bidirectional_attention=True)).sliding_window == 2049


def test_window_of_cohere2_includes_the_current_token() -> None:
    assert attention(read("Cohere2ForCausalLM", sliding_window=4096)).sliding_window == 4097


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "C C C F C C"),
        ({"no_rope_layers": [1, 0, 1, 0, 1, 0]}, "C F C F C F"),
        ({"no_rope_layers": [], "no_rope_layer_interval": 2}, "C F C F C F"),
        ({"attention_chunk_size": None}, "F F F F F F"),
    ],
)
def test_which_layers_of_llama_4_are_chunked(fields: Mapping[str, Any], expected: str) -> None:
    chunk = {"attention_chunk_size": 8192}
    assert design("Llama4ForCausalLM", num_hidden_layers=6, **{**chunk, **fields}) == expected


def test_last_layers_that_share_a_cache_keep_nothing() -> None:
    assert design("Gemma3nForCausalLM", num_hidden_layers=6, num_kv_shared_layers=2, sliding_window=512) == "S S S S - -"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_global_key_value_heads": 4, "global_head_dim": 512, "attention_k_eq_v": True}, AttentionLayer(4, 512, 512)),
        # The number of heads holds only where keys serve as values; the size has a default of its own.
        ({"num_global_key_value_heads": 4}, AttentionLayer(16, 512, 512)),
        ({"per_layer_config": {"05": {"head_dim": 384, "num_key_value_heads": 2}}}, AttentionLayer(2, 384, 384)),
    ],
)
def test_full_layers_of_gemma_4_have_heads_of_their_own(fields: Mapping[str, Any], expected: AttentionLayer) -> None:
    sizes = {"num_key_value_heads": 16, "head_dim": 256, "sliding_window": 1024, "num_hidden_layers": 6}
    model = read("Gemma4ForCausalLM", **sizes, **fields)
    assert attention(model, 0) == AttentionLayer(16, 256, 256, sliding_window=1024)
    assert attention(model, 5) == expected


def test_more_shared_layers_than_there_are_share_nothing() -> None:
    assert design("Gemma3nForCausalLM", num_hidden_layers=4, num_kv_shared_layers=4, sliding_window=512) == "S S S S"
    assert design("LlamaForCausalLM", num_hidden_layers=4, num_kv_shared_layers=2) == "F F F F"


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "StableLmForCausalLM", "OlmoeForCausalLM", "OPTForCausalLM"])
def test_classes_that_take_the_width_over_the_heads_whatever_the_file_states(architecture: str) -> None:
    assert attention(read(architecture, head_dim=96, num_key_value_heads=32)) == AttentionLayer(32, 128, 128)


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": False, "num_kv_heads": 4}, 32),
        ({"new_decoder_architecture": True, "num_kv_heads": 8}, 8),
        ({"new_decoder_architecture": True, "n_head_kv": 8}, 32),
    ],
)
def test_heads_of_falcon(fields: Mapping[str, Any], heads: int) -> None:
    assert attention(read("FalconForCausalLM", **fields)).num_kv_heads == heads


def test_heads_of_chatglm() -> None:
    groups = {"multi_query_group_num": 2, "kv_channels": 64}
    assert attention(read("ChatGLMModel", **groups, multi_query_attention=True)) == AttentionLayer(2, 128, 128)
    assert attention(read("ChatGLMModel", **groups, multi_query_attention=False)) == AttentionLayer(32, 128, 128)


def test_keys_and_values_of_two_sizes() -> None:
    model = real("MiMo-V2-Flash")
    assert Counter(designs(model)) == {"F": 9, "S": 39}
    assert attention(model, 0) == AttentionLayer(4, 192, 128)
    assert attention(model, 1) == AttentionLayer(8, 192, 128, sliding_window=128)


@pytest.mark.parametrize(
    ("name", "expected", "layer"),
    [
        ("gpt-oss-20b", ["S", "F"] * 12, AttentionLayer(8, 64, 64, sliding_window=128)),
        ("gemma-3-27b-text", (["S"] * 5 + ["F"]) * 10 + ["S"] * 2, AttentionLayer(16, 128, 128, sliding_window=1024)),
        ("Llama-4-Scout-17B-16E-Instruct", ["C", "C", "C", "F"] * 12, AttentionLayer(8, 128, 128, None, 8192)),
    ],
)
def test_real_models_with_windows_and_chunks(name: str, expected: list[str], layer: AttentionLayer) -> None:
    assert designs(real(name)) == expected
    assert attention(real(name)) == layer


# Latents


def test_latents() -> None:
    assert set(real("DeepSeek-V3").decoder_layers) == {(MLALayer(512, 64),)}
    assert len(real("DeepSeek-V3").decoder_layers) == 61


def test_sparse_attention_keeps_an_index_beside_the_latent() -> None:
    assert set(real("DeepSeek-V3.2").decoder_layers) == {(MLALayer(512, 64), SparseIndexerLayer(128))}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"index_topk_pattern": ["F", "S", "S", "F"]}, "LI L L LI LI LI"),
        ({"index_topk_freq": 2}, "LI LI L LI L LI"),
    ],
)
def test_layers_that_reuse_a_selection_have_no_index(fields: Mapping[str, Any], expected: str) -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048, "index_head_dim": 128}
    assert design("GlmMoeDsaForCausalLM", num_hidden_layers=6, **latent, **fields) == expected


def test_deepseek_without_a_latent_rank_is_ordinary_attention() -> None:
    assert set(designs(read("DeepseekV2ForCausalLM", kv_lora_rank=None))) == {"F"}


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("DeepSeek-V3", (MLALayer(512, 64),)),
        ("DeepSeek-V3.2", (MLALayer(512, 64), SparseIndexerLayer(128))),
        ("Qwen3-Next-80B-A3B", (AttentionLayer(2, 256, 256),)),
        ("Meta-Llama-3.1-8B", None),
    ],
)
def test_layer_of_the_models_own_drafts(name: str, draft: tuple[CacheLayer, ...] | None) -> None:
    assert real(name).draft_layer == draft


def test_compressed_latents_lie_beside_a_window() -> None:
    """Ratio 4 has an index and twice the raw tokens; ratio 128 has neither."""
    model = real("DeepSeek-V4-Flash")
    assert Counter(len(layers) for layers in model.decoder_layers) == {1: 2, 3: 20, 5: 21}
    assert model.decoder_layers[3] == (
        SlidingLatentLayer(584, sliding_window=128, block_size=64),
        CompressedLatentLayer(584, tokens_per_state=128),
        SlidingLatentLayer(4096, sliding_window=128, block_size=8),
    )


# States


@pytest.mark.parametrize(
    ("name", "counts", "state"),
    [
        ("Jamba-1.5-Mini", {"M": 28, "F": 4}, Mamba1Layer(d_inner=8192, d_state=16, d_conv=4)),
        (
            "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            {"M": 23, "F": 6, "": 23},
            Mamba2Layer(d_inner=4096, num_heads=64, head_dim=64, d_state=128, n_groups=8, d_conv=4),
        ),
        ("Qwen3-Next-80B-A3B", {"M": 36, "F": 12}, GatedDeltaNetLayer(16, 32, 128, 128, 4)),
        ("Kimi-Linear-48B", {"M": 21, "L": 6}, KimiDeltaAttentionLayer(32, 128, 4)),
        ("LFM2-1.2B", {"M": 10, "F": 6}, ShortConvLayer(2048, 3)),
    ],
)
def test_real_models_with_states(name: str, counts: Mapping[str, int], state: CacheLayer) -> None:
    model = real(name)
    assert Counter(designs(model)) == counts
    assert {layer for layers in model.decoder_layers for layer in layers if letter(layer) == "M"} == {state}


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1}, "M F M F"),
        ("BambaForCausalLM", {"attn_layer_indices": [2], **MAMBA_2}, "M M F M"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "attention"] * 2, **MAMBA_2}, "M F M F"),
        ("FalconH1ForCausalLM", {"mamba_d_ssm": 3072, **MAMBA_2}, "MF MF MF MF"),
        ("KimiLinearForCausalLM", {"kda_layers": [1, 2, 3]}, "M M M L"),
        ("Qwen3NextForCausalLM", {}, "M M M F"),
        ("Qwen3NextForCausalLM", {"full_attention_interval": 2}, "M F M F"),
        ("Qwen3NextForCausalLM", {"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "F M M M"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2}, "M F M F"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["linear_attention", "full_attention"] * 2, **MAMBA_2}, "M F M F"),
        ("GraniteMoeHybridForCausalLM", {"layers_block_type": ["mamba", "attention"] * 2, **MAMBA_2}, "M F M F"),
        ("GraniteMoeHybridForCausalLM", {}, "M M M M"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 3, "full_attn_idxs": [0]}, "F M M M"),
        ("Lfm2ForCausalLM", {}, "F F F F"),
        ("MiniMaxText01ForCausalLM", {"attn_type_list": [0, 0, 0, 1]}, "M M M F"),
        (
            "Zamba2ForCausalLM",
            {
                "layers_block_type": ["mamba", "hybrid"] * 2,
                "n_mamba_heads": 64,
                "mamba_headdim": 64,
                "mamba_d_state": 64,
                "attention_head_dim": 160,
            },
            "M FM M FM",
        ),
    ],
)
def test_which_layers_keep_a_state(architecture: str, fields: Mapping[str, Any], expected: str) -> None:
    delta_net = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    kimi = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "kda_layers": fields.get("kda_layers"),
        },
    }
    assert design(architecture, num_hidden_layers=4, **{**delta_net, **kimi, **fields}) == expected


def test_states_of_their_own_width() -> None:
    default = read("FalconH1ForCausalLM", mamba_n_heads=8, mamba_d_head="auto")
    assert Mamba2Layer(d_inner=1024, num_heads=8, head_dim=128, d_state=256, n_groups=1, d_conv=4) in default.decoder_layers[0]
    falcon = read("FalconH1ForCausalLM", mamba_d_ssm=3072, mamba_n_groups=2, **MAMBA_2)
    assert falcon.decoder_layers[0][0] == Mamba2Layer(3072, 128, 64, 128, 2, 4)
    minimax = read("MiniMaxText01ForCausalLM", num_hidden_layers=2, attn_type_list=[0, 1])
    assert minimax.decoder_layers[0] == (LinearAttentionLayer(32, 128),)


def test_feed_forward_layers_keep_nothing() -> None:
    mamba = {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
    assert design("NemotronHForCausalLM", hybrid_override_pattern="M-*E", num_hidden_layers=4, **mamba) == "M - F -"


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("NemotronHForCausalLM", {"mamba_ssm_cache_dtype": "float16"}, "float16"),
        ("NemotronHForCausalLM", {"mamba_ssm_dtype": "float16"}, "float32"),
        ("NemotronHForCausalLM", {}, "float32"),
        ("Qwen3_5ForConditionalGeneration", {"mamba_ssm_dtype": "float32"}, "float32"),
        ("Qwen3_5ForConditionalGeneration", {"mamba_ssm_cache_dtype": "float32"}, None),
        ("Qwen3NextForCausalLM", {"mamba_ssm_dtype": "float32"}, None),
        ("Qwen3NextForCausalLM", {}, None),
    ],
)
def test_dtype_of_recurrent_states(architecture: str, fields: Mapping[str, str], expected: str | None) -> None:
    hybrid = {
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "hybrid_override_pattern": "M*" * 16,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    assert read(architecture, **hybrid, **fields).ssm_dtype == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", True), ("Jamba-1.5-Mini", False), ("Qwen3-Next-80B-A3B", False)],
)
def test_mixers_that_keep_a_checkpoint_for_prefill(name: str, expected: bool) -> None:
    assert real(name).has_prefill_checkpoint is expected


# Encoder and decoder


def test_whisper_keeps_both_in_every_decoder_layer() -> None:
    model = real("whisper-large-v3")
    assert set(model.decoder_layers) == {(AttentionLayer(20, 64, 64), CrossAttentionLayer(20, 64, encoder_tokens=1500))}
    assert (len(model.decoder_layers), model.max_model_len) == (32, 448)


def test_mllama_has_cross_attention_in_the_layers_that_it_lists() -> None:
    assert design("MllamaForConditionalGeneration", num_hidden_layers=4, cross_attention_layers=[1]) == "F X F F"


# Nesting and names


def test_language_model_inside_a_multimodal_config() -> None:
    """The nested part counts, two levels deep as well, and not the vision numbers beside it; dtype may stand outside."""
    text = {**PLAIN, "num_key_value_heads": 8, "model_type": "qwen3", "architectures": None, "torch_dtype": None}
    for wrapped in ({"text_config": text}, {"thinker_config": {"text_config": text}}):
        outer = {"architectures": ["InternVLChatModel"], "num_hidden_layers": 24, "hidden_size": 1024, "torch_dtype": "float16"}
        model = parse_model_config({**outer, **wrapped})
        assert (len(model.decoder_layers), attention(model).num_kv_heads, model.dtype) == (32, 8, "float16")
        assert model.architecture == "InternVLChatModel"


@pytest.mark.parametrize("field", ["text_config", "llm_config", "language_config"])
def test_names_of_the_nested_part(field: str) -> None:
    model = parse_model_config({"architectures": ["InternVLChatModel"], field: {**PLAIN, "num_key_value_heads": 4}})
    assert attention(model).num_kv_heads == 4


def test_cache_format_beside_the_nested_part_counts() -> None:
    quantized = {"quantization_config": {"kv_cache_quant_algo": "FP8"}}
    assert parse_model_config({"architectures": ["InternVLChatModel"], "llm_config": PLAIN, **quantized}).kv_cache_dtype == "fp8"


def test_model_type_stands_in_for_a_missing_architecture() -> None:
    assert parse_model_config({**PLAIN, "architectures": None, "model_type": "llama"}).architecture == "LlamaForCausalLM"


def test_nested_llama_states_only_what_differs_from_the_defaults_of_hugging_face() -> None:
    nested = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama", "dtype": "float16"}}
    model = parse_model_config(nested)
    assert (model.decoder_layers, model.max_model_len) == (((AttentionLayer(32, 128, 128),),) * 32, 2048)


def test_null_field_is_not_filled_with_a_default() -> None:
    assert refusal(num_hidden_layers=None) == (
        "LlamaForCausalLM: config.json has no num_hidden_layers or n_layer or num_layers or n_layers or decoder_layers "
        "or num_transformer_layers"
    )


# dtypes


@pytest.mark.parametrize("fields", [{"dtype": "float16", "torch_dtype": "bfloat16"}, {"torch_dtype": "torch.float16"}])
def test_dtype_spellings(fields: Mapping[str, str]) -> None:
    assert read(**fields).dtype == "float16"


def test_falcon_ignores_the_flag_for_the_cache() -> None:
    assert not read("FalconForCausalLM").honours_kv_cache_dtype
    assert read().honours_kv_cache_dtype


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
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_cache_format_of_the_checkpoint(field: str, quantization: Mapping[str, Any], expected: str | None) -> None:
    """FP8 weights alone leave the cache as it is."""
    assert parse_model_config({**PLAIN, field: quantization}).kv_cache_dtype == expected


# What a file leaves out


@pytest.mark.parametrize(
    ("config", "num_kv_heads", "head_size"),
    [
        ({"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}, 2, 128),
        ({"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "num_key_value_heads": None, "head_dim": None}, 32, 128),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 2560, "num_attention_heads": 20}, 4, 128),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 32}, 32, 128),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, 32, 128),
        # What the file says under an older name goes first.
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_kv_heads": 4}, 4, 128),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "kv_channels": 64}, 32, 64),
    ],
)
def test_defaults_of_hugging_face(config: Mapping[str, Any], num_kv_heads: int, head_size: int) -> None:
    layer = attention(parse_model_config({**PLAIN, **config}))
    assert (layer.num_kv_heads, layer.head_size) == (num_kv_heads, head_size)


def test_language_model_inside_a_multimodal_file_leaves_out_what_is_default() -> None:
    """PaliGemma 2: heads, their size and the window are those of Gemma 2's config class."""
    inner = {"model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26, "num_key_value_heads": 4}
    parsed = parse_model_config({"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": inner})
    assert parsed.num_attention_heads == 8
    assert parsed.decoder_layers == ((AttentionLayer(4, 256, 256, sliding_window=4096),), (AttentionLayer(4, 256, 256),)) * 13


# Length


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": 8192, "seq_length": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 65_536),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "linear", "factor": 2.5}}, 10_240),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131_072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "default"}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": None}}, 4096),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            },
            4096,
        ),
        # The length of the file is the scaled one already.
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            163_840,
        ),
        ({"model_type": "gemma3_text", "max_position_embeddings": 8192, "rope_scaling": {"type": "linear", "factor": 8.0}}, 8192),
    ],
)
def test_length_that_vllm_serves_without_a_flag(fields: Mapping[str, Any], expected: int | None) -> None:
    assert parse_model_config({**PLAIN, "architectures": ["BaichuanForCausalLM"], **fields}).max_model_len == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384),
        # Served at the shorter length unless a flag asks for the longer one.
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            },
            131_072,
        ),
        # Older versions multiply.
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131_072),
        ({"max_position_embeddings": 4096, "model_max_length": 16384}, 16_384),
        ({"max_position_embeddings": 4096, "model_max_length": 1e30}, 4096),
    ],
)
def test_longest_length_that_a_flag_may_ask_for(fields: Mapping[str, Any], expected: int | None) -> None:
    assert parse_model_config({**PLAIN, "architectures": ["BaichuanForCausalLM"], **fields}).longest_max_model_len == expected


def test_command_r_is_served_at_the_length_of_its_last_stage() -> None:
    assert read("CohereForCausalLM", max_position_embeddings=8192, model_max_length=131072).max_model_len == 131_072


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("DeepSeek-V3", 163_840),
        ("gpt-oss-20b", 131_072),
        # The file states no length; Gemma 3's own default counts, without the factor 8 beside it.
        ("gemma-3-27b-text", 131_072),
        ("Llama-4-Scout-17B-16E-Instruct", 10_485_760),
    ],
)
def test_length_of_real_models(name: str, expected: int) -> None:
    assert real(name).max_model_len == expected


# Refusals

UNSTATED = "its bytes are not stated, figures in blocks go on"


@pytest.mark.parametrize(
    ("architecture", "fields", "sentence"),
    [
        (
            "NewDesignForCausalLM",
            {"kv_lora_rank": 512},
            "the KV-cache layout of architecture NewDesignForCausalLM is not known, and its field kv_lora_rank = 512 hints at "
            f"another design; {UNSTATED}",
        ),
        (
            "NewEncoder",
            {},
            "the KV-cache layout of architecture NewEncoder is not known, and it does not call itself a language model; "
            f"{UNSTATED}",
        ),
        (
            "NewDesignForCausalLM",
            {"num_hidden_layers": None},
            "the KV-cache layout of architecture NewDesignForCausalLM is not known, and it states no num_hidden_layers; "
            f"{UNSTATED}",
        ),
        (
            "LlamaForCausalLM",
            {"compress_ratios": [1, 4]},
            "LlamaForCausalLM: compress_ratios = [1, 4] stands for a cache layout that this exporter does not know",
        ),
        (
            "LlamaForCausalLM",
            {"kv_source_layer_ids": [2]},
            "LlamaForCausalLM: kv_source_layer_ids = [2] stands for a cache layout that this exporter does not know",
        ),
        (
            "LlamaForCausalLM",
            {"index_source_layer_ids": [2]},
            "LlamaForCausalLM: index_source_layer_ids = [2] stands for a cache layout that this exporter does not know",
        ),
        (
            "LlamaForCausalLM",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "LlamaForCausalLM: layer_types = ['full_attention', 'sliding_attention'] is not a list of 32 entries",
        ),
        (
            "LlamaForCausalLM",
            {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
            "LlamaForCausalLM: layer_types = ['linear_attention'] is not attention that this reader knows",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            {"num_hidden_layers": 1, "layer_types": ["conv"], **MAMBA_2},
            "GraniteMoeHybridForCausalLM: layer_types = ['conv'] is not a kind of layer that this reader knows",
        ),
        ("MiniMaxText01ForCausalLM", {}, "MiniMaxText01ForCausalLM: attn_type_list = None is missing"),
        (
            "Zamba2ForCausalLM",
            {"n_mamba_heads": 8, "mamba_d_state": 64},
            "Zamba2ForCausalLM: layers_block_type = None is missing",
        ),
        ("MiMoV2FlashForCausalLM", {}, "MiMoV2FlashForCausalLM: hybrid_layer_pattern = None is missing"),
        ("DeciLMForCausalLM", {}, "DeciLMForCausalLM: block_configs = None is missing"),
        (
            "KimiLinearForCausalLM",
            {"linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}},
            "KimiLinearForCausalLM: linear_attn_config = 'without kda_layers' does not tell which layers are linear",
        ),
        (
            "KimiLinearForCausalLM",
            {"linear_attn_config": 4},
            "KimiLinearForCausalLM: linear_attn_config = 4 is not an object",
        ),
        (
            "DeepseekV3ForCausalLM",
            {"kv_lora_rank": 512, "qk_rope_head_dim": None},
            "DeepseekV3ForCausalLM: config.json has no qk_rope_head_dim",
        ),
        (
            "Lfm2ForCausalLM",
            {"full_attn_idxs": "M*"},
            "Lfm2ForCausalLM: full_attn_idxs = 'M*' is not a list of layer numbers",
        ),
        (
            "Zamba2ForCausalLM",
            {"n_mamba_heads": 8, "mamba_d_state": 64, "hidden_size": 2},
            "Zamba2ForCausalLM: hidden_size = 2 is too narrow for its attention heads",
        ),
        (
            "LlamaForCausalLM",
            {"num_hidden_layers": 10**30},
            f"LlamaForCausalLM: num_hidden_layers = {10**30} is more layers than any model has",
        ),
        (
            "LlamaForCausalLM",
            {"num_key_value_heads": 0},
            "LlamaForCausalLM: num_key_value_heads = 0 is not a positive whole number",
        ),
        (
            "LlamaForCausalLM",
            {"num_key_value_heads": "8"},
            "LlamaForCausalLM: num_key_value_heads = '8' is not a positive whole number",
        ),
        ("LlamaForCausalLM", {"head_dim": True}, "LlamaForCausalLM: head_dim = True is not a positive whole number"),
        (
            "LlamaForCausalLM",
            {"num_key_value_heads": 5},
            "LlamaForCausalLM: 32 attention heads cannot share 5 KV heads evenly",
        ),
        (
            "LlamaForCausalLM",
            {"hidden_size": 4100},
            "LlamaForCausalLM: hidden_size 4100 is not a multiple of 32 attention heads and no head_dim is given",
        ),
        (
            "LlamaForCausalLM",
            {"torch_dtype": "int3"},
            "LlamaForCausalLM: dtype = 'int3' is not one of bfloat16, float16, float32",
        ),
        (
            "LlamaForCausalLM",
            {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}},
            "LlamaForCausalLM: kv_cache_quant_algo = 'NVFP4' is not a KV-cache format that this exporter knows",
        ),
        (
            "LlamaForCausalLM",
            {"quantization_config": {"kv_cache_scheme": {"num_bits": 4}}},
            "LlamaForCausalLM: kv_cache_scheme = {'num_bits': 4} is not a KV-cache format that this exporter knows",
        ),
    ],
)
def test_refusal_names_field_and_value(architecture: str, fields: Mapping[str, Any], sentence: str) -> None:
    assert refusal(architecture, **fields) == sentence


@pytest.mark.parametrize(
    "field",
    [
        {"sliding_window": 4096},
        {"attention_chunk_size": 8192},
        {"kv_lora_rank": 512},
        {"index_topk": 2048},
        {"mamba_d_state": 16},
        {"ssm_state_size": 128},
        {"linear_num_key_heads": 16},
        {"conv_L_cache": 3},
        {"num_kv_shared_layers": 4},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"hybrid_override_pattern": "M*"},
        {"cross_attention_layers": [3]},
        {"is_encoder_decoder": True},
        {"type_vocab_size": 2},
        {"loop_num": 2},
    ],
)
def test_unknown_architecture_with_a_field_of_another_design_is_refused(field: Mapping[str, Any]) -> None:
    assert "hints at another design" in refusal("NewDesignForCausalLM", **field)


@pytest.mark.parametrize("field", ["compress_ratios", "kv_source_layer_ids", "use_cla"])
@pytest.mark.parametrize("architecture", ["NewDesignForCausalLM", "LlamaForCausalLM"])
def test_field_of_a_design_that_no_reader_knows_is_named(architecture: str, field: str) -> None:
    expected = f"{architecture}: {field} = [4] stands for a cache layout that this exporter does not know"
    assert refusal(architecture, **{field: [4]}) == expected


def test_pattern_of_the_wrong_length_is_refused() -> None:
    mamba = {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
    reason = refusal("NemotronHForCausalLM", hybrid_override_pattern="M*", num_hidden_layers=52, **mamba)
    assert "hybrid_override_pattern = 'M*' is not a list of 52 entries" in reason


@pytest.mark.parametrize("fields", [{}, {"sliding_window": None}, {"num_experts": 64, "layer_types": ["full_attention"] * 32}])
def test_unknown_architecture_that_is_plainly_a_decoder_is_read_and_marked(fields: Mapping[str, Any]) -> None:
    model = read("NewDesignForCausalLM", num_key_value_heads=8, **fields)
    assert (model.architecture, model.is_assumed) == ("NewDesignForCausalLM", True)
    assert set(model.decoder_layers) == {(AttentionLayer(8, 128, 128),)}
    assert not read().is_assumed


def test_refusal_carries_field_and_value() -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        read(num_key_value_heads=0)
    assert (refused.value.field, refused.value.value) == ("num_key_value_heads", 0)


def test_unknown_model_inside_a_known_wrapper_is_refused() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {**PLAIN, "architectures": ["NewForCausalLM"]}}
    with pytest.raises(
        UnsupportedModelError, match="LlavaForConditionalGeneration is not known, and neither is its language model"
    ):
        parse_model_config(config)


def test_known_model_inside_an_unknown_wrapper_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layout of architecture NewVLForConditionalGeneration is not known"):
        parse_model_config({"architectures": ["NewVLForConditionalGeneration"], "text_config": PLAIN})


def test_config_without_architecture_and_model_type_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layout of architecture None is not known"):
        parse_model_config({})


ODD_VALUES: tuple[Any, ...] = (
    *(None, 0, 1, -1, 3, 2.5, True, "", "x", "8", "float32", "full_attention", float("inf"), float("nan")),
    *([], [1], [[1]], ["a"], [{}], {}, {"a": 1}),
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_odd_value_in_a_real_file_is_read_or_refused(data: st.DataObject) -> None:
    """Whatever stands in one field: a layout, or one sentence that refuses it; nothing else is raised."""
    file = data.draw(st.sampled_from(sorted((DATA / "models").glob("*.json"))))
    config = json.loads(file.read_text())
    inner = config.get("text_config", config)
    extra = (
        "num_kv_shared_layers",
        "sliding_window_pattern",
        "layer_types",
        "rope_scaling",
        "rope_parameters",
        "index_topk_pattern",
    )
    field = data.draw(st.sampled_from(sorted({*inner, *extra})))
    inner[field] = data.draw(st.sampled_from(ODD_VALUES))
    try:
        layout = kv_cache_layout(parse_model_config(config), EngineConfig(pipeline_parallel_size=2))
    except UnsupportedModelError:
        return
    assert layout.reserved_blocks(1000) > 0
    assert num_gpu_blocks_for(layout, 10**10) >= 0
