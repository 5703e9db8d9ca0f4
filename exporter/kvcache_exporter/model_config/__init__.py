"""config.json of a model -> ModelConfig: what each decoder layer keeps of a request.

Field names are Hugging Face's; where families spell a fact differently, the order tried is vLLM's. One reader an architecture
turns the file into layers of known designs (`layers.py`). What is not known is refused by name, unless it is plainly a decoder of
full attention; then it is marked as assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.model_config.architectures import ARCHITECTURES, MODEL_TYPES, MULTIMODAL_WRAPPERS, Architecture
from kvcache_exporter.model_config.attention import attention_decoder
from kvcache_exporter.model_config.defaults import defaults_of
from kvcache_exporter.model_config.dtype import checkpoint_kv_cache_dtype, model_dtype
from kvcache_exporter.model_config.fields import HEAD_SIZE_FIELDS, Fields
from kvcache_exporter.model_config.layers import DecoderLayer
from kvcache_exporter.model_config.max_model_len import read_max_model_len
from kvcache_exporter.model_config.params_json import config_from_params, is_params_json
from kvcache_exporter.model_config.standard import speaks_against

__all__ = ["ModelConfig", "parse_model_config"]

# Where multimodal configs keep the language model. vLLM serves the KV cache of that part only.
_TEXT_CONFIG_FIELDS = ("text_config", "llm_config", "language_config", "thinker_config")

# Fields that change what is stored: their presence makes every reader wrong that does not know them.
_UNKNOWN_DESIGN_FIELDS = ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "use_cla")


@dataclass(frozen=True)
class ModelConfig:
    """The facts of one model that decide its KV cache.

    `decoder_layers` has one entry a decoder layer, `draft_layer` what each multi-token-prediction layer keeps when speculation
    uses it. `dtype` is the model's own (`bfloat16`, `float16`, `float32`) or None when config.json does not say; `kv_cache_dtype`
    is set when the checkpoint itself asks for a quantized cache, `ssm_dtype` when the file fixes the dtype of recurrent states.
    `max_model_len` (tokens) is what vLLM derives when no flag gives one, `longest_max_model_len` what a flag may ask for at most;
    None: the file states no length. `is_assumed` marks an unknown architecture that was taken for a plain decoder of full
    attention (`standard.py`). The other fields are those of Architecture.
    """

    architecture: str
    num_attention_heads: int
    decoder_layers: tuple[DecoderLayer, ...]
    draft_layer: DecoderLayer | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    ssm_dtype: str | None = None
    max_model_len: int | None = None
    longest_max_model_len: int | None = None
    honours_kv_cache_dtype: bool = True
    has_prefill_checkpoint: bool = False
    is_assumed: bool = False


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read config.json, or Mistral's params.json, given as the dict that it parses to.

    Raises UnsupportedModelError, naming field and value, when the architecture is not known, or when a field is missing or
    contradicts another.
    """
    is_params = is_params_json(config)
    if is_params:
        config = config_from_params(config)
    found = _language_model(config)
    name, architecture = found.name, found.architecture
    # params.json states all that its model has: nothing is left to defaults.
    defaults = {} if is_params else defaults_of((found.text.get("model_type"), *architecture.model_types))
    fields = Fields(_without_head_size(found.text) if architecture.derives_head_dim else found.text, name, defaults)
    outer = Fields(config, name)
    length = read_max_model_len(fields)
    return ModelConfig(
        architecture=name,
        num_attention_heads=fields.num_attention_heads,
        decoder_layers=tuple(architecture.reader(fields)),
        draft_layer=None if architecture.draft_layer is None else architecture.draft_layer(fields),
        dtype=model_dtype(fields) or model_dtype(outer),
        kv_cache_dtype=checkpoint_kv_cache_dtype(fields) or checkpoint_kv_cache_dtype(outer),
        ssm_dtype=_ssm_dtype(fields, architecture),
        max_model_len=None if length is None else length.derived,
        longest_max_model_len=None if length is None else length.longest,
        honours_kv_cache_dtype=architecture.honours_kv_cache_dtype,
        has_prefill_checkpoint=architecture.has_prefill_checkpoint,
        is_assumed=found.is_assumed,
    )


def _without_head_size(text: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in text.items() if name not in HEAD_SIZE_FIELDS}


def _ssm_dtype(fields: Fields, architecture: Architecture) -> str | None:
    stated = None if architecture.ssm_dtype_field is None else fields.text(architecture.ssm_dtype_field)
    return stated or architecture.ssm_dtype


@dataclass(frozen=True)
class _LanguageModel:
    """The part of the file that holds the language model, the name that it is served as, and how it is read."""

    text: Mapping[str, Any]
    name: str
    architecture: Architecture
    is_assumed: bool = False


def _language_model(config: Mapping[str, Any]) -> _LanguageModel:
    name = _architecture_name(config)
    text = config
    while inner := next((text[f] for f in _TEXT_CONFIG_FIELDS if isinstance(text.get(f), Mapping)), None):
        text = inner
    own_fields = ARCHITECTURES[name].own_fields if name in ARCHITECTURES else frozenset()
    for unknown in _UNKNOWN_DESIGN_FIELDS:
        if text.get(unknown) and unknown not in own_fields:
            why = "stands for a cache layout that this exporter does not know"
            raise Fields(text, name).refuse(unknown, text[unknown], why)
    if name in ARCHITECTURES:
        return _LanguageModel(text, name, ARCHITECTURES[name])
    inner_name = _architecture_name(text)
    if text is not config and inner_name in ARCHITECTURES:
        if name in MULTIMODAL_WRAPPERS:
            return _LanguageModel(text, name, ARCHITECTURES[inner_name])
        raise _unknown(name, f"what it adds to {inner_name} is not known")
    reason = speaks_against(config.get("architectures"), text)
    if reason is None and inner_name not in ("None", name):
        reason = f"neither is its language model {inner_name}"
    if reason is not None:
        raise _unknown(name, reason)
    return _LanguageModel(text, name, Architecture(attention_decoder), is_assumed=True)


def _architecture_name(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    model_type = str(config.get("model_type"))
    return MODEL_TYPES.get(model_type, model_type)


def _unknown(architecture: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the KV-cache layout of architecture {architecture} is not known, and {reason}; "
        "its bytes are not stated, figures in blocks go on",
        field="architectures",
        value=architecture,
    )
