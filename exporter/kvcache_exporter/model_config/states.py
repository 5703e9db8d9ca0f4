"""Readers for hybrids: attention in some layers, a state of constant size (Mamba, linear attention, convolution) in others."""

from __future__ import annotations

from kvcache_exporter.model_config.fields import Fields
from kvcache_exporter.model_config.latent import mla_layer
from kvcache_exporter.model_config.layers import (
    AttentionLayer,
    DecoderLayer,
    GatedDeltaNetLayer,
    KimiDeltaAttentionLayer,
    LinearAttentionLayer,
    Mamba1Layer,
    Mamba2Layer,
    ShortConvLayer,
)


def _attention(fields: Fields) -> AttentionLayer:
    return AttentionLayer(fields.num_key_value_heads, fields.head_dim, fields.head_dim)


def _by_name(fields: Fields, name: str, kinds: dict[str, DecoderLayer]) -> tuple[DecoderLayer, ...]:
    """The layers that a list (or a string of one letter a layer) names."""
    named = fields.entries(name, length=fields.num_hidden_layers)
    if named is None:
        raise fields.refuse(name, None, "is missing")
    unknown = sorted({str(kind) for kind in named} - kinds.keys())
    if unknown:
        raise fields.refuse(name, unknown, "is not a kind of layer that this reader knows")
    return tuple(kinds[str(kind)] for kind in named)


def jamba_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Jamba: Mamba-1, with attention every `attn_layer_period` layers from `attn_layer_offset` on."""
    mamba = Mamba1Layer(
        d_inner=fields.whole("mamba_expand", default=2) * fields.hidden_size,
        d_state=fields.whole("mamba_d_state", default=16),
        d_conv=fields.whole("mamba_d_conv", default=4),
    )
    attention = _attention(fields)
    period, offset = fields.whole("attn_layer_period"), fields.count("attn_layer_offset")
    return tuple((attention,) if index % period == offset else (mamba,) for index in range(fields.num_hidden_layers))


def _bamba_mixer(fields: Fields, d_inner: int | None = None) -> Mamba2Layer:
    d_inner = d_inner or fields.whole("mamba_expand", default=2) * fields.hidden_size
    num_heads = fields.whole("mamba_n_heads")
    return Mamba2Layer(
        d_inner=d_inner,
        num_heads=num_heads,
        head_dim=d_inner // num_heads if fields.get("mamba_d_head", "auto") == "auto" else fields.whole("mamba_d_head"),
        d_state=fields.whole("mamba_d_state"),
        n_groups=fields.whole("mamba_n_groups", default=1),
        d_conv=fields.whole("mamba_d_conv", default=4),
    )


def bamba_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Bamba: Mamba-2, with attention in the layers that `attn_layer_indices` lists."""
    attention, mamba = _attention(fields), _bamba_mixer(fields)
    full = fields.indices("attn_layer_indices") or frozenset()
    return tuple((attention,) if index in full else (mamba,) for index in range(fields.num_hidden_layers))


def granite_hybrid_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Granite 4 H: Mamba-2 and attention by `layer_types`, under the names of older and newer files; Mamba-2 alone without."""
    attention: DecoderLayer = (_attention(fields),)
    mamba: DecoderLayer = (_bamba_mixer(fields),)
    kinds = {"mamba": mamba, "linear_attention": mamba, "attention": attention, "full_attention": attention}
    for name in ("layer_types", "layers_block_type"):
        if fields.get(name) is not None:
            return _by_name(fields, name, kinds)
    return (mamba,) * fields.num_hidden_layers


def falcon_h1_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Falcon-H1: both in every layer, side by side."""
    d_ssm = fields.whole("mamba_d_ssm", default=fields.whole("mamba_expand", default=2) * fields.hidden_size)
    return ((_bamba_mixer(fields, d_ssm), _attention(fields)),) * fields.num_hidden_layers


def zamba2_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Zamba2: Mamba-2 in every layer, and shared attention beside it in the hybrid ones."""
    d_inner = fields.whole("mamba_expand", default=2) * fields.hidden_size
    mamba = Mamba2Layer(
        d_inner=d_inner,
        num_heads=fields.whole("n_mamba_heads"),
        head_dim=d_inner // fields.whole("n_mamba_heads"),
        d_state=fields.whole("mamba_d_state"),
        n_groups=fields.whole("mamba_ngroups", default=1),
        d_conv=fields.whole("mamba_d_conv", default=4),
    )
    # Its attention reads the embedding beside the hidden state, so it is twice as wide.
    head_dim = fields.whole("attention_head_dim", default=2 * fields.hidden_size // fields.num_attention_heads)
    if not head_dim:
        raise fields.refuse("hidden_size", fields.hidden_size, "is too narrow for its attention heads")
    attention = AttentionLayer(fields.num_attention_heads, head_dim, head_dim)
    if fields.get("layers_block_type") is None:
        hybrid = fields.indices("hybrid_layer_ids")
        if hybrid is None:
            raise fields.refuse("layers_block_type", None, "is missing")
        return tuple((attention, mamba) if index in hybrid else (mamba,) for index in range(fields.num_hidden_layers))
    kinds: dict[str, DecoderLayer] = {"hybrid": (attention, mamba)}
    kinds |= dict.fromkeys(("mamba", "linear_attention"), (mamba,))
    return _by_name(fields, "layers_block_type", kinds)


def nemotron_h_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Nemotron-H: a letter a layer (M Mamba-2, * attention; - and E, feed-forward and experts, keep nothing), or a name."""
    num_heads, head_dim = fields.whole("mamba_num_heads"), fields.whole("mamba_head_dim")
    mamba = Mamba2Layer(
        d_inner=num_heads * head_dim,
        num_heads=num_heads,
        head_dim=head_dim,
        d_state=fields.whole("ssm_state_size"),
        n_groups=fields.whole("n_groups"),
        d_conv=fields.whole("conv_kernel"),
    )
    attention_head_dim = fields.whole("head_dim")
    attention: DecoderLayer = (AttentionLayer(fields.num_key_value_heads, attention_head_dim, attention_head_dim),)
    if fields.get("hybrid_override_pattern") is None:
        return _by_name(fields, "layers_block_type", {"mamba": (mamba,), "attention": attention, "mlp": (), "moe": ()})
    return _by_name(fields, "hybrid_override_pattern", {"M": (mamba,), "*": attention, "-": (), "E": ()})


def gated_delta_net_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Qwen3-Next and Qwen3.5: gated delta nets, and attention by `layer_types`, else every `full_attention_interval`-th."""
    linear: DecoderLayer = (
        GatedDeltaNetLayer(
            num_k_heads=fields.whole("linear_num_key_heads"),
            num_v_heads=fields.whole("linear_num_value_heads"),
            head_k_dim=fields.whole("linear_key_head_dim"),
            head_v_dim=fields.whole("linear_value_head_dim"),
            conv_kernel_size=fields.whole("linear_conv_kernel_dim"),
        ),
    )
    full: DecoderLayer = (_attention(fields),)
    if fields.get("layer_types") is not None:
        return _by_name(fields, "layer_types", {"linear_attention": linear, "full_attention": full})
    interval = fields.whole("full_attention_interval", default=4)
    return tuple(full if (index + 1) % interval == 0 else linear for index in range(fields.num_hidden_layers))


def kimi_linear_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """Kimi-Linear and Kimi-K3: delta attention in `kda_layers` (counted from 1), a latent in the others."""
    config = fields.mapping("linear_attn_config")
    linear = KimiDeltaAttentionLayer(config.whole("num_heads"), config.whole("head_dim"), config.whole("short_conv_kernel_size"))
    kda = config.indices("kda_layers")
    if not kda:
        raise fields.refuse("linear_attn_config", "without kda_layers", "does not tell which layers are linear")
    latent = mla_layer(fields)
    return tuple((linear,) if index + 1 in kda else (latent,) for index in range(fields.num_hidden_layers))


def short_conv_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """LFM2: short convolutions and attention by `layer_types`, else attention in `full_attn_idxs`, by default everywhere."""
    conv: DecoderLayer = (ShortConvLayer(fields.whole("conv_dim", default=fields.hidden_size), fields.whole("conv_L_cache")),)
    full: DecoderLayer = (_attention(fields),)
    if fields.get("layer_types") is not None:
        return _by_name(fields, "layer_types", {"conv": conv, "full_attention": full})
    count = fields.num_hidden_layers
    indices = fields.indices("full_attn_idxs")
    return tuple(full if indices is None or index in indices else conv for index in range(count))


def minimax_text_decoder(fields: Fields) -> tuple[DecoderLayer, ...]:
    """MiniMax-Text-01 and M1: lightning attention where `attn_type_list` has 0, full attention where it has 1."""
    types = fields.entries("attn_type_list", length=fields.num_hidden_layers)
    if types is None:
        raise fields.refuse("attn_type_list", None, "is missing")
    linear, full = LinearAttentionLayer(fields.num_attention_heads, fields.head_dim), _attention(fields)
    return tuple((full,) if kind else (linear,) for kind in types)
