"""Cross-attention: keys and values of the encoder's output."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from kvcache_exporter.kv_cache_spec.full_attention import AttentionSpec
from kvcache_exporter.kv_cache_spec.spec import Reserve, cdiv


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """As long as the encoder's output: `encoder_tokens` at most; at start-up vLLM counts `max_num_encoder_input_tokens`."""

    kind: ClassVar[str] = "cross_attention"

    encoder_tokens: int = 0

    @property
    def same_slots_as(self) -> Hashable:
        """Layers that read the same encoder."""
        return ("cross", self.block_size)

    def reserved_blocks(self, reserve: Reserve) -> int:
        """The longest input that the scheduler takes."""
        return cdiv(reserve.max_num_encoder_input_tokens, self.block_size)

    def blocks_for_request(self, num_tokens: int) -> int:
        """The longest output of the encoder, whatever the decoder has produced."""
        return cdiv(self.encoder_tokens, self.block_size)
