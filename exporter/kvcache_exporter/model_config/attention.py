"""Readers for decoders whose layers are attention with keys and values: full, sliding, chunked, or a mixture."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache_exporter.model_config.fields import Fields
from kvcache_exporter.model_config.layers import AttentionLayer, DecoderLayer

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"


def attention_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Layers alike in heads and size; which of them slide follows from the fields (most models)."""
    return attention_layers(fields, layer_types(fields))


def attention_layers(fields: Fields, types: Sequence[str]) -> tuple[DecoderLayer, ...]:
    """One attention layer for each of `types`; the last `num_kv_shared_layers` keep nothing, they read another layer's cache."""
    own = len(types) - fields.count("num_kv_shared_layers")
    if own <= 0:
        raise fields.refuse("num_kv_shared_layers", fields.get("num_kv_shared_layers"), "leaves no layer with a cache of its own")
    kv_heads = fields.key_value_heads(len(types))
    return tuple(
        (_layer(fields, kind, kv_heads[index]),) if index < own and kv_heads[index] else () for index, kind in enumerate(types)
    )


def _layer(fields: Fields, kind: str, num_kv_heads: int) -> AttentionLayer:
    head_dim = fields.head_dim
    return AttentionLayer(
        num_kv_heads=num_kv_heads,
        head_size=head_dim,
        head_size_v=head_dim,
        sliding_window=fields.whole("sliding_window") if kind == SLIDING else None,
        attention_chunk_size=fields.whole("attention_chunk_size") if kind == CHUNKED else None,
    )


def layer_types(fields: Fields, *, default_pattern: int | None = None) -> tuple[str, ...]:
    """The kind of each layer.

    `layer_types` says it outright. A pattern n makes every n-th layer full and the others sliding. A window alone makes all
    layers slide.
    """
    count = fields.num_hidden_layers
    named = fields.entries("layer_types", length=count)
    if named is not None:
        unknown = sorted({str(kind) for kind in named} - {FULL, SLIDING, CHUNKED, "attention"})
        if unknown:
            raise fields.refuse("layer_types", unknown, "is not attention that this reader knows")
        return tuple(FULL if kind == "attention" else str(kind) for kind in named)
    if not fields.get("sliding_window"):
        return (FULL,) * count
    pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern", default_pattern))
    if isinstance(pattern, str) and pattern:
        return tuple(FULL if pattern[index % len(pattern)] == "G" else SLIDING for index in range(count))
    if isinstance(pattern, int) and pattern > 0:
        return tuple(FULL if (index + 1) % pattern == 0 else SLIDING for index in range(count))
    if pattern is not None:
        raise fields.refuse("sliding_window_pattern", pattern, "is neither a positive whole number nor a word of L and G")
    return (SLIDING,) * count


def switched_window_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Qwen2 and its kin: a window is off unless `use_sliding_window` is true; then layers from `max_window_layers` on slide."""
    count = fields.num_hidden_layers
    if not fields.get("use_sliding_window", False) or not fields.get("sliding_window"):
        return attention_layers(fields, (FULL,) * count)
    if fields.get("layer_types") is not None:
        return attention_decoder(fields)
    full = min(count, fields.count("max_window_layers", count))
    return attention_layers(fields, (FULL,) * full + (SLIDING,) * (count - full))


def mistral_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Mistral: Hugging Face's default is a window of 4096 where the file has no such field; null means none."""
    types = layer_types(fields)
    if not fields.has("sliding_window") and fields.get("layer_types") is None:
        layer = AttentionLayer(fields.num_key_value_heads, fields.head_dim, fields.head_dim, sliding_window=4096)
        return ((layer,),) * len(types)
    return attention_layers(fields, types)


def alternating_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Gemma 2 and gpt-oss: sliding and full in turn, sliding first."""
    return attention_layers(fields, layer_types(fields, default_pattern=2))


def gemma3_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Gemma 3: five sliding layers, then a full one."""
    return attention_layers(fields, layer_types(fields, default_pattern=6))


def gemma3n_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Gemma 3n: four sliding layers, then a full one."""
    return attention_layers(fields, layer_types(fields, default_pattern=5))


def cohere2_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Command R7B and Command A: three sliding layers, then a full one; vLLM's window includes the current token."""
    layers = attention_layers(fields, layer_types(fields, default_pattern=4))
    return tuple(
        tuple(
            AttentionLayer(layer.num_kv_heads, layer.head_size, layer.head_size_v, layer.sliding_window + 1)
            if isinstance(layer, AttentionLayer) and layer.sliding_window
            else layer
            for layer in decoder_layer
        )
        for decoder_layer in layers
    )


def gpt_oss_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """gpt-oss: vLLM's class lets every even layer slide, whatever `layer_types` says."""
    count = fields.num_hidden_layers
    return attention_layers(fields, tuple(FULL if index % 2 else SLIDING for index in range(count)))


def gemma4_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Gemma 4: full layers have heads of their own number and size."""
    full = AttentionLayer(
        num_kv_heads=fields.whole("num_global_key_value_heads", default=fields.num_key_value_heads),
        head_size=fields.whole("global_head_dim", default=fields.head_dim),
        head_size_v=fields.whole("global_head_dim", default=fields.head_dim),
    )
    types = layer_types(fields, default_pattern=6)
    layers = attention_layers(fields, types)
    return tuple((full,) if layer and kind == FULL else layer for layer, kind in zip(layers, types, strict=True))


def mimo_v2_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """MiMo-V2: `hybrid_layer_pattern` marks sliding layers, whose heads differ; keys and values differ in size."""
    pattern = fields.entries("hybrid_layer_pattern", length=fields.num_hidden_layers)
    if pattern is None:
        raise fields.refuse("hybrid_layer_pattern", None, "is missing")
    full = AttentionLayer(fields.num_key_value_heads, fields.head_dim, fields.whole("v_head_dim", default=fields.head_dim))
    head_dim = fields.whole("swa_head_dim", default=full.head_size)
    sliding = AttentionLayer(
        num_kv_heads=fields.whole("swa_num_key_value_heads", default=full.num_kv_heads),
        head_size=head_dim,
        head_size_v=fields.whole("swa_v_head_dim", default=head_dim),
        sliding_window=fields.whole("sliding_window_size", "sliding_window"),
    )
    return tuple((sliding if slides else full,) for slides in pattern)


def llama4_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Llama 4: layers with rotary positions attend within a chunk, those without (by default every 4th) to all."""
    count = fields.num_hidden_layers
    ropes = fields.entries("no_rope_layers") or None
    if ropes is None:
        interval = fields.whole("no_rope_layer_interval", default=4)
        ropes = [int((index + 1) % interval != 0) for index in range(count)]
    chunked = fields.get("attention_chunk_size", None if fields.has("attention_chunk_size") else 8192)
    types = tuple(CHUNKED if rope and chunked else FULL for rope in ropes)
    return attention_layers(fields, types)


def block_configs_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Nemotron-NAS (DeciLM): each block has its own number of query heads that share a KV head, or no attention."""
    blocks = fields.entries("block_configs", length=fields.num_hidden_layers)
    if blocks is None:
        heads = fields.entries("num_key_value_heads_per_layer", length=fields.num_hidden_layers)
        if heads is None:
            raise fields.refuse("block_configs", None, "is missing")
        return tuple((AttentionLayer(int(kv_heads), fields.head_dim, fields.head_dim),) for kv_heads in heads)
    layers: list[DecoderLayer] = []
    for block in blocks:
        attention = Fields(block.get("attention") or {}, fields.architecture)
        if attention.get("no_op") or attention.get("replace_with_linear"):
            layers.append(())
            continue
        kv_heads = fields.num_attention_heads // attention.whole("n_heads_in_group")
        layers.append((AttentionLayer(kv_heads, fields.head_dim, fields.head_dim),))
    return tuple(layers)


def attn_config_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """MPT and DBRX: the number of KV heads stands in `attn_config`."""
    kv_heads = fields.mapping("attn_config").whole("kv_n_heads", default=fields.num_attention_heads)
    layer = AttentionLayer(kv_heads, fields.head_dim, fields.head_dim)
    return ((layer,),) * fields.num_hidden_layers
