"""ModelConfig and flags -> bytes a block and blocks a request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_exporter.capacity import kv_cache_size_tokens, max_concurrency, num_gpu_blocks_for
from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec import EngineConfig, KVCacheLayout, kv_cache_layout
from kvcache_exporter.kv_cache_spec.cache_dtype import head_bytes
from kvcache_exporter.kv_cache_spec.engine_config import parse_vllm_version
from kvcache_exporter.kv_cache_spec.pipeline import stage_of_layers
from kvcache_exporter.model_config import ModelConfig, parse_model_config
from kvcache_exporter.model_config.layers import (
    AttentionLayer,
    CacheLayer,
    CrossAttentionLayer,
    DecoderLayer,
    GatedDeltaNetLayer,
    KimiDeltaAttentionLayer,
    Mamba1Layer,
    Mamba2Layer,
    MLALayer,
    ShortConvLayer,
    SparseIndexerLayer,
)
from lab import DATA, LLAMA_8B

GIB = 1024**3
B200: Mapping[str, Any] = {"gpu_name": "NVIDIA B200", "gpu_memory_bytes": 180 * GIB}
L40S: Mapping[str, Any] = {"gpu_name": "NVIDIA L40S", "gpu_memory_bytes": 48 * GIB}
NEMOTRON = "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
SCOUT = "Llama-4-Scout-17B-16E-Instruct"
FULL: DecoderLayer = (AttentionLayer(8, 128, 128),)
SLIDING: DecoderLayer = (AttentionLayer(8, 128, 128, sliding_window=1024),)


def llama(**fields: object) -> ModelConfig:
    return parse_model_config({**LLAMA_8B, **fields})


def real(name: str, **fields: object) -> ModelConfig:
    """A real model, by the name of its file."""
    return parse_model_config({**json.loads((DATA / "models" / f"{name}.json").read_text()), **fields})


def model_of(*decoder_layers: DecoderLayer) -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", 64, decoder_layers)


def layout(model: ModelConfig | str | None = None, **flags: Any) -> KVCacheLayout:
    """The layout of a model (Llama-3.1-8B unless one is named) under these flags."""
    return kv_cache_layout(real(model) if isinstance(model, str) else model or llama(), EngineConfig(**flags))


def groups(cache: KVCacheLayout, stage: int = 0) -> list[tuple[str, int, int]]:
    """(kind, layers, tokens a block) of each group on a stage."""
    return [(group.spec.kind, len(group.on_stage(stage).layers), group.spec.block_size) for group in cache.groups]


def refusal(model: ModelConfig | str | None = None, **flags: Any) -> str:
    with pytest.raises(UnsupportedModelError) as refused:
        layout(model, **flags)
    return str(refused.value)


# Full attention


def test_llama_3_1_8b_takes_131072_bytes_a_token() -> None:
    assert layout().bytes_per_token == 131_072


@pytest.mark.parametrize(
    ("kv_heads", "length", "requests"),
    [(8, 8192, 57), (8, 4096, 115), (2, 8192, 230)],
)
def test_requests_on_an_h100(kv_heads: int, length: int, requests: int) -> None:
    """80 GiB at utilization 0.92, less 16 GiB of weights and the rest, in requests of one length; no use of the null block."""
    cache = layout(llama(num_key_value_heads=kv_heads))
    usable_blocks = num_gpu_blocks_for(cache, int(80 * GIB * 0.92) - 16 * GIB) - 1
    assert usable_blocks // cache.blocks_for_request(length) == requests


def test_logged_tokens_depend_on_the_rounding_of_max_model_len() -> None:
    """61 blocks of 128: one request of 1000 tokens takes 8, so vLLM logs 7625 and not 61 * 128."""
    assert kv_cache_size_tokens(layout(block_size=128), 61, 1000) == 7625


def test_layers_with_heads_of_different_number_share_one_group() -> None:
    """KV heads 4 and 2, and a layer without attention: 6 heads of 128 in all."""
    cache = layout(model_of((AttentionLayer(4, 128, 128),), (), (AttentionLayer(2, 128, 128),)))
    assert (cache.bytes_per_token, len(cache.groups), cache.tokens_per_block) == (3072, 1, 16)


# dtypes


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "bytes_per_token"),
    [
        ("auto", "auto", 131_072),
        ("bfloat16", "auto", 131_072),
        ("bf16", "auto", 131_072),
        ("fp16", "auto", 131_072),
        ("fp32", "auto", 262_144),
        ("fp8", "auto", 65_536),
        ("fp8_e5m2", "float32", 65_536),
        ("auto", "float32", 262_144),
        ("auto", "half", 131_072),
        ("int8_per_token_head", "auto", 67_584),
        ("int4_per_token_head", "auto", 34_816),
        ("nvfp4", "auto", 36_864),
    ],
)
def test_cache_dtype(kv_cache_dtype: str, dtype: str, bytes_per_token: int) -> None:
    assert layout(kv_cache_dtype=kv_cache_dtype, dtype=dtype).bytes_per_token == bytes_per_token


@pytest.mark.parametrize(
    ("cache_dtype", "expected"),
    [
        ("bfloat16", 512),
        ("fp8", 256),
        ("fp8_e4m3", 256),
        ("int8_per_token_head", 264),
        ("fp8_per_token_head", 264),
        ("int4_per_token_head", 136),
        ("nvfp4", 144),
        ("nvfp4_4over6", 144),
        ("turboquant_k8v4", 196),
        ("turboquant_4bit_nc", 134),
        ("turboquant_k3v4_nc", 118),
        ("turboquant_3bit_nc", 102),
        ("ultraquant_4bit", 136),
    ],
)
def test_bytes_of_one_token_in_one_head_of_128(cache_dtype: str, expected: int) -> None:
    assert head_bytes(cache_dtype, 128, 128) == expected


@pytest.mark.parametrize("fields", [{"torch_dtype": "float32"}, {"torch_dtype": None}])
def test_checkpoint_without_a_16_bit_dtype_is_served_in_16_bits(fields: dict[str, str | None]) -> None:
    assert layout(llama(**fields)).bytes_per_token == 131_072


def test_auto_takes_the_format_that_the_checkpoint_asks_for() -> None:
    model = llama(quantization_config={"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    assert layout(model).bytes_per_token == 65_536
    assert layout(model).cache_dtype == "fp8"
    assert layout(model, kv_cache_dtype="bfloat16").bytes_per_token == 131_072


def test_model_that_ignores_the_flag_keeps_its_dtype() -> None:
    falcon = llama(architectures=["FalconForCausalLM"])
    assert layout(falcon, kv_cache_dtype="fp8").bytes_per_token == layout(falcon).bytes_per_token


def test_unknown_cache_dtype_is_refused() -> None:
    assert "LlamaForCausalLM: kv_cache_dtype 'fp6' is not one of bfloat16, bf16, " in refusal(kv_cache_dtype="fp6")


def test_turboquant_is_refused_unless_the_layers_that_it_skips_are_named() -> None:
    assert refusal(kv_cache_dtype="turboquant_4bit_nc") == (
        "LlamaForCausalLM: with turboquant_4bit_nc vLLM leaves outer layers unquantized by a rule of its own; "
        "name them with kv_cache_dtype_skip_layers"
    )
    outer = ("0", "1", "30", "31")
    cache = layout(kv_cache_dtype="turboquant_4bit_nc", kv_cache_dtype_skip_layers=outer)
    assert cache.bytes_per_token == (28 * 134 + 4 * 512) * 8


# Tensor parallelism


@pytest.mark.parametrize(("tp", "per_rank", "in_all"), [(1, 131_072, 131_072), (8, 16_384, 131_072), (16, 16_384, 262_144)])
def test_tensor_parallel_divides_heads_then_replicates_them(tp: int, per_rank: int, in_all: int) -> None:
    cache = layout(tensor_parallel_size=tp)
    assert cache.bytes_per_block_per_rank == (per_rank * 16,)
    assert (cache.marginal_bytes_per_token_per_rank, cache.bytes_per_token) == ((per_rank,), in_all)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "why"),
    [
        (32, 8, 3, "it does not divide the 32 attention heads"),
        (40, 10, 8, "the 10 KV heads can be neither divided nor replicated evenly"),
    ],
)
def test_tensor_parallel_size_that_vllm_refuses(heads: int, kv_heads: int, tp: int, why: str) -> None:
    model = llama(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128)
    assert refusal(model, tensor_parallel_size=tp) == f"LlamaForCausalLM: vLLM refuses tensor_parallel_size {tp}, since {why}"


def test_state_that_cannot_be_divided_is_refused() -> None:
    model = model_of(FULL, (Mamba1Layer(d_inner=100, d_state=16, d_conv=4),))
    assert "a state of width 100 cannot be divided evenly" in refusal(model, tensor_parallel_size=8)


# Sliding window


@pytest.mark.parametrize(
    ("flags", "reserved"),
    [
        # 127 tokens of the window and two batches of 8192.
        ({}, 1033),
        ({"async_scheduling": False}, 521),
        ({"max_num_batched_tokens": 2048}, 265),
        ({"max_num_batched_tokens": 2048, "async_scheduling": False}, 137),
        # Batches of 16384 and of 2048 by default.
        (B200, 2057),
        (L40S, 265),
        ({"pipeline_parallel_size": 2}, 1545),
        ({"block_size": 64}, 259),
        ({"vllm_version": (0, 20)}, 521),
        ({"vllm_version": (0, 29)}, 1033),
    ],
)
def test_reserve_of_a_sliding_window_counts_the_tokens_in_flight(flags: Mapping[str, Any], reserved: int) -> None:
    cache = layout("gpt-oss-20b", **flags)
    assert [group.reserved_blocks(cache.reserve(131_072)) for group in cache.groups if not group.spec.grows] == [reserved]
    assert cache.fixed_blocks_per_request == reserved


def test_running_request_holds_the_window_and_one_block() -> None:
    """128 tokens are 8 blocks, 9 where the window starts inside a block; the full group goes on to grow."""
    cache = layout("gpt-oss-20b")
    sliding, full = cache.groups
    assert [sliding.blocks_for_request(tokens) for tokens in (1, 128, 129, 131_072)] == [1, 8, 9, 9]
    assert [full.blocks_for_request(tokens) for tokens in (1, 128, 129, 131_072)] == [1, 8, 9, 8192]
    assert (cache.blocks_for_request(131_072), cache.reserved_blocks(131_072)) == (8201, 9225)
    assert (cache.fixed_blocks_of_live_request, cache.fixed_blocks_per_request) == (9, 1033)


def test_token_beyond_the_window_costs_the_full_layers_only() -> None:
    cache = layout("gpt-oss-20b")
    assert (cache.bytes_per_token, cache.bytes_per_block, cache.tokens_per_block) == (24_576, 393_216, None)


def test_model_that_slides_everywhere_is_bounded() -> None:
    cache = layout(model_of(*[SLIDING] * 4), max_num_batched_tokens=2048)
    assert groups(cache) == [("sliding_window", 4, 16)]
    assert cache.reserved_blocks(1_000_000) == -(-(1023 + 4096) // 16) + 1
    assert cache.blocks_for_request(1_000_000) == 65


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "blocks"),
    [("gpt-oss-20b", 49_152, 512), ("gemma-3-27b-text", 507_904, 512), (SCOUT, 196_608, 512)],
)
def test_without_the_hybrid_manager_all_layers_keep_every_token(name: str, bytes_per_token: int, blocks: int) -> None:
    cache = layout(name, disable_hybrid_kv_cache_manager=True)
    assert (len(cache.groups), cache.bytes_per_token) == (1, bytes_per_token)
    assert cache.reserved_blocks(8192) == cache.blocks_for_request(8192) == blocks


def test_heads_of_two_sizes_get_blocks_of_two_sizes() -> None:
    """Full layers have half the KV heads, so a block of theirs holds twice the tokens; from 8 ranks on all have one."""
    assert groups(layout("MiMo-V2-Flash"))[:2] == [("full_attention", 9, 32), ("sliding_window", 8, 16)]
    assert groups(layout("MiMo-V2-Flash", tensor_parallel_size=8))[:2] == [("full_attention", 9, 16), ("sliding_window", 8, 16)]
    assert layout("MiMo-V2-Flash").bytes_per_token == 23_040


def test_smaller_page_that_does_not_divide_is_padded() -> None:
    """Two heads beside three: both pages are 3 * 16 * 512 bytes."""
    model = model_of((AttentionLayer(3, 128, 128),), (AttentionLayer(2, 128, 128, sliding_window=1024),))
    cache = layout(model)
    assert [group.page_bytes for group in cache.groups] == [24_576, 24_576]


# Chunks


def test_chunked_attention_keeps_one_chunk() -> None:
    """8192 tokens of the chunk and 16384 in flight at start-up; at most 8192 while running."""
    cache = layout(SCOUT)
    assert groups(cache) == [*[("chunked_local_attention", 12, 16)] * 3, ("full_attention", 12, 16)]
    assert [group.reserved_blocks(cache.reserve(131_072)) for group in cache.groups] == [1536, 1536, 1536, 8192]
    assert [group.blocks_for_request(131_072) for group in cache.groups] == [512, 512, 512, 8192]
    assert (cache.reserved_blocks(8192), cache.blocks_for_request(8192)) == (2048, 2048)


# Latents


@pytest.mark.parametrize("tp", [1, 2, 8, 16])
def test_latent_is_whole_on_every_rank(tp: int) -> None:
    cache = layout("DeepSeek-V3", tensor_parallel_size=tp)
    assert cache.marginal_bytes_per_token_per_rank == (70_272,)
    assert cache.bytes_per_token == 70_272 * tp


@pytest.mark.parametrize(
    ("flags", "block_size", "bytes_per_token"),
    [
        ({}, 16, 70_272),
        ({"kv_cache_dtype": "fp8"}, 64, 35_136),
        (B200, 32, 70_272),
        ({"kv_cache_dtype": "fp8", **B200}, 32, 35_136),
        ({"block_size": 128}, 128, 70_272),
    ],
)
def test_block_size_of_latents_depends_on_the_gpu(flags: Mapping[str, Any], block_size: int, bytes_per_token: int) -> None:
    cache = layout("DeepSeek-V3", **flags)
    assert (cache.block_size, cache.bytes_per_token) == (block_size, bytes_per_token)


@pytest.mark.parametrize(
    ("flags", "bytes_per_layer"),
    [
        ({}, 1152 + 132),
        ({"kv_cache_dtype": "fp8"}, 656 + 132),
        ({"kv_cache_dtype": "fp8_ds_mla"}, 656 + 132),
        ({"kv_cache_dtype": "fp8", **B200}, 576 + 132),
        (B200, 1152 + 132),
    ],
)
def test_sparse_index_adds_132_bytes_a_token_and_layer(flags: Mapping[str, Any], bytes_per_layer: int) -> None:
    cache = layout("DeepSeek-V3.2", **flags)
    assert (cache.block_size, len(cache.groups), cache.bytes_per_token) == (64, 1, 61 * bytes_per_layer)


def test_glm_with_sparse_latents_is_fp8_by_default_on_blackwell() -> None:
    glm = real("DeepSeek-V3.2", architectures=["GlmMoeDsaForCausalLM"])
    assert layout(glm, **B200).bytes_per_token == 61 * (576 + 132)
    assert layout(glm).bytes_per_token == 61 * (1152 + 132)


def test_packed_format_for_sparse_latents_is_refused_elsewhere() -> None:
    assert refusal("DeepSeek-V3", kv_cache_dtype="fp8_ds_mla") == (
        "DeepseekV3ForCausalLM: kv_cache_dtype fp8_ds_mla is for sparse latent attention only"
    )


def test_compressed_latents_are_packed_side_by_side() -> None:
    """A block of the pool is as large as the largest group, that of the latents; each page is whole rows of 576 bytes."""
    cache = layout("DeepSeek-V4-Flash")
    assert groups(cache) == [
        ("sliding_window_mla", 22, 64),
        ("sliding_window_mla", 21, 64),
        ("mla_attention", 62, 256),
        ("sliding_window_mla", 42, 4),
        ("sliding_window_mla", 20, 8),
    ]
    assert [group.page_bytes for group in cache.groups] == [823_680, 786_240, 1_002_240, 870_912, 656_640]
    assert (cache.bytes_per_block, cache.bytes_per_token) == (1_002_240, 3915)
    assert [cache.reserved_blocks(tokens) for tokens in (1, 1024, 131_072)] == [9, 424, 7194]


def test_format_of_compressed_latents_is_fixed() -> None:
    assert layout("DeepSeek-V4-Flash", kv_cache_dtype="fp8").cache_dtype == "fp8_ds_mla"
    assert refusal("DeepSeek-V4-Flash", kv_cache_dtype="bfloat16") == (
        "DeepseekV4ForCausalLM: its cache format is fixed, and kv_cache_dtype bfloat16 is another"
    )


# States


@pytest.mark.parametrize(
    ("name", "flags", "block_size"),
    [
        ("Qwen3-Next-80B-A3B", {}, 544),
        ("Qwen3-Next-80B-A3B", {"tensor_parallel_size": 2}, 544),
        ("Qwen3-Next-80B-A3B", {"tensor_parallel_size": 4}, 272),
        ("Qwen3-Next-80B-A3B", {"tensor_parallel_size": 16}, 80),
        ("Qwen3-Next-80B-A3B", {"block_size": 64}, 576),
        ("Qwen3-Next-80B-A3B", {"kv_cache_dtype": "fp8"}, 1072),
        ("Qwen3-Next-80B-A3B", {"mamba_ssm_cache_dtype": "float32"}, 1056),
        (NEMOTRON, {}, 2096),
        (NEMOTRON, {"tensor_parallel_size": 8}, 528),
        (NEMOTRON, {"mamba_ssm_cache_dtype": "bfloat16"}, 1072),
        ("Jamba-1.5-Mini", {}, 80),
        ("Jamba-1.5-Mini", {"mamba_ssm_cache_dtype": "float32"}, 144),
        # Latents are aligned to 128 tokens.
        ("Kimi-Linear-48B", {}, 1920),
        ("LFM2-1.2B", {}, 16),
    ],
)
def test_block_size_is_raised_until_attention_is_no_smaller_than_a_state(
    name: str, flags: Mapping[str, Any], block_size: int
) -> None:
    cache = layout(name, **flags)
    assert cache.block_size == block_size
    assert len({layer.spec.page_size_bytes for group in cache.groups for layer in group.layers}) == 1


def test_block_size_that_vllm_has_aligned_already_stays() -> None:
    """What the engine reports is the size after alignment."""
    assert layout("Qwen3-Next-80B-A3B", block_size=544) == replace(
        layout("Qwen3-Next-80B-A3B"), engine=EngineConfig(block_size=544)
    )


@pytest.mark.parametrize(
    ("layer", "tp", "draft_tokens", "expected"),
    [
        (Mamba1Layer(8192, 16, 4), 1, 0, (3 + 16) * 8192 * 2),
        (Mamba1Layer(8192, 16, 4), 8, 0, (3 + 16) * 1024 * 2),
        # 8 groups on 16 ranks become 16.
        (Mamba2Layer(4096, 64, 64, 128, 8, 4), 16, 0, 3 * (4096 + 2 * 16 * 128) // 16 * 2 + 4 * 64 * 128 * 2),
        (Mamba2Layer(4096, 64, 64, 128, 8, 4), 1, 2, 5 * (4096 + 2 * 8 * 128) * 2 + 64 * 64 * 128 * 2),
        (GatedDeltaNetLayer(16, 32, 128, 128, 4), 2, 0, 3 * 8192 // 2 * 2 + 16 * 128 * 128 * 2),
        # The recurrent part is float32 by default.
        (KimiDeltaAttentionLayer(32, 128, 4), 1, 0, 3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4),
        (ShortConvLayer(2048, 3), 4, 0, 2 * 512 * 2),
    ],
)
def test_bytes_of_a_state(layer: CacheLayer, tp: int, draft_tokens: int, expected: int) -> None:
    cache = layout(model_of(FULL, (layer,)), tensor_parallel_size=tp, num_speculative_tokens=draft_tokens)
    (state,) = (group.spec for group in cache.groups if group.spec.kind == "mamba")
    assert state.unpadded_page_size_bytes == expected


@pytest.mark.parametrize(
    ("name", "flags", "states"),
    [
        # One in use, one at the last block boundary, and for Mamba-2 one for prefill.
        (NEMOTRON, {}, 3),
        (NEMOTRON, {"vllm_version": (0, 20)}, 2),
        (NEMOTRON, {"enable_prefix_caching": False}, 1),
        ("Qwen3-Next-80B-A3B", {}, 2),
        ("Qwen3-Next-80B-A3B", {"enable_prefix_caching": False}, 1),
        ("Qwen3-Next-80B-A3B", {"num_speculative_tokens": 2}, 4),
        ("Jamba-1.5-Mini", {}, 2),
    ],
)
def test_states_that_a_request_holds(name: str, flags: Mapping[str, Any], states: int) -> None:
    """The same number at start-up and while running, however long the request is."""
    cache = layout(name, **flags)
    mamba = [group for group in cache.groups if group.spec.kind == "mamba"]
    for tokens in (1, 100_000):
        assert {group.blocks_for_request(tokens) for group in mamba} == {states}
        assert {group.reserved_blocks(cache.reserve(tokens)) for group in mamba} == {states}
    assert cache.fixed_blocks_per_request == cache.fixed_blocks_of_live_request == states * len(mamba)


def test_state_without_prefix_caching_stands_for_the_whole_length() -> None:
    cache = layout(NEMOTRON, enable_prefix_caching=False, max_model_len=8192)
    assert [block_size for _, _, block_size in groups(cache)] == [8192] * 4 + [2096]
    assert cache.reserved_blocks(8192) == 8


def test_growing_part_of_a_hybrid_is_its_attention() -> None:
    cache = layout("Qwen3-Next-80B-A3B")
    assert (cache.bytes_per_token, cache.bytes_per_block, cache.reserved_blocks(262_144)) == (24_576, 13_369_344, 488)


# Groups


@pytest.mark.parametrize(
    ("full", "sliding", "expected"),
    [
        # Fewer than 1.5 times as many: one group each, of the larger size.
        (4, 5, [4, 5]),
        (2, 3, [2, 2, 1]),
        (1, 5, [1, 1, 1, 1, 1, 1]),
        (10, 52, [10, 9, 9, 9, 9, 8, 8]),
    ],
)
def test_groups_are_of_the_size_of_the_rarest_kind_or_a_little_more(full: int, sliding: int, expected: list[int]) -> None:
    cache = layout(model_of(*[FULL] * full, *[SLIDING] * sliding))
    assert [layers for _, layers, _ in groups(cache)] == expected
    assert cache.bytes_per_block == max(expected) * 16 * 8 * 512


def test_short_group_costs_as_much_as_the_others() -> None:
    """Ten states beside six attention layers: two groups of five, each block as large as six layers."""
    cache = layout("LFM2-1.2B")
    assert groups(cache) == [("mamba", 5, 16), ("mamba", 5, 16), ("full_attention", 6, 16)]
    assert cache.bytes_per_block == 6 * 32_768


def test_vllm_0_11_takes_the_smallest_number_always() -> None:
    cache = layout(model_of(*[FULL] * 4, *[SLIDING] * 5), vllm_version=(0, 11))
    assert [layers for _, layers, _ in groups(cache)] == [4, 3, 2]


def test_layers_of_a_group_are_spread_over_the_stages() -> None:
    cache = layout("gemma-3-27b-text", pipeline_parallel_size=2)
    assert [layers for _, layers, _ in groups(cache, 0)] == [5, 5, 4, 4, 4, 4, 5]
    assert [layers for _, layers, _ in groups(cache, 1)] == [4, 4, 5, 5, 4, 4, 5]
    assert cache.bytes_per_block_per_rank == (655_360, 655_360)


def test_stage_with_a_shorter_part_of_the_longest_group_has_smaller_blocks() -> None:
    assert layout("MiMo-V2-Flash", pipeline_parallel_size=2).bytes_per_block_per_rank == (409_600, 327_680)


# Cross-attention


def test_cross_attention_is_reserved_for_a_whole_batch_and_holds_the_encoders_output() -> None:
    cache = layout("whisper-large-v3")
    assert groups(cache) == [("full_attention", 32, 16), ("cross_attention", 32, 16)]
    assert [group.reserved_blocks(cache.reserve(448)) for group in cache.groups] == [28, 512]
    assert [group.blocks_for_request(448) for group in cache.groups] == [28, 94]
    assert (cache.bytes_per_token, cache.fixed_blocks_per_request) == (163_840, 512)


# Pipeline and context parallelism


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(32, 1, [32]), (32, 4, [8, 8, 8, 8]), (61, 2, [31, 30]), (61, 4, [15, 15, 16, 15]), (30, 4, [7, 8, 8, 7])],
)
def test_layers_that_do_not_divide_go_before_the_last_stage(layers: int, stages: int, expected: list[int]) -> None:
    placed = stage_of_layers(layers, stages)
    assert [placed.count(stage) for stage in range(stages)] == expected
    assert list(placed) == sorted(placed)


def test_tightest_stage_decides_the_number_of_blocks() -> None:
    cache = layout("DeepSeek-V3", pipeline_parallel_size=2)
    assert cache.bytes_per_block_per_rank == (571_392, 552_960)
    assert cache.marginal_bytes_per_token_per_rank == (35_712, 34_560)
    assert (cache.bytes_per_token, cache.bytes_per_block) == (70_272, 1_124_352)
    assert num_gpu_blocks_for(cache, 10 * GIB) == 10 * GIB // 571_392


def test_decode_context_parallel_spreads_the_tokens() -> None:
    cache = layout(tensor_parallel_size=16, decode_context_parallel_size=2)
    assert (cache.marginal_bytes_per_token_per_rank, cache.tokens_per_block) == ((8192,), 32)
    assert cache.reserved_blocks(8192) == cache.blocks_for_request(8192) == 256
    latents = layout("DeepSeek-V3", tensor_parallel_size=8, decode_context_parallel_size=8)
    assert (latents.marginal_bytes_per_token_per_rank, latents.bytes_per_token) == ((8784,), 70_272)
    assert [latents.reserved_blocks(tokens) for tokens in (1, 1024, 8192)] == [1, 8, 64]


@pytest.mark.parametrize(("tp", "dcp"), [(8, 2), (16, 4), (32, 3)])
def test_decode_context_parallel_size_that_vllm_refuses(tp: int, dcp: int) -> None:
    assert refusal(tensor_parallel_size=tp, decode_context_parallel_size=dcp) == (
        f"LlamaForCausalLM: vLLM refuses decode_context_parallel_size {dcp} with 8 KV heads on {tp} ranks"
    )


# Drafts


@pytest.mark.parametrize(
    ("name", "without", "with_drafts"),
    [
        ("DeepSeek-V3", 70_272, 71_424),
        ("DeepSeek-V3.2", 78_324, 79_608),
        # Thirteen attention layers in a group now, and every block is as large as they are.
        ("Qwen3-Next-80B-A3B", 24_576, 26_624),
    ],
)
def test_draft_layers_count_when_speculation_uses_them(name: str, without: float, with_drafts: float) -> None:
    assert layout(name).bytes_per_token == without
    assert layout(name, num_speculative_tokens=2, num_draft_layers=1).bytes_per_token == with_drafts


def test_drafts_of_a_hybrid_raise_its_states_and_its_block() -> None:
    """Each state has a longer convolution, so the block that has to hold it grows from 544 to 560 tokens."""
    cache = layout("Qwen3-Next-80B-A3B", num_speculative_tokens=2, num_draft_layers=1)
    assert groups(cache) == [*[("mamba", 12, 560)] * 3, ("full_attention", 13, 560)]
    assert (cache.bytes_per_block, cache.fixed_blocks_per_request) == (14_909_440, 12)


def test_draft_layer_is_on_the_last_stage() -> None:
    cache = layout("DeepSeek-V3", num_speculative_tokens=1, num_draft_layers=1, pipeline_parallel_size=2)
    assert cache.bytes_per_block_per_rank == (571_392, 571_392)


def test_drafts_of_a_model_without_such_layers_are_refused() -> None:
    assert refusal(num_speculative_tokens=1, num_draft_layers=1) == (
        "LlamaForCausalLM: the layers that its drafts would add are not known"
    )


def test_draft_model_adds_all_its_layers_on_the_last_stage() -> None:
    """One layer of 8 heads of 128 adds 65,536 bytes to a block."""
    alone = layout("DeepSeek-V3", pipeline_parallel_size=2)
    cache = kv_cache_layout(real("DeepSeek-V3"), EngineConfig(num_speculative_tokens=3, pipeline_parallel_size=2), model_of(FULL))
    first, last = alone.bytes_per_block_per_rank
    assert cache.bytes_per_block_per_rank == (first, last + 65_536)


# Layers left unquantized


def test_skipped_sliding_layers_halve_the_tokens_of_their_blocks() -> None:
    cache = layout("gpt-oss-20b", kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("sliding_window",))
    assert groups(cache) == [("sliding_window", 12, 16), ("full_attention", 12, 32)]
    assert (cache.block_size, cache.bytes_per_token, cache.reserved_blocks(8192)) == (32, 12_288, 769)


def test_skipped_full_layers_stay_in_the_group() -> None:
    cache = layout(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("0", "31"))
    assert (cache.block_size, cache.bytes_per_block, cache.bytes_per_token) == (32, 2_228_224, 69_632)


# Versions


@pytest.mark.parametrize(
    ("version", "tokens"),
    [
        # Blocks over the two groups, times 16.
        ((0, 11), 80_000),
        ((0, 20), 80_000),
        # 10,001 blocks over 8192 + 1033, times 131,072.
        ((0, 29), 142_097),
        ((0, 32), 142_097),
    ],
)
def test_logged_tokens_by_version(version: tuple[int, int], tokens: int) -> None:
    assert kv_cache_size_tokens(layout("gpt-oss-20b", vllm_version=version), 10_001, 131_072) == tokens


def test_logged_tokens_of_older_versions_count_the_context_ranks() -> None:
    cache = layout(tensor_parallel_size=16, decode_context_parallel_size=2, vllm_version=(0, 20))
    assert kv_cache_size_tokens(cache, 1000, 131_072) == 32_000


def test_values_of_their_own_size_since_0_20() -> None:
    model = model_of(*[(AttentionLayer(4, 192, 128),)] * 2)
    assert layout(model, vllm_version=(0, 20)).bytes_per_token == 2 * 4 * (192 + 128) * 2
    assert layout(model, vllm_version=(0, 11)).bytes_per_token == 2 * 4 * (192 + 192) * 2


@pytest.mark.parametrize(
    ("version", "kv_heads", "refused"),
    [
        (
            (0, 11),
            4,
            "LlamaForCausalLM: a page of 32768 bytes (sliding_window) cannot share a pool with pages of 65536 bytes in vLLM 0.11",
        ),
        ((0, 20), 4, None),
        (
            (0, 20),
            3,
            "LlamaForCausalLM: a page of 24576 bytes (sliding_window) cannot share a pool with pages of 65536 bytes in vLLM 0.20",
        ),
        ((0, 29), 3, None),
    ],
)
def test_unequal_pages_by_version(version: tuple[int, int], kv_heads: int, refused: str | None) -> None:
    """Larger blocks where one page is a multiple of the other since 0.20, padding since 0.29."""
    model = model_of(FULL, (AttentionLayer(kv_heads, 128, 128, sliding_window=1024),))
    if refused is None:
        assert len(layout(model, vllm_version=version).groups) == 2
    else:
        assert refusal(model, vllm_version=version) == refused


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0", (0, 32)),
        ("v0.29.1+cu128", (0, 29)),
        ("0.20.0rc1", (0, 20)),
        ("1.0.0", (1, 0)),
        ("0.1.dev1+g1234567", None),
        ("main", None),
        (None, None),
    ],
)
def test_version_numbers(text: str | None, version: tuple[int, int] | None) -> None:
    assert parse_vllm_version(text) == version


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ({}, 8192),
        (B200, 16_384),
        (L40S, 2048),
        ({"gpu_name": "NVIDIA A100-SXM4-80GB"}, 2048),
        ({"max_num_batched_tokens": 4096}, 4096),
    ],
)
def test_default_batch_depends_on_the_gpu(flags: Mapping[str, Any], tokens: int) -> None:
    assert EngineConfig(**flags).batched_tokens == tokens


# Properties

kv_heads = st.sampled_from([1, 2, 4, 8, 16, 32, 64])
head_sizes = st.sampled_from([64, 128, 256])
full = st.builds(lambda heads, size: AttentionLayer(heads, size, size), kv_heads, head_sizes)
sliding = st.builds(
    lambda heads, size, window: AttentionLayer(heads, size, size, sliding_window=window),
    kv_heads,
    head_sizes,
    st.integers(1, 40_000),
)
chunked = st.builds(
    lambda heads, size, chunk: AttentionLayer(heads, size, size, attention_chunk_size=chunk),
    kv_heads,
    head_sizes,
    st.integers(1, 40_000),
)
latent = st.builds(MLALayer, st.sampled_from([256, 512]), st.just(64))
states: st.SearchStrategy[CacheLayer] = st.one_of(
    st.builds(Mamba1Layer, st.sampled_from([2048, 8192]), st.sampled_from([16, 64]), st.just(4)),
    st.builds(
        Mamba2Layer,
        st.sampled_from([4096, 8192]),
        st.sampled_from([64, 128]),
        st.just(64),
        st.sampled_from([64, 128]),
        st.sampled_from([1, 8, 64]),
        st.just(4),
    ),
    st.builds(GatedDeltaNetLayer, st.just(64), st.sampled_from([64, 128]), st.just(128), st.just(128), st.just(4)),
    st.builds(KimiDeltaAttentionLayer, st.just(64), st.just(128), st.just(4)),
    st.builds(ShortConvLayer, st.sampled_from([2048, 4096]), st.just(3)),
)
kinds: st.SearchStrategy[tuple[DecoderLayer, ...]] = st.one_of(
    st.tuples(st.tuples(full)),
    st.tuples(st.tuples(full), st.tuples(sliding)),
    st.tuples(st.tuples(full), st.tuples(chunked)),
    st.tuples(st.tuples(full), st.just(())),
    st.tuples(st.tuples(latent)),
    st.tuples(st.tuples(latent, st.just(SparseIndexerLayer(128)))),
    st.tuples(st.tuples(full), st.tuples(states)),
    st.tuples(st.tuples(full, states)),
    st.tuples(st.tuples(latent), st.tuples(states)),
    st.builds(lambda layer: ((layer, CrossAttentionLayer(layer.num_kv_heads, layer.head_size)),), full),
)
models = st.builds(
    lambda layers, has_checkpoint: replace(model_of(*layers), has_prefill_checkpoint=has_checkpoint),
    # The first kind stands in front, so that every model keeps something.
    kinds.flatmap(lambda found: st.lists(st.sampled_from(found), max_size=30).map(lambda more: (found[0], *more))),
    st.booleans(),
)
engines = st.builds(
    EngineConfig,
    block_size=st.sampled_from([None, 16, 32, 64, 128]),
    kv_cache_dtype=st.sampled_from(["auto", "fp8", "bfloat16"]),
    tensor_parallel_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    max_num_batched_tokens=st.sampled_from([None, 512, 2048, 16_384]),
    enable_prefix_caching=st.booleans(),
    async_scheduling=st.booleans(),
    disable_hybrid_kv_cache_manager=st.booleans(),
    max_model_len=st.just(8192),
)


@given(models, engines, st.integers(1, 2_000_000), st.integers(0, 5000))
def test_longer_requests_never_take_fewer_blocks(model: ModelConfig, engine: EngineConfig, tokens: int, more: int) -> None:
    cache = kv_cache_layout(model, engine)
    assert 1 <= cache.blocks_for_request(tokens) <= cache.blocks_for_request(tokens + more)
    assert 1 <= cache.reserved_blocks(tokens) <= cache.reserved_blocks(tokens + more)


@given(models, engines, st.integers(1, 2_000_000))
def test_a_request_takes_the_sum_over_groups(model: ModelConfig, engine: EngineConfig, tokens: int) -> None:
    cache = kv_cache_layout(model, engine)
    reserve = cache.reserve(tokens)
    assert cache.blocks_for_request(tokens) == sum(group.blocks_for_request(tokens) for group in cache.groups)
    assert cache.reserved_blocks(tokens) == sum(group.reserved_blocks(reserve) for group in cache.groups)


@given(models, engines)
def test_every_layer_that_keeps_something_is_in_one_group(model: ModelConfig, engine: EngineConfig) -> None:
    kept = sum(len(layers) for layers in model.decoder_layers)
    assert sum(len(group.layers) for group in kv_cache_layout(model, engine).groups) == kept


@given(models, engines, st.integers(1, 2_000_000))
def test_growing_groups_hold_the_tokens_and_waste_less_than_one_block(
    model: ModelConfig, engine: EngineConfig, tokens: int
) -> None:
    for group in kv_cache_layout(model, engine).groups:
        if group.spec.grows:
            space = group.blocks_for_request(tokens) * group.spec.block_size
            assert tokens <= space < tokens + group.spec.block_size


@given(models, engines, st.integers(1, 2_000_000))
def test_a_window_or_chunk_never_holds_more_than_all_tokens(model: ModelConfig, engine: EngineConfig, tokens: int) -> None:
    for group in kv_cache_layout(model, engine).groups:
        if group.spec.kind in ("sliding_window", "chunked_local_attention"):
            assert group.blocks_for_request(tokens) <= -(-tokens // group.spec.block_size)


@given(models, engines, st.integers(0, 200 * GIB), st.sampled_from([1, 2]))
def test_blocks_never_exceed_the_memory_given(model: ModelConfig, engine: EngineConfig, available: int, stages: int) -> None:
    # The same model twice over, so that every stage has a layer that keeps something.
    doubled = replace(model, decoder_layers=model.decoder_layers * 2)
    cache = kv_cache_layout(doubled, replace(engine, pipeline_parallel_size=stages))
    blocks = num_gpu_blocks_for(cache, available)
    used = [blocks * size for size in cache.bytes_per_block_per_rank]
    assert max(used) <= available < max(used) + max(cache.bytes_per_block_per_rank)


@given(models, engines)
def test_more_ranks_never_make_a_rank_hold_more(model: ModelConfig, engine: EngineConfig) -> None:
    """And the ranks together never hold less than one would alone."""
    alone = kv_cache_layout(model, replace(engine, tensor_parallel_size=1))
    ranked = kv_cache_layout(model, engine)
    assert ranked.bytes_per_block_per_rank <= alone.bytes_per_block_per_rank
    assert ranked.marginal_bytes_per_token_per_rank <= alone.marginal_bytes_per_token_per_rank
    assert alone.bytes_per_token <= ranked.bytes_per_token


@given(models, engines, st.integers(1, 1_000_000), st.integers(1, 2_000_000))
def test_concurrency_is_blocks_over_the_reserve(model: ModelConfig, engine: EngineConfig, blocks: int, length: int) -> None:
    cache = kv_cache_layout(model, engine)
    assert max_concurrency(cache, blocks, length) == blocks / cache.reserved_blocks(length)


@given(models, engines)
def test_a_block_of_one_growing_group_is_its_tokens(model: ModelConfig, engine: EngineConfig) -> None:
    cache = kv_cache_layout(model, engine)
    if cache.tokens_per_block is not None:
        assert cache.tokens_per_block == cache.block_size
        assert cache.bytes_per_token * cache.block_size == cache.bytes_per_block
