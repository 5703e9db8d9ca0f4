"""ModelConfig and engine flags -> the layout of the KV cache, in vLLM's terms (`vllm/v1/kv_cache_interface.py`).

A layout is a tuple of groups. Every group draws whole blocks from one pool, so a request holds the sum over groups. Plain full
attention has one group; designs with several (sliding window, MLA, Mamba) add spec classes with the same two members,
`page_size_bytes` and `blocks_for_request`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.model_config import ModelConfig

# vLLM's --kv-cache-dtype names, and the short names that people write.
_KV_CACHE_DTYPE_BYTES = {
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "half": 2,
    "fp16": 2,
    "float32": 4,
    "float": 4,
    "fp32": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


@dataclass(frozen=True)
class EngineConfig:
    """The flags of an engine that shape its cache. `block_size` is tokens in one block; dtypes are as vLLM spells them."""

    block_size: int
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    tensor_parallel_size: int = 1


class KVCacheSpec(Protocol):
    """What one layer keeps, on one rank."""

    @property
    def kind(self) -> str:
        """The attention design: `full_attention`."""

    @property
    def block_size(self) -> int:
        """Tokens in one block of this layer."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer on one rank."""

    def blocks_for_request(self, num_tokens: int) -> int:
        """Blocks that a live request of `num_tokens` tokens (prompt and output) holds."""


@dataclass(frozen=True)
class FullAttentionSpec:
    """Keys and values of every token, for `num_kv_heads` heads of this rank."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    kind: str = "full_attention"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer on one rank: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes

    def blocks_for_request(self, num_tokens: int) -> int:
        """Whole blocks for `num_tokens` tokens: the last one may be part empty."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share block tables: `num_layers` layers of the same spec."""

    spec: KVCacheSpec
    num_layers: int

    @property
    def bytes_per_block_per_rank(self) -> int:
        """Bytes of one block over this group's layers on one rank."""
        return self.num_layers * self.spec.page_size_bytes


@dataclass(frozen=True)
class KVCacheLayout:
    """How the pool is cut. Bytes are for the whole engine (`num_ranks` ranks) unless the name says `per_rank`."""

    groups: tuple[KVCacheGroup, ...]
    num_ranks: int

    @property
    def bytes_per_block_per_rank(self) -> int:
        """Bytes of one block of the pool on one rank: the largest group decides (`vllm/v1/core/kv_cache_utils.py`)."""
        return max(group.bytes_per_block_per_rank for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool over all ranks."""
        return self.bytes_per_block_per_rank * self.num_ranks

    @property
    def tokens_per_block(self) -> int | None:
        """Tokens that one block of the pool holds; None where groups differ, since a block then has no one length."""
        return self.groups[0].spec.block_size if len(self.groups) == 1 else None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that each further token of a long request takes, over all ranks."""
        return sum(group.bytes_per_block_per_rank // group.spec.block_size for group in self.groups) * self.num_ranks

    def blocks_for_request(self, num_tokens: int) -> int:
        """Blocks that a live request of `num_tokens` tokens (prompt and output) holds, over all groups."""
        return sum(group.spec.blocks_for_request(num_tokens) for group in self.groups)


def kv_cache_layout(model: ModelConfig, engine: EngineConfig) -> KVCacheLayout:
    """Lay out the cache of `model` on an engine.

    Raises UnsupportedModelError when a dtype is not known or when vLLM would refuse the tensor-parallel size.
    """
    spec = FullAttentionSpec(
        block_size=engine.block_size,
        num_kv_heads=_kv_heads_per_rank(model, engine.tensor_parallel_size),
        head_size=model.head_dim,
        dtype_bytes=_dtype_bytes(model, engine),
    )
    return KVCacheLayout(groups=(KVCacheGroup(spec, model.num_hidden_layers),), num_ranks=engine.tensor_parallel_size)


def _kv_heads_per_rank(model: ModelConfig, tensor_parallel_size: int) -> int:
    """KV heads on one rank: divided over the ranks, or replicated when there are more ranks than heads, never a fraction."""
    kv_heads = model.num_key_value_heads
    if model.num_attention_heads % tensor_parallel_size:
        raise UnsupportedModelError(
            f"{model.architecture}: vLLM refuses tensor_parallel_size {tensor_parallel_size}, "
            f"since it does not divide the {model.num_attention_heads} attention heads",
            field="tensor_parallel_size",
            value=tensor_parallel_size,
        )
    if kv_heads % tensor_parallel_size and tensor_parallel_size % kv_heads:
        raise UnsupportedModelError(
            f"{model.architecture}: vLLM refuses tensor_parallel_size {tensor_parallel_size}, "
            f"since the {kv_heads} KV heads can be neither divided nor replicated evenly",
            field="tensor_parallel_size",
            value=tensor_parallel_size,
        )
    return max(1, kv_heads // tensor_parallel_size)


def _dtype_bytes(model: ModelConfig, engine: EngineConfig) -> int:
    """Bytes of one cache element.

    `auto` is the checkpoint's own cache format, else the dtype that the engine computes in. vLLM serves a float32 checkpoint, and
    one that names no dtype, in 16 bits unless --dtype says float32.
    """
    name = engine.kv_cache_dtype if model.honours_kv_cache_dtype else engine.dtype
    if name == "auto":
        name = model.kv_cache_dtype or engine.dtype
    if name == "auto":
        return 2
    if name not in _KV_CACHE_DTYPE_BYTES:
        raise UnsupportedModelError(
            f"{model.architecture}: kv_cache_dtype {name!r} is not one of {', '.join(_KV_CACHE_DTYPE_BYTES)}",
            field="kv_cache_dtype",
            value=name,
        )
    return _KV_CACHE_DTYPE_BYTES[name]
