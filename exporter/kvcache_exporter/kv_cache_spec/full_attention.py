"""Full attention: keys and values of every token."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from kvcache_exporter.kv_cache_spec.spec import KVCacheSpec, Reserve, cdiv


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of `num_kv_heads` heads of this rank; `head_bytes` is one key and one value in one head."""

    num_kv_heads: int = 1
    head_bytes: int = 0

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block in this layer."""
        return self.block_size * self.num_kv_heads * self.head_bytes


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Grows by a block with every `block_size` tokens, of which decode-context parallelism keeps a share on each rank."""

    kind: ClassVar[str] = "full_attention"
    grows: ClassVar[bool] = True

    decode_context_parallel_size: int = 1

    @property
    def same_slots_as(self) -> Hashable:
        """All full attention and all latents of one block size."""
        return ("full", self.block_size)

    def reserved_blocks(self, reserve: Reserve) -> int:
        """As many as a live request of that length."""
        return cdiv(cdiv(reserve.max_model_len, self.decode_context_parallel_size), self.block_size)

    def blocks_for_request(self, num_tokens: int) -> int:
        """Whole blocks for every token: the last one may be part empty."""
        return cdiv(cdiv(num_tokens, self.decode_context_parallel_size), self.block_size)
