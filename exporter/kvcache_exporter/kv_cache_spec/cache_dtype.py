"""Bytes that one token takes in one KV head, by cache dtype (`vllm/v1/kv_cache_interface.py`, attention backends)."""

from __future__ import annotations

from kvcache_exporter.errors import UnsupportedModelError

# vLLM's names, and the short ones that people write.
_ELEMENT_BYTES = {
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "half": 2,
    "fp16": 2,
    "float32": 4,
    "float": 4,
    "fp32": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
# Packed formats with one fp32 scale for each key and each value: bits of an element.
_PER_TOKEN_HEAD_BITS = {"int8_per_token_head": 8, "fp8_per_token_head": 8, "int4_per_token_head": 4}
# (bits of a key element, bits of a value element); 8-bit keys carry no norm beside them.
_TURBOQUANT_BITS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
_NVFP4 = ("nvfp4", "nvfp4_4over6")


def element_bytes(cache_dtype: str) -> int | None:
    """Bytes of one element where all elements are stored alike, else None (a packed format)."""
    return _ELEMENT_BYTES.get(cache_dtype)


def is_quantized(cache_dtype: str) -> bool:
    """Whether elements are smaller than the model's."""
    size = element_bytes(cache_dtype)
    return size is None or size < 2


def is_turboquant(cache_dtype: str) -> bool:
    """Whether this is one of the formats that leave the outer layers of a dense model as they are."""
    return cache_dtype in _TURBOQUANT_BITS


def head_bytes(cache_dtype: str, head_size: int, head_size_v: int) -> int:
    """Bytes of one key and one value in one head. Raises UnsupportedModelError for a dtype that is not known."""
    size = element_bytes(cache_dtype)
    if size is not None:
        return (head_size + head_size_v) * size
    if cache_dtype in _PER_TOKEN_HEAD_BITS:
        return (head_size + head_size_v) * _PER_TOKEN_HEAD_BITS[cache_dtype] // 8 + 2 * 4
    if cache_dtype in _NVFP4:
        # Half a byte an element, and one scale byte for each 16.
        return sum(size // 2 + size // 16 for size in (head_size, head_size_v))
    if cache_dtype in _TURBOQUANT_BITS:
        key_bits, value_bits = _TURBOQUANT_BITS[cache_dtype]
        key = head_size if key_bits == 8 else _bytes_of(head_size * key_bits) + 2
        slot = key + _bytes_of(head_size_v * value_bits) + 4
        return slot + slot % 2
    if cache_dtype == "ultraquant_4bit":
        # Four bits an element, and a scale byte for each 32 of them.
        return sum(size // 2 + size // 32 for size in (head_size, head_size_v))
    raise unknown_cache_dtype(cache_dtype)


def unknown_cache_dtype(cache_dtype: str) -> UnsupportedModelError:
    """The refusal of a cache dtype."""
    known = [*_ELEMENT_BYTES, *_PER_TOKEN_HEAD_BITS, *_NVFP4, *_TURBOQUANT_BITS, "ultraquant_4bit", "fp8_ds_mla"]
    return UnsupportedModelError(
        f"kv_cache_dtype {cache_dtype!r} is not one of {', '.join(known)}", field="kv_cache_dtype", value=cache_dtype
    )


def _bytes_of(bits: int) -> int:
    return -(-bits // 8)
