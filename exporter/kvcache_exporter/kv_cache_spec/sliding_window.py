"""Sliding window and chunked local attention: what is behind the window or the chunk is given back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from kvcache_exporter.kv_cache_spec.full_attention import AttentionSpec
from kvcache_exporter.kv_cache_spec.spec import Reserve, cdiv


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Keeps the last `sliding_window` tokens."""

    kind: ClassVar[str] = "sliding_window"

    sliding_window: int = 0

    @property
    def same_slots_as(self) -> Hashable:
        """Layers of the same window."""
        return ("sliding", self.sliding_window, self.block_size)

    def reserved_blocks(self, reserve: Reserve) -> int:
        """The window and all tokens in flight, and one block more, since the window may start inside a block."""
        tokens = min(self.sliding_window - 1 + reserve.max_in_flight_tokens, reserve.max_model_len)
        return cdiv(tokens, self.block_size) + 1

    def blocks_for_request(self, num_tokens: int) -> int:
        """The window, one block more where it starts inside a block, and never more than all tokens."""
        return min(cdiv(num_tokens, self.block_size), cdiv(self.sliding_window - 1, self.block_size) + 1)


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Keeps the tokens of the present chunk of `attention_chunk_size`."""

    kind: ClassVar[str] = "chunked_local_attention"

    attention_chunk_size: int = 0

    @property
    def same_slots_as(self) -> Hashable:
        """Layers of the same chunk."""
        return ("chunked", self.attention_chunk_size, self.block_size)

    def reserved_blocks(self, reserve: Reserve) -> int:
        """The chunk and all tokens in flight."""
        return cdiv(min(self.attention_chunk_size + reserve.max_in_flight_tokens, reserve.max_model_len), self.block_size)

    def blocks_for_request(self, num_tokens: int) -> int:
        """At most one chunk."""
        return cdiv(min(num_tokens, self.attention_chunk_size), self.block_size)
