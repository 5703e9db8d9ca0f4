"""Readers for models whose decoder also keeps the keys and values of an encoder's output."""

from __future__ import annotations

from kvcache_exporter.model_config.attention import attention_decoder
from kvcache_exporter.model_config.fields import Fields
from kvcache_exporter.model_config.layers import AttentionLayer, CrossAttentionLayer, DecoderLayer


def whisper_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Whisper: self-attention and cross-attention in every decoder layer."""
    heads, head_dim = fields.num_attention_heads, fields.head_dim
    source = fields.whole("max_source_positions", default=1500)
    layer = (AttentionLayer(heads, head_dim, head_dim), CrossAttentionLayer(heads, head_dim, source))
    return (layer,) * fields.whole("decoder_layers")


def mllama_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Llama 3.2 Vision: cross-attention to the image instead of self-attention in `cross_attention_layers`."""
    cross = fields.indices("cross_attention_layers") or frozenset()
    layer = CrossAttentionLayer(fields.num_key_value_heads, fields.head_dim)
    return tuple((layer,) if index in cross else own for index, own in enumerate(attention_decoder(fields)))
