"""Multi-head latent attention and its sparse index: one vector for each token, whole on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache_exporter.kv_cache_spec.full_attention import FullAttentionSpec


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """`head_bytes` is the whole vector; there is no separate value, and tensor parallelism does not divide it."""

    kind: ClassVar[str] = "mla_attention"
    # Sparse latents are read in whole rows, so a page cannot be padded to any size.
    can_pad: ClassVar[bool] = False
