"""Latent attention: one vector for each token, or for several, whole on every rank."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from kvcache_exporter.kv_cache_spec.full_attention import FullAttentionSpec
from kvcache_exporter.kv_cache_spec.sliding_window import SlidingWindowSpec


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """`head_bytes` is the whole vector, kept once for each `tokens_per_state` tokens.

    There is no separate value, and tensor parallelism does not divide it.
    """

    kind: ClassVar[str] = "mla_attention"
    # Sparse latents are read in whole rows, so a page cannot be padded to any size.
    can_pad: ClassVar[bool] = False

    tokens_per_state: int = 1

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block in this layer."""
        return self.block_size // self.tokens_per_state * self.head_bytes


@dataclass(frozen=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A window of such vectors, in blocks of its own size; packed beside others in one pool (DeepSeek-V4)."""

    kind: ClassVar[str] = "sliding_window_mla"

    @property
    def same_slots_as(self) -> Hashable:
        """Layers of the same window and block size."""
        return ("sliding latent", self.sliding_window, self.block_size)
