"""What one decoder layer keeps of a request, as the model defines it: before tensor parallelism, dtype and blocks.

A decoder layer is a tuple of these, since it can keep several (attention beside Mamba, latent beside index) or none (it shares
the cache of another layer, or has no attention). Sizes are elements, windows and chunks are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class AttentionLayer:
    """A key and a value of each token for each KV head; of the last `sliding_window` or `attention_chunk_size` tokens if set."""

    num_kv_heads: int
    head_size: int
    head_size_v: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass(frozen=True)
class CrossAttentionLayer:
    """Keys and values of the encoder's output: as long as that, whatever the decoder has produced.

    `encoder_tokens` is the longest output; None when the file does not say.
    """

    num_kv_heads: int
    head_size: int
    encoder_tokens: int | None = None


@dataclass(frozen=True)
class MLALayer:
    """Multi-head latent attention: one latent of `kv_lora_rank` and one rotary key of `qk_rope_head_dim` for each token."""

    kv_lora_rank: int
    qk_rope_head_dim: int


@dataclass(frozen=True)
class SparseIndexerLayer:
    """The index by which DeepSeek sparse attention picks tokens: one small key for each token."""

    index_head_dim: int


@dataclass(frozen=True)
class CompressedLatentLayer:
    """DeepSeek-V4: one state of `state_bytes` for each `tokens_per_state` tokens; the checkpoint's format fixes the bytes."""

    state_bytes: int
    tokens_per_state: int


@dataclass(frozen=True)
class SlidingLatentLayer:
    """DeepSeek-V4: a state of `state_bytes` for each of the last `sliding_window` tokens, in blocks of its own `block_size`."""

    state_bytes: int
    sliding_window: int
    block_size: int


@dataclass(frozen=True)
class Mamba1Layer:
    """Selective state space (Mamba-1): constant for a request of any length."""

    d_inner: int
    d_state: int
    d_conv: int


@dataclass(frozen=True)
class Mamba2Layer:
    """State space duality (Mamba-2): constant for a request of any length."""

    d_inner: int
    num_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    d_conv: int


@dataclass(frozen=True)
class GatedDeltaNetLayer:
    """Gated delta net (Qwen3-Next, Qwen3.5): constant for a request of any length."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int


@dataclass(frozen=True)
class KimiDeltaAttentionLayer:
    """Kimi delta attention: constant for a request of any length."""

    num_heads: int
    head_dim: int
    conv_kernel_size: int


@dataclass(frozen=True)
class ShortConvLayer:
    """Gated short convolution (LFM2): the last inputs of the convolution."""

    conv_dim: int
    l_cache: int


@dataclass(frozen=True)
class LinearAttentionLayer:
    """Lightning attention (MiniMax-Text-01): one matrix a head."""

    num_heads: int
    head_dim: int


StateLayer: TypeAlias = (
    Mamba1Layer | Mamba2Layer | GatedDeltaNetLayer | KimiDeltaAttentionLayer | ShortConvLayer | LinearAttentionLayer
)
"""Layers whose cache is a state of constant size."""

LatentLayer: TypeAlias = MLALayer | SparseIndexerLayer | CompressedLatentLayer | SlidingLatentLayer
"""Layers that keep one vector for each token, whole on every rank."""

CacheLayer: TypeAlias = AttentionLayer | CrossAttentionLayer | LatentLayer | StateLayer
"""Anything that a layer keeps."""

DecoderLayer: TypeAlias = tuple[CacheLayer, ...]
