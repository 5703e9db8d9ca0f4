"""Readers for decoders whose layers are attention with keys and values: full, sliding, chunked, or a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvcache_exporter.model_config.fields import Fields
from kvcache_exporter.model_config.layers import AttentionLayer, DecoderLayer

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"


def attention_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Layers alike in heads and size; which of them slide follows from the fields (most models)."""
    return attention_layers(fields, layer_types(fields))


def uniform_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Classes that give no layer a window of its own: all layers slide, or none where `layer_types` mixes kinds."""
    types = layer_types(fields)
    return attention_layers(fields, types) if len(set(types)) == 1 else full_decoder(fields)


def full_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Every layer attends to all tokens, whatever the file says of windows."""
    return attention_layers(fields, (FULL,) * fields.num_hidden_layers)


def _alike(fields: Fields, num_kv_heads: int) -> tuple[DecoderLayer, ...]:
    """The same layer of full attention everywhere, with that many KV heads."""
    return ((AttentionLayer(num_kv_heads, fields.head_dim, fields.head_dim),),) * fields.num_hidden_layers


def attention_layers(fields: Fields, types: Sequence[str], *, num_kv_shared_layers: int = 0) -> tuple[DecoderLayer, ...]:
    """One attention layer for each of `types`; the last `num_kv_shared_layers` keep nothing, they read another layer's cache."""
    # Gemma shares none where the number leaves no layer to read from.
    own = len(types) - num_kv_shared_layers if num_kv_shared_layers < len(types) else len(types)
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


def layer_types(fields: Fields, *, pattern: int | str | None = None) -> tuple[str, ...]:
    """The kind of each layer.

    `layer_types` says it outright. A pattern n makes every n-th layer full and the others sliding. A window alone makes all
    layers slide; without one, or with one of 0, none does (`vllm/engine/arg_utils.py`).
    """
    count = fields.num_hidden_layers
    named = fields.entries("layer_types", length=count)
    if named is not None:
        unknown = sorted({str(kind) for kind in named} - {FULL, SLIDING, CHUNKED, "attention"})
        if unknown:
            raise fields.refuse("layer_types", unknown, "is not attention that this reader knows")
        slides = bool(fields.get("sliding_window"))
        return tuple(FULL if kind == "attention" or (kind == SLIDING and not slides) else str(kind) for kind in named)
    if not fields.get("sliding_window"):
        return (FULL,) * count
    if isinstance(pattern, str) and pattern:
        return tuple(FULL if pattern[index % len(pattern)] == "G" else SLIDING for index in range(count))
    if isinstance(pattern, int) and pattern > 0:
        return tuple(FULL if (index + 1) % pattern == 0 else SLIDING for index in range(count))
    if pattern is not None:
        raise fields.refuse("sliding_window_pattern", pattern, "is neither a positive whole number nor a word of L and G")
    return (SLIDING,) * count


def switched_window_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Qwen2 and its kin: a window is off unless `use_sliding_window` is true; then layers from `max_window_layers` on slide."""
    if not fields.get("use_sliding_window") or not fields.get("sliding_window"):
        return full_decoder(fields)
    if fields.get("layer_types") is not None:
        return attention_decoder(fields)
    count = fields.num_hidden_layers
    full = min(count, fields.count("max_window_layers", count))
    return attention_layers(fields, (FULL,) * full + (SLIDING,) * (count - full))


def qwen2_moe_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Qwen2-MoE: `max_window_layers` mixes kinds in Hugging Face's config, and vLLM's class then lets none slide."""
    if not fields.get("use_sliding_window") or fields.get("layer_types") is None:
        return full_decoder(fields)
    return uniform_decoder(fields)


def qwen3_moe_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Qwen3-MoE: the switch lets all layers slide; there are no `max_window_layers`."""
    if not fields.get("use_sliding_window"):
        return full_decoder(fields)
    return uniform_decoder(fields)


def qwen3_vl_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Qwen3-VL: a window that is stated holds in all layers, unless it is switched off outright."""
    if not fields.get("use_sliding_window", True):
        return full_decoder(fields)
    return uniform_decoder(fields)


def smollm3_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """SmolLM3: `layer_types`, else with the switch the layers without rotary positions slide (by default every 4th)."""
    if fields.get("layer_types") is not None:
        return attention_decoder(fields)
    if not fields.get("use_sliding_window") or not fields.get("sliding_window"):
        return full_decoder(fields)
    return attention_layers(fields, tuple(FULL if rope else SLIDING for rope in _ropes(fields)))


def _ropes(fields: Fields) -> Sequence[int]:
    """For each layer whether it has rotary positions."""
    count = fields.num_hidden_layers
    listed = fields.entries("no_rope_layers", length=count) if fields.get("no_rope_layers") else None
    if listed is not None:
        return [int(rope) for rope in listed]
    interval = fields.whole("no_rope_layer_interval", default=4)
    return [int((index + 1) % interval != 0) for index in range(count)]


def falcon_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Falcon: only its newer decoder takes the number of KV heads; the older has one or all. It never slides."""
    heads = fields.num_attention_heads
    if fields.get("new_decoder_architecture"):
        kv_heads = fields.whole("num_kv_heads", default=heads)
    else:
        kv_heads = 1 if fields.get("multi_query") else heads
    return _alike(fields, kv_heads)


def chatglm_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """ChatGLM: groups of queries share a KV head where the switch is on."""
    heads = fields.num_attention_heads
    kv_heads = fields.whole("multi_query_group_num", default=heads) if fields.get("multi_query_attention", True) else heads
    return _alike(fields, kv_heads)


def alternating_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Gemma 2: sliding and full in turn, sliding first."""
    return attention_layers(fields, layer_types(fields, pattern=2))


def gemma3_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Gemma 3: five sliding layers, then a full one; a window that looks both ways counts half of it and the token itself."""
    layers = attention_layers(fields, layer_types(fields, pattern=fields.get("sliding_window_pattern", 6)))
    return _with_window(layers, lambda window: window // 2 + 1) if fields.get("use_bidirectional_attention") else layers


def _with_window(layers: Sequence[DecoderLayer], change: Callable[[int], int]) -> tuple[DecoderLayer, ...]:
    """The same layers, with every window changed."""
    return tuple(
        tuple(
            replace(own, sliding_window=change(own.sliding_window))
            if isinstance(own, AttentionLayer) and own.sliding_window
            else own
            for own in layer
        )
        for layer in layers
    )


def gemma3n_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Gemma 3n: four sliding layers, then a full one."""
    types = layer_types(fields, pattern=5)
    return attention_layers(fields, types, num_kv_shared_layers=fields.count("num_kv_shared_layers"))


def every_fourth_full_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Olmo 3: three sliding layers, then a full one; no field changes that but `layer_types`."""
    return attention_layers(fields, layer_types(fields, pattern=4))


def exaone4_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Exaone 4: a pattern of L (sliding) and G (full), or a number; by default three sliding layers, then a full one."""
    return attention_layers(fields, layer_types(fields, pattern=fields.get("sliding_window_pattern", 4)))


def cohere2_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Command R7B and Command A: three sliding layers, then a full one; vLLM's window includes the current token."""
    types = layer_types(fields, pattern=fields.get("sliding_window_pattern", 4))
    return _with_window(attention_layers(fields, types), lambda window: window + 1)


def gpt_oss_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """gpt-oss: vLLM's class lets every even layer slide, whatever `layer_types` mixes."""
    types = layer_types(fields, pattern=2)
    if fields.get("sliding_window") and set(types) != {SLIDING}:
        types = tuple(FULL if index % 2 else SLIDING for index in range(len(types)))
    return attention_layers(fields, types)


def gemma4_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Gemma 4: full layers have heads of their own size and, where keys serve as values, number; the last layer is always full.

    Files of newer versions state both layer by layer instead, in `per_layer_config`.
    """
    types = (*layer_types(fields, pattern=6)[:-1], FULL)
    layers = attention_layers(fields, types, num_kv_shared_layers=fields.count("num_kv_shared_layers"))
    per_layer = fields.mapping("per_layer_config")
    if per_layer.names():
        overrides = {int(name): per_layer.mapping(name) for name in per_layer.names() if name.isdecimal()}
        return tuple(
            tuple(_overridden(own, overrides[index]) for own in layer if isinstance(own, AttentionLayer))
            if index in overrides
            else layer
            for index, layer in enumerate(layers)
        )
    kv_heads = fields.num_key_value_heads
    if fields.get("attention_k_eq_v"):
        kv_heads = fields.whole("num_global_key_value_heads", default=kv_heads)
    head_dim = fields.whole("global_head_dim", default=512)
    full = AttentionLayer(kv_heads, head_dim, head_dim)
    return tuple((full,) if layer and kind == FULL else layer for layer, kind in zip(layers, types, strict=True))


def _overridden(layer: AttentionLayer, override: Fields) -> AttentionLayer:
    head_dim = override.whole("head_dim", default=layer.head_size)
    kv_heads = override.whole("num_key_value_heads", default=layer.num_kv_heads)
    return replace(layer, num_kv_heads=kv_heads, head_size=head_dim, head_size_v=head_dim)


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
    chunked = bool(fields.get("attention_chunk_size"))
    return attention_layers(fields, tuple(CHUNKED if rope and chunked else FULL for rope in _ropes(fields)))


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
    return _alike(fields, kv_heads)
