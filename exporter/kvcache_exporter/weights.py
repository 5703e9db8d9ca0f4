"""Bytes of a model's weights on one rank: computed where every parameter is known, else an even share of the checkpoint.

What is computed are the parameters that vLLM 0.32 creates: `vllm/model_executor/models/`, and beside it `layers/linear.py` and
`layers/vocab_parallel_embedding.py`. What flags add or change is not in them (quantization while loading, LoRA, a draft model of
speculation), nor are buffers that no checkpoint has, chiefly the table of rotary positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec.cache_dtype import element_bytes
from kvcache_exporter.kv_cache_spec.engine_config import EngineConfig
from kvcache_exporter.kv_cache_spec.pipeline import stage_of_layers
from kvcache_exporter.kv_cache_spec.rank import heads_of_rank, served_dtype
from kvcache_exporter.model_config import ModelConfig
from kvcache_exporter.model_config.fields import Fields
from kvcache_exporter.model_config.layers import AttentionLayer, DecoderLayer

# vLLM pads the vocabulary to a multiple of this before it is split (`DEFAULT_VOCAB_PADDING_SIZE`).
_VOCAB_PADDING = 64
_QUANTIZATION_FIELDS = ("quantization_config", "compression_config")

_Switch: TypeAlias = bool | Mapping[str, bool]
"""True, False, or the fields of which any turns it on, each with the value that Hugging Face's config class gives it."""


@dataclass(frozen=True)
class _Design:
    """What the decoders of one class in vLLM consist of beside the projections of attention and feed-forward, which all have.

    `norms` counts the norms of a layer that are as wide as the model, `norm_parts` is 2 where they have a bias beside the weight.
    `has_head_norms` tells of norms of queries and keys with the size of one head, `has_width_norms` of such over all heads, which
    every rank holds whole. `is_tied` and `vocab_size` are what Hugging Face's config class has for a file that leaves out
    `tie_word_embeddings` and `vocab_size`. With `on_every_stage` all pipeline stages hold embedding table, final norm and head,
    otherwise only those that use them. `experts` is the field that counts experts. `plain` are fields that change the weights in
    a way that is not known here, unless they are missing or have this value.
    """

    qkv_bias: _Switch = False
    o_bias: _Switch = False
    mlp_bias: _Switch = False
    is_gated: bool = True
    norms: int = 2
    norm_parts: int = 1
    has_head_norms: bool = False
    has_width_norms: bool = False
    is_tied: bool = False
    vocab_size: int | None = None
    on_every_stage: bool = False
    experts: str | None = None
    plain: Mapping[str, object] = field(default_factory=dict)


_ATTENTION_BIAS = {"attention_bias": False}
_USE_BIAS = {"use_bias": True}
# `mistral.py` and `phi3.py` build on `llama.py`. InternLM3's `qkv_bias` overrides the other two.
_LLAMA_BIAS = {"attention_bias": False, "bias": False}
_LLAMA = _Design(
    qkv_bias=_LLAMA_BIAS,
    o_bias=_LLAMA_BIAS,
    mlp_bias={"mlp_bias": False},
    plain={"qkv_bias": None, "ada_rms_norm_t_cond": False},
)
# Their classes have no head of their own (`commandr.py`, `gemma2.py`).
_ALWAYS_TIED = {"tie_word_embeddings": True}
_COHERE = _Design(norms=1, is_tied=True, on_every_stage=True, plain={**_ALWAYS_TIED, "use_qk_norm": False})
_GEMMA2 = replace(_COHERE, qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, norms=4, plain=_ALWAYS_TIED)

# Only what agrees to the byte with the parameters of vLLM's own class, for every unquantized model that was compared.
_DESIGNS: Mapping[str, _Design] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Phi3ForCausalLM": _LLAMA,
    # Llama's class without the bias behind attention.
    "Ernie4_5ForCausalLM": _Design(qkv_bias=_LLAMA_BIAS, is_tied=True, plain={"qkv_bias": None, "mlp_bias": False}),
    "InternLM2ForCausalLM": _Design(on_every_stage=True),
    "Qwen2ForCausalLM": _Design(qkv_bias=True, plain={"qk_norm": False}),
    "Qwen3ForCausalLM": _Design(qkv_bias=_ATTENTION_BIAS, has_head_norms=True),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": _COHERE,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(_GEMMA2, has_head_norms=True, vocab_size=262_208, plain={}),
    "MixtralForCausalLM": _Design(on_every_stage=True, experts="num_local_experts"),
    # served by Hugging Face's own classes (`vllm/model_executor/models/transformers/`)
    "HunYuanDenseV1ForCausalLM": _Design(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, has_head_norms=True),
    "Olmo2ForCausalLM": _Design(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, has_width_norms=True),
    "Starcoder2ForCausalLM": _Design(
        qkv_bias=_USE_BIAS, o_bias=_USE_BIAS, mlp_bias=_USE_BIAS, is_gated=False, norm_parts=2, is_tied=True
    ),
}
EXACT_ARCHITECTURES = frozenset(_DESIGNS)
"""Architectures whose weights are computed to the byte."""

# Here an even share is too little by more than 6 %: vLLM keeps much of these whole on every rank.
_UNEVEN_ARCHITECTURES = frozenset({"GPTBigCodeForCausalLM", "WhisperForConditionalGeneration", "Zamba2ForCausalLM"}) | {
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
}


@dataclass(frozen=True)
class Weights:
    """Bytes of one rank, an entry for each pipeline stage.

    `streamed_bytes_per_rank` is what one decode step reads of them: all but the embedding table, of which it reads single rows,
    and what a stage holds without use. A table that is tied to the head is read as the head. None for a mixture of experts, which
    reads the experts that its tokens are routed to.
    """

    bytes_per_rank: tuple[int, ...]
    streamed_bytes_per_rank: tuple[int, ...] | None


def computed_weights(config: Mapping[str, Any], model: ModelConfig, engine: EngineConfig) -> Weights | None:
    """The weights of each rank, to the byte; None where not every parameter of the model is known here.

    Known are unquantized decoders of the architectures in `EXACT_ARCHITECTURES`, given as their config.json and what was read
    from it. None also where vLLM refuses the parallelism, or the file leaves out a size.
    """
    design = _DESIGNS.get(model.architecture)
    if design is None or not _has_only_known_weights(config, design):
        return None
    element = element_bytes(served_dtype(engine)) or 0
    if element < 2:
        return None
    try:
        return _weights(Fields(config, model.architecture), design, model, engine, element)
    except UnsupportedModelError:
        return None


def checkpoint_share_bytes(
    checkpoint_bytes: int, config: Mapping[str, Any], model: ModelConfig, engine: EngineConfig
) -> int | None:
    """Bytes of one rank as an even share of a checkpoint's, plus the KV heads that ranks hold in copies.

    A float32 checkpoint counts half, since vLLM serves it in 16 bits. Measured with what vLLM's own classes hold on one rank in
    place of the checkpoint, against what they hold on each of 2, 4, 8 and 16 (62 models): never too much, too little by 0.03 % in
    the median, by up to 1 % for most models, and by 5.5 % at worst (DeepSeek-V4 on 8), chiefly where every rank holds latents and
    routers whole. What a checkpoint has and vLLM does not load, such as a multi-token-prediction layer, comes on top.

    None with pipeline parallelism, whose stages differ from their mean by up to 24 %; for `_UNEVEN_ARCHITECTURES`; where vLLM
    refuses the parallelism; and where there are copies and the file does not state `hidden_size` at its top.
    """
    if engine.pipeline_parallel_size > 1 or model.architecture in _UNEVEN_ARCHITECTURES:
        return None
    served = element_bytes(served_dtype(engine))
    stored = element_bytes(model.dtype or served_dtype(engine))
    if served is None or stored is None:
        return None
    if _has_quantized_weights(config):
        # Formats differ; a byte an element is right for fp8, and copies are few.
        served = stored = 1
    fields = Fields(config, model.architecture)
    try:
        _split(fields, "num_attention_heads", model.num_attention_heads, engine)
        copies = _copied_kv_elements(fields, model, engine)
    except UnsupportedModelError:
        return None
    return checkpoint_bytes * served // stored // engine.tensor_parallel_size + copies * served


def _has_quantized_weights(config: Mapping[str, Any]) -> bool:
    return any(config.get(name) for name in _QUANTIZATION_FIELDS)


def _has_only_known_weights(config: Mapping[str, Any], design: _Design) -> bool:
    # A part with a width of its own is another model inside this one.
    has_parts = any(isinstance(value, Mapping) and "hidden_size" in value for value in config.values())
    is_changed = any(config.get(name) not in (None, plain) for name, plain in design.plain.items())
    return not (has_parts or is_changed or _has_quantized_weights(config))


def _weights(fields: Fields, design: _Design, model: ModelConfig, engine: EngineConfig, element: int) -> Weights:
    hidden = fields.hidden_size
    vocab = -(-fields.whole("vocab_size", default=design.vocab_size) // _VOCAB_PADDING) * _VOCAB_PADDING
    table = _split(fields, "vocab_size", vocab, engine) * hidden
    norm = hidden * design.norm_parts
    is_tied = fields.get("tie_word_embeddings", design.is_tied)
    feed_forward = _feed_forward(fields, design, engine)
    stages = stage_of_layers(len(model.decoder_layers), engine.pipeline_parallel_size)
    layers = [0] * engine.pipeline_parallel_size
    for stage, layer in zip(stages, model.decoder_layers, strict=True):
        layers[stage] += _attention(fields, design, model, layer, engine) + feed_forward + design.norms * norm
    last = len(layers) - 1
    resident, streamed = [], []
    for stage, parameters in enumerate(layers):
        has_head = design.on_every_stage or stage == last
        has_table = design.on_every_stage or stage == 0
        tables = int(has_table or has_head) if is_tied else has_table + has_head
        resident.append(element * (parameters + has_head * norm + tables * table))
        streamed.append(element * (parameters + (stage == last) * (norm + table)))
    return Weights(tuple(resident), None if design.experts else tuple(streamed))


def _attention(fields: Fields, design: _Design, model: ModelConfig, layer: DecoderLayer, engine: EngineConfig) -> int:
    """Parameters of one layer's attention on one rank."""
    kept = layer[0] if len(layer) == 1 else None
    if not isinstance(kept, AttentionLayer):
        raise fields.refuse("architectures", fields.architecture, "has a layer without keys and values of its own")
    hidden, head = fields.hidden_size, kept.head_size
    queries = _split(fields, "num_attention_heads", model.num_attention_heads, engine) * head
    qkv = queries + 2 * heads_of_rank(kept.num_kv_heads, engine) * head
    parameters = hidden * (qkv + queries)
    parameters += _is_on(fields, design.qkv_bias) * qkv + _is_on(fields, design.o_bias) * hidden
    if design.has_width_norms:
        # What a norm over all heads becomes when ranks hold copies of some was never compared.
        _split(fields, "num_key_value_heads", kept.num_kv_heads, engine)
        parameters += (model.num_attention_heads + kept.num_kv_heads) * head
    return parameters + design.has_head_norms * 2 * head


def _feed_forward(fields: Fields, design: _Design, engine: EngineConfig) -> int:
    """Parameters of one layer's feed-forward network on one rank, with all experts and their router."""
    hidden = fields.hidden_size
    width = _split(fields, "intermediate_size", fields.whole("intermediate_size"), engine)
    ups = 2 if design.is_gated else 1
    network = (ups + 1) * hidden * width + _is_on(fields, design.mlp_bias) * (ups * width + hidden)
    if design.experts is None:
        return network
    experts = fields.whole(design.experts)
    return experts * (network + hidden)


def _copied_kv_elements(fields: Fields, model: ModelConfig, engine: EngineConfig) -> int:
    """Weights of one rank that make keys and values of heads which other ranks have too, beyond its share of one copy."""
    ranks, outputs = engine.tensor_parallel_size, 0
    for kept in (kept for layer in model.decoder_layers for kept in layer if isinstance(kept, AttentionLayer)):
        copied = heads_of_rank(kept.num_kv_heads, engine) * ranks - kept.num_kv_heads
        outputs += copied * (kept.head_size + kept.head_size_v)
    return outputs * fields.hidden_size // ranks if outputs else 0


def _is_on(fields: Fields, switch: _Switch) -> bool:
    return switch if isinstance(switch, bool) else any(fields.get(name, default) for name, default in switch.items())


def _split(fields: Fields, name: str, size: int, engine: EngineConfig) -> int:
    ranks = engine.tensor_parallel_size
    if size % ranks:
        raise fields.refuse(name, size, f"cannot be split over {ranks} ranks")
    return size // ranks
