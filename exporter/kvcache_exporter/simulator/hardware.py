"""What the simulated engine runs: the facts of Llama-3.1-8B, and an H100 as NVML would report it."""

from __future__ import annotations

from typing import Any

from kvcache_exporter.gpu_reading import GpuReading, NvmlReading

LLAMA_3_1_8B_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The config.json of Llama-3.1-8B, as far as it decides the size of weights and KV cache."""

_WEIGHT_BYTES = 8_030_261_248 * 2
_KV_CACHE_BYTES = 27_136 * 2 * 1024**2
# CUDA context, captured graphs and sampling buffers; the activation peak that vLLM also reserves is not resident.
_OVERHEAD_BYTES = 2 * 1024**3


class SimulatedNvml:
    """One H100 with a vLLM engine on it: stands in for the NVML source of an exporter.

    The memory does not move with load, since vLLM takes its pool at start; it is what the default `EngineParameters` take.
    """

    def read(self) -> NvmlReading:
        """Return the same reading each time."""
        gpu = GpuReading(
            uuid="GPU-simulated-0",
            index=0,
            name="NVIDIA H100 80GB HBM3 (simulated)",
            memory_total_bytes=85_520_809_984,
            memory_used_bytes=_WEIGHT_BYTES + _KV_CACHE_BYTES + _OVERHEAD_BYTES,
            memory_reserved_bytes=577_765_376,
        )
        return NvmlReading(gpus=(gpu,))

    def close(self) -> None:
        """Do nothing: there is no library to shut down."""
