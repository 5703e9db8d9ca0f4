"""Readers for decoders with multi-head latent attention (DeepSeek-V2 and its kin), with and without a sparse index."""

from __future__ import annotations

from kvcache_exporter.model_config.attention import attention_decoder
from kvcache_exporter.model_config.fields import Fields
from kvcache_exporter.model_config.layers import DecoderLayer, MLALayer, SparseIndexerLayer


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
    return max(index - int(fields.get("index_skip_topk_offset", 2)) + 1, 0) % frequency != 0


def latent_draft_layer(fields: Fields) -> DecoderLayer:
    """The multi-token-prediction layer of such a model: one more layer of the same kind."""
    if fields.get("kv_lora_rank") is None:
        return attention_decoder(fields)[-1]
    latent = mla_layer(fields)
    return (latent,) if fields.get("index_topk") is None else (latent, SparseIndexerLayer(fields.whole("index_head_dim")))
