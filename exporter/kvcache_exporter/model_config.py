"""config.json of a model, read into the few facts that decide the size of its KV cache.

Field names are Hugging Face's. Where families spell a fact differently, the order tried is vLLM's
(`vllm/transformers_utils/model_arch_config_convertor.py` and the model classes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcache_exporter.errors import UnsupportedModelError

# Where multimodal configs keep the language model. vLLM serves the KV cache of that part only.
_TEXT_CONFIG_FIELDS = ("text_config", "llm_config", "language_config", "thinker_config")

# model_type -> architecture, for decoders whose every layer is plain full attention in vLLM unless a field below says otherwise.
_FULL_ATTENTION_DECODERS = {
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "bloom": "BloomForCausalLM",
    "cohere": "CohereForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "falcon": "FalconForCausalLM",
    "gemma": "GemmaForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl_text": "Qwen2VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_text": "Qwen3VLForConditionalGeneration",
    "seed_oss": "SeedOssForCausalLM",
    "solar": "SolarForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}

# Multimodal architectures that add nothing to the cache of the language model inside them.
_MULTIMODAL_WRAPPERS = frozenset(
    {
        "InternVLChatModel",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)

# Fields that, when set, put another design than full attention into the layers.
_FIELDS_OF_OTHER_DESIGNS = (
    "attention_chunk_size",
    "attn_type_list",
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "full_attention_interval",
    "hybrid_override_pattern",
    "index_topk",
    "kv_lora_rank",
    "kv_source_layer_ids",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "num_kv_shared_layers",
    "sliding_window_pattern",
)

# Hugging Face's default where config.json leaves a field out and the default is another design.
_DEFAULT_SLIDING_WINDOW = {"MistralForCausalLM": 4096}

# vLLM's class for this one passes no cache settings to its attention layers, so --kv-cache-dtype changes nothing.
_IGNORES_KV_CACHE_DTYPE = frozenset({"FalconForCausalLM"})

_MODEL_DTYPES = frozenset({"bfloat16", "float16", "float32"})


@dataclass(frozen=True)
class ModelConfig:
    """The facts of one model that decide its KV cache. All layers are full attention.

    `dtype` is the model's own (`bfloat16`, `float16`, `float32`) or None when config.json does not say.
    `kv_cache_dtype` is set when the checkpoint itself asks for a quantized cache. `honours_kv_cache_dtype` is False for models
    whose cache keeps the model's own dtype whatever the engine's flag says.
    """

    architecture: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    honours_kv_cache_dtype: bool = True


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read config.json, given as the dict that it parses to.

    Raises UnsupportedModelError, naming field and value, when the architecture is not known to be plain full attention,
    or when a field is missing or contradicts another.
    """
    text, architecture = _language_model(config)
    _refuse_other_designs(text, architecture)
    num_attention_heads = _positive_int(text, architecture, "num_attention_heads", "n_head")
    return ModelConfig(
        architecture=architecture,
        num_hidden_layers=_positive_int(text, architecture, "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=_num_key_value_heads(text, architecture, num_attention_heads),
        head_dim=_head_dim(text, architecture, num_attention_heads),
        dtype=_dtype(text, architecture) or _dtype(config, architecture),
        kv_cache_dtype=_checkpoint_kv_cache_dtype(text, architecture) or _checkpoint_kv_cache_dtype(config, architecture),
        honours_kv_cache_dtype=architecture not in _IGNORES_KV_CACHE_DTYPE,
    )


def _language_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the part of the config that holds the language model, and the architecture that the whole is served as."""
    architecture = _architecture(config)
    text = config
    while inner := next((text[f] for f in _TEXT_CONFIG_FIELDS if isinstance(text.get(f), Mapping)), None):
        text = inner
    if text is config:
        if architecture not in _FULL_ATTENTION_DECODERS.values():
            raise _unknown_architecture(architecture)
        return text, architecture
    inner_architecture = _architecture(text)
    known_inside = inner_architecture in _FULL_ATTENTION_DECODERS.values()
    if architecture not in _MULTIMODAL_WRAPPERS:
        raise _unknown_architecture(architecture)
    if not known_inside:
        raise _unknown_architecture(f"{architecture} with a language model {inner_architecture}")
    return text, architecture


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    model_type = str(config.get("model_type"))
    return _FULL_ATTENTION_DECODERS.get(model_type, model_type)


def _unknown_architecture(architecture: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"architecture {architecture} is not known to be plain full attention, so its KV-cache bytes are not stated; "
        "figures in blocks go on",
        field="architectures",
        value=architecture,
    )


def _refuse_other_designs(text: Mapping[str, Any], architecture: str) -> None:
    for name in _FIELDS_OF_OTHER_DESIGNS:
        if text.get(name) not in (None, 0, [], {}, ""):
            raise _other_design(architecture, name, text[name])
    layer_types = text.get("layer_types")
    if layer_types is not None:
        others = sorted({str(t) for t in layer_types} - {"full_attention"})
        if others:
            raise _other_design(architecture, "layer_types", others)
    # Qwen2 and Qwen3 carry a window that is off unless use_sliding_window says so; vLLM follows the switch.
    elif text.get("use_sliding_window", True):
        sliding_window = text.get("sliding_window", _DEFAULT_SLIDING_WINDOW.get(architecture))
        if sliding_window:
            raise _other_design(architecture, "sliding_window", sliding_window)
    if text.get("is_encoder_decoder"):
        raise _other_design(architecture, "is_encoder_decoder", True)


def _other_design(architecture: str, field: str, value: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{architecture} with {field} = {value!r} is not plain full attention, so its KV-cache bytes are not stated; "
        "figures in blocks go on",
        field=field,
        value=value,
    )


def _num_key_value_heads(text: Mapping[str, Any], architecture: str, num_attention_heads: int) -> int:
    # Falcon's new decoder and GPT-BigCode without multi_query keep the count in the ordinary fields below.
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    fields = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
    heads = num_attention_heads
    for name in fields:
        if text.get(name) is not None:
            heads = _positive_int(text, architecture, name)
            break
    if num_attention_heads % heads:
        raise UnsupportedModelError(
            f"{architecture}: {num_attention_heads} attention heads cannot share {heads} KV heads evenly",
            field="num_key_value_heads",
            value=heads,
        )
    return heads


def _head_dim(text: Mapping[str, Any], architecture: str, num_attention_heads: int) -> int:
    for name in ("head_dim", "hidden_size_per_head", "kv_channels"):
        if text.get(name) is not None:
            return _positive_int(text, architecture, name)
    hidden_size = _positive_int(text, architecture, "hidden_size", "n_embd")
    if hidden_size % num_attention_heads:
        raise UnsupportedModelError(
            f"{architecture}: hidden_size {hidden_size} is not a multiple of {num_attention_heads} attention heads "
            "and no head_dim is given",
            field="hidden_size",
            value=hidden_size,
        )
    return hidden_size // num_attention_heads


def _dtype(config: Mapping[str, Any], architecture: str) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in _MODEL_DTYPES:
        raise UnsupportedModelError(
            f"{architecture}: dtype {value!r} is not one of {', '.join(sorted(_MODEL_DTYPES))}", field="dtype", value=value
        )
    return name


def _checkpoint_kv_cache_dtype(config: Mapping[str, Any], architecture: str) -> str | None:
    """Return the cache dtype that the checkpoint asks for; FP8 weights alone ask for none.

    Fields: `kv_cache_scheme` of compressed-tensors, `kv_cache_quant_algo` of ModelOpt
    (`vllm/utils/torch_utils.py`, `resolve_kv_cache_dtype_string`).
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(quantization, Mapping):
        return None
    nested = quantization.get("quantization")
    algorithm = quantization.get("kv_cache_quant_algo") or (
        nested.get("kv_cache_quant_algo") if isinstance(nested, Mapping) else None
    )
    scheme = quantization.get("kv_cache_scheme")
    if algorithm is None and scheme is None:
        return None
    is_fp8_scheme = isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    if str(algorithm).upper() == "FP8" or is_fp8_scheme:
        return "fp8"
    field, value = ("kv_cache_quant_algo", algorithm) if algorithm is not None else ("kv_cache_scheme", scheme)
    raise UnsupportedModelError(
        f"{architecture}: the checkpoint's {field} = {value!r} is not a KV-cache format that this exporter knows",
        field=field,
        value=value,
    )


def _positive_int(config: Mapping[str, Any], architecture: str, *names: str) -> int:
    """Return the first of the fields that is given (null counts as not given)."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UnsupportedModelError(
                f"{architecture}: {name} = {value!r} is not a positive whole number", field=name, value=value
            )
        return value
    raise UnsupportedModelError(f"{architecture}: config.json has no {' or '.join(names)}", field=names[0], value=None)
