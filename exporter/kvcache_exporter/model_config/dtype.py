"""The dtype of a model, and the cache format that its checkpoint asks for."""

from __future__ import annotations

from collections.abc import Mapping

from kvcache_exporter.model_config.fields import Fields

_MODEL_DTYPES = frozenset({"bfloat16", "float16", "float32"})


def model_dtype(fields: Fields) -> str | None:
    """`bfloat16`, `float16` or `float32`; None when the file does not say. Raises UnsupportedModelError for any other."""
    value = fields.get("dtype") or fields.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in _MODEL_DTYPES:
        raise fields.refuse("dtype", value, f"is not one of {', '.join(sorted(_MODEL_DTYPES))}")
    return name


def checkpoint_kv_cache_dtype(fields: Fields) -> str | None:
    """The cache dtype that the checkpoint asks for; FP8 weights alone ask for none.

    Fields: `kv_cache_scheme` of compressed-tensors, `kv_cache_quant_algo` of ModelOpt
    (`vllm/utils/torch_utils.py`, `resolve_kv_cache_dtype_string`). Raises UnsupportedModelError for a format that is not known.
    """
    quantization = fields.get("quantization_config") or fields.get("compression_config")
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
    if algorithm is not None:
        raise fields.refuse("kv_cache_quant_algo", algorithm, "is not a KV-cache format that this exporter knows")
    raise fields.refuse("kv_cache_scheme", scheme, "is not a KV-cache format that this exporter knows")
