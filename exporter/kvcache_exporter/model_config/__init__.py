"""config.json of a model -> ModelConfig: what each decoder layer keeps of a request.

Field names are Hugging Face's; where families spell a fact differently, the order tried is vLLM's. One reader an architecture
turns the file into layers of known designs (`layers.py`); what is not known is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.model_config.architectures import ARCHITECTURES, MODEL_TYPES, MULTIMODAL_WRAPPERS, Architecture
from kvcache_exporter.model_config.dtype import checkpoint_kv_cache_dtype, model_dtype
from kvcache_exporter.model_config.fields import Fields
from kvcache_exporter.model_config.layers import DecoderLayer
from kvcache_exporter.model_config.max_model_len import derived_max_model_len
from kvcache_exporter.model_config.params_json import config_from_params, is_params_json

__all__ = ["ModelConfig", "parse_model_config"]

# Where multimodal configs keep the language model. vLLM serves the KV cache of that part only.
_TEXT_CONFIG_FIELDS = ("text_config", "llm_config", "language_config", "thinker_config")

# Fields that no reader here knows and that change what is stored: their presence makes every formula wrong.
_UNKNOWN_DESIGN_FIELDS = ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")


@dataclass(frozen=True)
class ModelConfig:
    """The facts of one model that decide its KV cache.

    `decoder_layers` has one entry a decoder layer, `draft_layer` what each multi-token-prediction layer keeps when speculation
    uses it. `dtype` is the model's own (`bfloat16`, `float16`, `float32`) or None when config.json does not say; `kv_cache_dtype`
    is set when the checkpoint itself asks for a quantized cache, `ssm_dtype` when the file fixes the dtype of recurrent states.
    `max_model_len` (tokens) is what vLLM derives when no flag gives one. The other fields are those of Architecture.
    """

    architecture: str
    num_attention_heads: int
    decoder_layers: tuple[DecoderLayer, ...]
    draft_layer: DecoderLayer | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    ssm_dtype: str | None = None
    max_model_len: int | None = None
    honours_kv_cache_dtype: bool = True
    has_prefill_checkpoint: bool = False


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read config.json, or Mistral's params.json, given as the dict that it parses to.

    Raises UnsupportedModelError, naming field and value, when the architecture is not known, or when a field is missing or
    contradicts another.
    """
    if is_params_json(config):
        config = config_from_params(config)
    text, name, architecture = _language_model(config)
    fields, outer = Fields(text, name, architecture.defaults), Fields(config, name)
    for unknown in _UNKNOWN_DESIGN_FIELDS:
        if fields.get(unknown) is not None:
            raise fields.refuse(unknown, fields.get(unknown), "stands for a cache layout that this exporter does not know")
    return ModelConfig(
        architecture=name,
        num_attention_heads=fields.num_attention_heads,
        decoder_layers=tuple(architecture.reader(fields)),
        draft_layer=None if architecture.draft_layer is None else architecture.draft_layer(fields),
        dtype=model_dtype(fields) or model_dtype(outer),
        kv_cache_dtype=checkpoint_kv_cache_dtype(fields) or checkpoint_kv_cache_dtype(outer),
        ssm_dtype=fields.get("mamba_ssm_dtype") or fields.get("mamba_ssm_cache_dtype") or architecture.ssm_dtype,
        max_model_len=derived_max_model_len(fields),
        honours_kv_cache_dtype=architecture.honours_kv_cache_dtype,
        has_prefill_checkpoint=architecture.has_prefill_checkpoint,
    )


def _language_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str, Architecture]:
    """Return the part of the config that holds the language model, the name that it is served as, and its reader."""
    name = _architecture_name(config)
    text = config
    while inner := next((text[f] for f in _TEXT_CONFIG_FIELDS if isinstance(text.get(f), Mapping)), None):
        text = inner
    if name in ARCHITECTURES:
        return text, name, ARCHITECTURES[name]
    if text is config or name not in MULTIMODAL_WRAPPERS:
        raise _unknown(name)
    inner_name = _architecture_name(text)
    if inner_name not in ARCHITECTURES:
        raise _unknown(f"{name} with a language model {inner_name}")
    return text, name, ARCHITECTURES[inner_name]


def _architecture_name(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    model_type = str(config.get("model_type"))
    return MODEL_TYPES.get(model_type, model_type)


def _unknown(architecture: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the KV-cache layout of architecture {architecture} is not known, so its bytes are not stated; figures in blocks go on",
        field="architectures",
        value=architecture,
    )
