"""ModelConfig and flags -> bytes a block and blocks a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_exporter.capacity import kv_cache_size_tokens, num_gpu_blocks_for
from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec import EngineConfig, KVCacheLayout, kv_cache_layout
from kvcache_exporter.model_config import ModelConfig, parse_model_config
from lab import LLAMA_8B

GIB = 1024**3


def llama(**fields: object) -> ModelConfig:
    return parse_model_config({**LLAMA_8B, **fields})


def layout(model: ModelConfig | None = None, **flags: object) -> KVCacheLayout:
    return kv_cache_layout(model or llama(), EngineConfig(**{"block_size": 16, **flags}))  # type: ignore[arg-type]  # by name


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
    ],
)
def test_cache_dtype(kv_cache_dtype: str, dtype: str, bytes_per_token: int) -> None:
    assert layout(kv_cache_dtype=kv_cache_dtype, dtype=dtype).bytes_per_token == bytes_per_token


@pytest.mark.parametrize("fields", [{"torch_dtype": "float32"}, {"torch_dtype": None}])
def test_checkpoint_without_a_16_bit_dtype_is_served_in_16_bits(fields: dict[str, str | None]) -> None:
    assert layout(llama(**fields)).bytes_per_token == 131_072


def test_auto_takes_the_format_that_the_checkpoint_asks_for() -> None:
    model = llama(quantization_config={"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    assert layout(model).bytes_per_token == 65_536
    assert layout(model, kv_cache_dtype="bfloat16").bytes_per_token == 131_072


def test_model_that_ignores_the_flag_keeps_its_dtype() -> None:
    falcon = llama(architectures=["FalconForCausalLM"])
    assert layout(falcon, kv_cache_dtype="fp8").bytes_per_token == layout(falcon).bytes_per_token


def test_unknown_cache_dtype_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM: kv_cache_dtype 'turboquant_4bit_nc' is not one of"):
        layout(kv_cache_dtype="turboquant_4bit_nc")


@pytest.mark.parametrize(("tp", "per_rank", "in_all"), [(1, 131_072, 131_072), (8, 16_384, 131_072), (16, 16_384, 262_144)])
def test_tensor_parallel_divides_heads_then_replicates_them(tp: int, per_rank: int, in_all: int) -> None:
    cache = layout(tensor_parallel_size=tp)
    assert (cache.bytes_per_block_per_rank // 16, cache.bytes_per_token) == (per_rank, in_all)


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(32, 8, 3), (40, 10, 8)])
def test_tensor_parallel_size_that_vllm_refuses(heads: int, kv_heads: int, tp: int) -> None:
    model = llama(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128)
    with pytest.raises(UnsupportedModelError, match=f"vLLM refuses tensor_parallel_size {tp}"):
        layout(model, tensor_parallel_size=tp)


def test_logged_tokens_depend_on_the_rounding_of_max_model_len() -> None:
    """61 blocks of 128: one request of 1000 tokens takes 8, so vLLM logs 7625 and not 61 * 128."""
    assert kv_cache_size_tokens(layout(block_size=128), 61, 1000) == 7625


models = st.builds(
    ModelConfig,
    architecture=st.just("LlamaForCausalLM"),
    num_hidden_layers=st.integers(1, 128),
    num_attention_heads=st.just(64),
    num_key_value_heads=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    head_dim=st.sampled_from([32, 64, 80, 96, 128, 192, 256]),
)
engines = st.builds(
    EngineConfig,
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    kv_cache_dtype=st.sampled_from(["auto", "fp8", "bfloat16"]),
    tensor_parallel_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
)


@given(models, engines, st.integers(1, 2_000_000), st.integers(0, 5000))
def test_longer_requests_never_take_fewer_blocks(model: ModelConfig, engine: EngineConfig, tokens: int, more: int) -> None:
    cache = kv_cache_layout(model, engine)
    assert 1 <= cache.blocks_for_request(tokens) <= cache.blocks_for_request(tokens + more)


@given(models, engines, st.integers(1, 2_000_000))
def test_blocks_hold_the_tokens_and_waste_less_than_one_block(model: ModelConfig, engine: EngineConfig, tokens: int) -> None:
    space = kv_cache_layout(model, engine).blocks_for_request(tokens) * engine.block_size
    assert tokens <= space < tokens + engine.block_size


@given(models, engines, st.integers(0, 200 * GIB))
def test_blocks_never_exceed_the_memory_given(model: ModelConfig, engine: EngineConfig, available: int) -> None:
    cache = kv_cache_layout(model, engine)
    used = num_gpu_blocks_for(cache, available) * cache.bytes_per_block_per_rank
    assert used <= available < used + cache.bytes_per_block_per_rank


@given(models, engines)
def test_more_ranks_never_make_a_rank_hold_more(model: ModelConfig, engine: EngineConfig) -> None:
    alone = kv_cache_layout(model, EngineConfig(engine.block_size, engine.kv_cache_dtype))
    ranked = kv_cache_layout(model, engine)
    assert ranked.bytes_per_block_per_rank <= alone.bytes_per_block_per_rank <= ranked.bytes_per_block


@given(models, engines)
def test_a_block_is_its_tokens(model: ModelConfig, engine: EngineConfig) -> None:
    cache = kv_cache_layout(model, engine)
    assert cache.tokens_per_block == engine.block_size
    assert cache.bytes_per_token * engine.block_size == cache.bytes_per_block
