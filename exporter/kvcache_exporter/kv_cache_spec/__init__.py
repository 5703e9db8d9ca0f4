"""ModelConfig and engine flags -> the layout of the KV cache, in vLLM's terms.

model layers ──layers.py──> specs (one file a design) ──grouping.py──> groups ──> KVCacheLayout

A layout is a tuple of groups. Every group draws whole blocks from one pool, so a request holds the sum over groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec.engine_config import EngineConfig
from kvcache_exporter.kv_cache_spec.full_attention import FullAttentionSpec
from kvcache_exporter.kv_cache_spec.grouping import KVCacheGroup, group_layers
from kvcache_exporter.kv_cache_spec.layers import PlacedLayer, place_layers
from kvcache_exporter.kv_cache_spec.resolved_cache import KERNEL_BLOCK_SIZE
from kvcache_exporter.kv_cache_spec.spec import Reserve, cdiv
from kvcache_exporter.model_config import ModelConfig

__all__ = ["KERNEL_BLOCK_SIZE", "EngineConfig", "KVCacheGroup", "KVCacheLayout", "kv_cache_layout", "plain_layout"]

# Longer than any request: at this length only groups that grow still grow.
_ENDLESS = 1 << 40


@dataclass(frozen=True)
class KVCacheLayout:
    """How the pool is cut. Bytes are for the whole engine unless the name says `per_rank`.

    `block_size` is vLLM's after alignment, `cache_dtype` what `auto` came to. A rank is one GPU; `per_rank` lists have one entry
    a pipeline stage, whose tensor-parallel ranks are alike. `is_assumed` tells that architecture or dtype is not stated by the
    model's files.
    """

    groups: tuple[KVCacheGroup, ...]
    engine: EngineConfig
    block_size: int
    cache_dtype: str
    is_assumed: bool = False

    @property
    def bytes_per_block_per_rank(self) -> tuple[int, ...]:
        """Bytes of one block of the pool on a rank of each stage: the largest group decides."""
        stages = range(self.engine.pipeline_parallel_size)
        return tuple(max(group.bytes_per_block(stage) for group in self.groups) for stage in stages)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool over all ranks."""
        return sum(self.bytes_per_block_per_rank) * self.engine.tensor_parallel_size

    @property
    def tokens_per_block(self) -> int | None:
        """Tokens of one request that one block holds; None where a request needs blocks of several groups, or a window."""
        if len(self.groups) > 1 or not isinstance(self.groups[0].spec, FullAttentionSpec):
            return None
        return self.groups[0].spec.block_size * self.groups[0].spec.decode_context_parallel_size

    @property
    def marginal_bytes_per_token_per_rank(self) -> tuple[float, ...]:
        """Bytes that one more token of a long request takes on a rank of each stage."""
        tokens = [
            group.spec.block_size * group.spec.decode_context_parallel_size
            for group in self.groups
            if isinstance(group.spec, FullAttentionSpec)
        ]
        return tuple(sum(size / per_block for per_block in tokens) for size in self.bytes_per_block_per_rank)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more token of a long request takes, over all ranks."""
        return sum(self.marginal_bytes_per_token_per_rank) * self.engine.tensor_parallel_size

    @property
    def fixed_blocks_per_request(self) -> int:
        """Blocks of the groups that stop growing, as vLLM reserves them."""
        fixed = [group for group in self.groups if not group.spec.grows]
        return sum(group.reserved_blocks(self.reserve(_ENDLESS)) for group in fixed)

    @property
    def fixed_blocks_of_live_request(self) -> int:
        """Blocks of the groups that stop growing, as a long running request holds them."""
        return sum(group.blocks_for_request(_ENDLESS) for group in self.groups if not group.spec.grows)

    def reserve(self, max_model_len: int, in_flight_tokens: int | None = None) -> Reserve:
        """What vLLM counts with at start-up for that length; `in_flight_tokens` in place of what the flags make."""
        in_flight = self.engine.max_in_flight_tokens if in_flight_tokens is None else in_flight_tokens
        return Reserve(max_model_len, in_flight, self.engine.batched_tokens)

    def reserved_blocks(self, max_model_len: int, *, in_flight_tokens: int | None = None) -> int:
        """Blocks that vLLM sets aside for one request of max_model_len when it states its concurrency, and when it admits one."""
        reserve = self.reserve(max_model_len, in_flight_tokens)
        return sum(group.reserved_blocks(reserve) for group in self.groups)

    def blocks_for_request(self, num_tokens: int) -> int:
        """Blocks that a running request of `num_tokens` tokens (prompt and output) holds, over all groups."""
        return sum(group.blocks_for_request(num_tokens) for group in self.groups)


def kv_cache_layout(model: ModelConfig, engine: EngineConfig, draft: ModelConfig | None = None) -> KVCacheLayout:
    """Lay out the cache of `model` on an engine, and that of a draft model beside it.

    Raises UnsupportedModelError when a dtype is not known, or for what vLLM would refuse (a tensor-parallel size, for one).
    """
    try:
        layers, resolved = place_layers(model, engine, draft)
        groups = group_layers(
            layers,
            disable_hybrid_kv_cache_manager=engine.disable_hybrid_kv_cache_manager,
            vllm_version=engine.vllm_version,
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{model.architecture}: {error}", field=error.field, value=error.value) from error
    return KVCacheLayout(groups, engine, resolved.block_size, resolved.cache_dtype, model.is_assumed or resolved.is_dtype_assumed)


def plain_layout(engine: EngineConfig, block_size: int, bytes_per_token: int) -> KVCacheLayout:
    """The layout of a model of which only the bytes of a token over all ranks are given: one group of full attention."""
    ranks = engine.tensor_parallel_size
    spec = FullAttentionSpec(block_size, head_bytes=cdiv(bytes_per_token, ranks))
    flat = replace(engine, pipeline_parallel_size=1)
    return KVCacheLayout((KVCacheGroup((PlacedLayer(spec, 0),)),), flat, block_size, engine.kv_cache_dtype)
