"""The share of one rank: KV heads, ranks that split a context, bytes of a latent and of a state."""

from __future__ import annotations

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec import cache_dtype as dtypes
from kvcache_exporter.kv_cache_spec.engine_config import EngineConfig
from kvcache_exporter.kv_cache_spec.mamba import StateDtypes, state_bytes
from kvcache_exporter.model_config import ModelConfig
from kvcache_exporter.model_config.layers import AttentionLayer, CacheLayer, MLALayer

# DeepSeek's own packed format for sparse attention: 512 fp8 elements, 4 fp32 scales, 64 bf16 rotary elements.
_FP8_DS_MLA_BYTES = 656


def served_dtype(engine: EngineConfig) -> str:
    """The dtype that the engine computes in: vLLM serves a float32 checkpoint, and one that names no dtype, in 16 bits."""
    return "bfloat16" if engine.dtype == "auto" else engine.dtype


def heads_of_rank(kv_heads: int, engine: EngineConfig) -> int:
    """KV heads on one rank: divided over the ranks, or replicated when there are more ranks than heads, never a fraction.

    Raises UnsupportedModelError where neither comes out even.
    """
    ranks = engine.tensor_parallel_size
    if kv_heads % ranks and ranks % kv_heads:
        raise UnsupportedModelError(
            f"vLLM refuses tensor_parallel_size {ranks}, "
            f"since the {kv_heads} KV heads can be neither divided nor replicated evenly",
            field="tensor_parallel_size",
            value=ranks,
        )
    return max(1, kv_heads // ranks)


def context_shards(layer: AttentionLayer, model: ModelConfig, engine: EngineConfig) -> int:
    """Ranks over which decode-context parallelism spreads the tokens of an attention layer.

    Raises UnsupportedModelError where vLLM refuses to: it uses ranks that would only hold copies of the same heads.
    """
    shards, ranks = engine.decode_context_parallel_size, engine.tensor_parallel_size
    if shards == 1:
        return 1
    queries_per_kv_head = model.num_attention_heads // layer.num_kv_heads
    if ranks <= layer.num_kv_heads or shards > ranks // layer.num_kv_heads or queries_per_kv_head % shards:
        raise _refused_shards(shards, f"with {layer.num_kv_heads} KV heads on {ranks} ranks")
    return shards


def latent_shards(engine: EngineConfig) -> int:
    """Ranks over which decode-context parallelism spreads the tokens of a latent, which every rank holds in full otherwise.

    Raises UnsupportedModelError for more shards than ranks.
    """
    shards, ranks = engine.decode_context_parallel_size, engine.tensor_parallel_size
    if shards > ranks:
        raise _refused_shards(shards, f"on {ranks} ranks")
    return shards


def latent_bytes(layer: MLALayer, cache_dtype: str) -> int:
    """Bytes of one token's latent and rotary part. Raises UnsupportedModelError for a dtype without a latent format."""
    if cache_dtype == "fp8_ds_mla":
        return _FP8_DS_MLA_BYTES
    size = dtypes.element_bytes(cache_dtype)
    if size is None:
        raise UnsupportedModelError(
            f"kv_cache_dtype {cache_dtype} is not a format of latent attention",
            field="kv_cache_dtype",
            value=cache_dtype,
        )
    return (layer.kv_lora_rank + layer.qk_rope_head_dim) * size


def state_bytes_of_rank(layer: CacheLayer, model: ModelConfig, engine: EngineConfig) -> int:
    """Bytes of one state of a mamba, linear-attention or short-convolution layer.

    Raises UnsupportedModelError for a dtype that is not known.
    """
    convolution = engine.mamba_cache_dtype if engine.mamba_cache_dtype != "auto" else served_dtype(engine)
    recurrent = engine.mamba_ssm_cache_dtype
    if recurrent == "auto":
        recurrent = model.ssm_dtype or "auto"
    return state_bytes(
        layer,
        engine.tensor_parallel_size,
        engine.num_speculative_tokens,
        StateDtypes(_element_bytes(convolution), None if recurrent == "auto" else _element_bytes(recurrent)),
    )


def _refused_shards(shards: int, where: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"vLLM refuses decode_context_parallel_size {shards} {where}",
        field="decode_context_parallel_size",
        value=shards,
    )


def _element_bytes(name: str) -> int:
    size = dtypes.element_bytes(name)
    if size is None:
        raise dtypes.unknown_cache_dtype(name)
    return size
