"""Readers for decoders with multi-head latent attention (DeepSeek-V2 and its kin), with and without a sparse index."""

from __future__ import annotations

from kvcache_exporter.model_config.attention import attention_decoder
from kvcache_exporter.model_config.fields import Fields
from kvcache_exporter.model_config.layers import (
    CompressedLatentLayer,
    DecoderLayer,
    MLALayer,
    SlidingLatentLayer,
    SparseIndexerLayer,
)


def mla_layer(fields: Fields) -> MLALayer:
    """The latent of one layer."""
    return MLALayer(fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim"))


def latent_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """All layers keep a latent; where `index_topk` is set, an index beside it.

    With `index_topk_freq` or `index_topk_pattern`, layers that skip reuse the selection of an earlier layer and have no index
    (`vllm/model_executor/models/deepseek_v2.py`). A DeepSeek config without `kv_lora_rank` is ordinary attention.
    """
    if fields.get("kv_lora_rank") is None:
        return attention_decoder(fields)
    latent = mla_layer(fields)
    if fields.get("index_topk") is None:
        return ((latent,),) * fields.num_hidden_layers
    indexer = SparseIndexerLayer(fields.whole("index_head_dim"))
    return tuple((latent,) if _skips_index(fields, index) else (latent, indexer) for index in range(fields.num_hidden_layers))


def _skips_index(fields: Fields, index: int) -> bool:
    pattern = fields.entries("index_topk_pattern")
    if pattern is not None:
        return index < len(pattern) and pattern[index] == "S"
    frequency = fields.whole("index_topk_freq", default=1)
    return max(index - fields.count("index_skip_topk_offset", 2) + 1, 0) % frequency != 0


# A latent of DeepSeek-V4 as it is stored: 448 fp8 elements with 8 scale bytes, 64 rotary elements in bf16.
_V4_LATENT_BYTES = 584
_V4_INDEX_KEY_BYTES = 132
_FP32_BYTES = 4


def compressed_latent_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """DeepSeek-V4: a window of latents in every layer; by `compress_ratios`, compressed latents of all tokens beside it.

    A ratio of 4 comes with a sparse index, compressed alike, and its windows overlap, so that both keep twice as many raw tokens
    (`vllm/models/deepseek_v4`).
    """
    ratios = fields.entries("compress_ratios")
    if ratios is None or len(ratios) < fields.num_hidden_layers:
        raise fields.refuse("compress_ratios", ratios, "does not give a ratio for each layer")
    unknown = sorted(set(ratios) - {0, 4, 128})
    if unknown:
        raise fields.refuse("compress_ratios", unknown, "is not a ratio that this reader knows")
    head_dim, index_head_dim = fields.head_dim, fields.whole("index_head_dim")
    window = SlidingLatentLayer(_V4_LATENT_BYTES, sliding_window=fields.whole("sliding_window"), block_size=64)
    by_ratio: dict[int, DecoderLayer] = {
        0: (window,),
        4: (
            window,
            CompressedLatentLayer(_V4_INDEX_KEY_BYTES, 4),
            _raw_tokens(index_head_dim, overlap=2, sliding_window=8, block_size=4),
            CompressedLatentLayer(_V4_LATENT_BYTES, 4),
            _raw_tokens(head_dim, overlap=2, sliding_window=8, block_size=4),
        ),
        128: (
            window,
            CompressedLatentLayer(_V4_LATENT_BYTES, 128),
            _raw_tokens(head_dim, overlap=1, sliding_window=128, block_size=8),
        ),
    }
    return tuple(by_ratio[ratio] for ratio in ratios[: fields.num_hidden_layers])


def _raw_tokens(head_dim: int, *, overlap: int, sliding_window: int, block_size: int) -> SlidingLatentLayer:
    """Values and scores, in fp32, of the tokens that are not compressed yet."""
    return SlidingLatentLayer(2 * overlap * head_dim * _FP32_BYTES, sliding_window, block_size)


def latent_draft_layer(fields: Fields) -> DecoderLayer:
    """The multi-token-prediction layer of such a model: one more layer of the same kind."""
    if fields.get("kv_lora_rank") is None:
        return attention_decoder(fields)[-1]
    latent = mla_layer(fields)
    return (latent,) if fields.get("index_topk") is None else (latent, SparseIndexerLayer(fields.whole("index_head_dim")))
