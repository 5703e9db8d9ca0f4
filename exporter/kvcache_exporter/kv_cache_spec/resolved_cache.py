"""What the flags come to for one model: the cache dtype that `auto` stands for, and the block size after all alignment.

Sources: vLLM 0.32 `v1/attention/backends/` (sizes that a backend accepts), `model_executor/models/config.py` (hybrids).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec import cache_dtype as dtypes
from kvcache_exporter.kv_cache_spec.engine_config import EngineConfig
from kvcache_exporter.kv_cache_spec.rank import heads_of_rank, latent_bytes, served_dtype, state_bytes_of_rank
from kvcache_exporter.kv_cache_spec.spec import cdiv
from kvcache_exporter.model_config import ModelConfig
from kvcache_exporter.model_config.layers import (
    AttentionLayer,
    CacheLayer,
    CompressedLatentLayer,
    MLALayer,
    SparseIndexerLayer,
    StateLayer,
)

LayerT = TypeVar("LayerT")

# The smallest block that the attention kernels take, and vLLM's default.
KERNEL_BLOCK_SIZE = 16
# FlashAttention 3 has no larger heads than this; with fp8 on Hopper vLLM takes another kernel for them, with larger blocks.
_LARGEST_COMMON_HEAD = 256
# Hybrids with latents: their decode kernels want the number of kernel blocks aligned to this many tokens.
_LATENT_HYBRID_BLOCK_SIZE = 128
# The block of tokens of DeepSeek-V4 is fixed.
_PACKED_BLOCK_SIZE = 256


@dataclass(frozen=True)
class ResolvedCache:
    """What the flags come to for a model.

    `block_size` is in tokens after all alignment, `cache_dtype` is that of cached elements; `is_dtype_assumed` tells
    that neither flag nor file states one: vLLM then takes one of 16 bits. `state_page_bytes` is what each state is padded to,
    `shared_page_bytes` what each page is when some layers are left unquantized; None: pages are as large as they are.
    """

    block_size: int
    cache_dtype: str
    is_dtype_assumed: bool
    state_page_bytes: int | None = None
    shared_page_bytes: int | None = None


def resolve_cache(model: ModelConfig, engine: EngineConfig) -> ResolvedCache:
    """Settle what all layers share.

    Raises UnsupportedModelError for a dtype that is not known and for what vLLM refuses.
    """
    cache_dtype = _cache_dtype(model, engine)
    if dtypes.is_turboquant(cache_dtype) and not engine.kv_cache_dtype_skip_layers:
        raise UnsupportedModelError(
            f"with {cache_dtype} vLLM leaves outer layers unquantized by a rule of its own; "
            "name them with kv_cache_dtype_skip_layers",
            field="kv_cache_dtype",
            value=cache_dtype,
        )
    cache = ResolvedCache(
        block_size=_base_block_size(model, engine, cache_dtype),
        cache_dtype=cache_dtype,
        is_dtype_assumed=model.dtype is None and engine.dtype == "auto" and cache_dtype == served_dtype(engine),
    )
    return _aligned_to_skipped_layers(_aligned_to_states(cache, model, engine), model, engine)


def _cache_dtype(model: ModelConfig, engine: EngineConfig) -> str:
    """What `auto` stands for: the checkpoint's own cache format, else the dtype that the engine computes in."""
    is_sparse = _has(model, SparseIndexerLayer)
    name = engine.kv_cache_dtype if model.honours_kv_cache_dtype else "auto"
    if _has(model, CompressedLatentLayer):
        if name not in ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"):
            raise UnsupportedModelError(
                f"its cache format is fixed, and kv_cache_dtype {name} is another",
                field="kv_cache_dtype",
                value=name,
            )
        return "fp8_ds_mla"
    if name == "auto":
        fp8_by_default = is_sparse and engine.is_blackwell and model.architecture.startswith("Glm")
        name = model.kv_cache_dtype or ("fp8" if fp8_by_default else served_dtype(engine))
    if name == "fp8_ds_mla" and not is_sparse:
        raise UnsupportedModelError(
            "kv_cache_dtype fp8_ds_mla is for sparse latent attention only",
            field="kv_cache_dtype",
            value=name,
        )
    if is_sparse and name in ("fp8", "fp8_e4m3") and not engine.is_blackwell:
        return "fp8_ds_mla"
    return name


def _base_block_size(model: ModelConfig, engine: EngineConfig, cache_dtype: str) -> int:
    """The flag, else the smallest size that the attention backend of this GPU accepts."""
    if _has(model, CompressedLatentLayer):
        # The label of an engine shows the smallest block of its groups instead.
        return _PACKED_BLOCK_SIZE
    if engine.block_size is not None:
        return engine.block_size
    if _has(model, SparseIndexerLayer):
        return 64
    if _has(model, MLALayer):
        if engine.is_blackwell:
            return 32
        return 64 if dtypes.is_quantized(cache_dtype) else KERNEL_BLOCK_SIZE
    largest_head = max((layer.head_size for layer in _of(model, AttentionLayer)), default=0)
    if cache_dtype.startswith("fp8") and not engine.is_blackwell and largest_head > _LARGEST_COMMON_HEAD:
        return 64
    return KERNEL_BLOCK_SIZE


def _aligned_to_states(cache: ResolvedCache, model: ModelConfig, engine: EngineConfig) -> ResolvedCache:
    """Hybrids: raise the block size until a page of attention is no smaller than a state, and pad the state to that page."""
    states = [state_bytes_of_rank(layer, model, engine) for layer in _layers(model) if isinstance(layer, StateLayer)]
    token_bytes = _attention_token_bytes(cache, model, engine)
    if not states or token_bytes is None:
        return cache
    granularity = max(cache.block_size, _LATENT_HYBRID_BLOCK_SIZE if _has(model, MLALayer) else 0)
    block_size = max(cache.block_size, granularity * cdiv(max(states), granularity * token_bytes))
    return replace(cache, block_size=block_size, state_page_bytes=block_size * token_bytes)


def _aligned_to_skipped_layers(cache: ResolvedCache, model: ModelConfig, engine: EngineConfig) -> ResolvedCache:
    """Layers left at the model's dtype: raise the block size until a quantized page is no smaller than one of theirs."""
    layer = next(_of(model, AttentionLayer), None)
    if not engine.kv_cache_dtype_skip_layers or layer is None:
        return cache
    heads = heads_of_rank(layer.num_kv_heads, engine)
    quantized = heads * dtypes.head_bytes(cache.cache_dtype, layer.head_size, layer.head_size)
    skipped = heads * dtypes.head_bytes(served_dtype(engine), layer.head_size, layer.head_size)
    if skipped == quantized:
        return cache
    required = max(skipped * KERNEL_BLOCK_SIZE, cache.state_page_bytes or 0)
    block_size = max(cache.block_size, cache.block_size * cdiv(required, cache.block_size * quantized))
    page = block_size * quantized
    has_states = cache.state_page_bytes is not None
    return replace(cache, block_size=block_size, shared_page_bytes=page, state_page_bytes=page if has_states else None)


def _attention_token_bytes(cache: ResolvedCache, model: ModelConfig, engine: EngineConfig) -> int | None:
    """Bytes of one token in one attention layer of this rank; None for a model without attention."""
    latent = next(_of(model, MLALayer), None)
    if latent is not None:
        return latent_bytes(latent, cache.cache_dtype)
    layer = next(_of(model, AttentionLayer), None)
    if layer is None:
        return None
    head_bytes = dtypes.head_bytes(cache.cache_dtype, layer.head_size, layer.head_size)
    return heads_of_rank(layer.num_kv_heads, engine) * head_bytes


def _layers(model: ModelConfig) -> Iterator[CacheLayer]:
    return (layer for layers in model.decoder_layers for layer in layers)


def _of(model: ModelConfig, kind: type[LayerT]) -> Iterator[LayerT]:
    return (layer for layer in _layers(model) if isinstance(layer, kind))


def _has(model: ModelConfig, kind: type[object]) -> bool:
    return any(True for _ in _of(model, kind))
