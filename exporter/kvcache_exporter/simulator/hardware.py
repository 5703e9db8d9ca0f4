"""What the simulated engine runs: the facts of Llama-3.1-8B, and an H100 as NVML would report it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvcache_exporter.gpu_owners import EnginePlace, EngineProcess
from kvcache_exporter.gpu_reading import GpuProcess, GpuReading, NvmlReading

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

GPU_UUID = "GPU-simulated-0"

_WEIGHT_BYTES = 8_030_261_248 * 2
_KV_CACHE_BYTES = 27_136 * 2 * 1024**2
# CUDA context, captured graphs and sampling buffers; the activation peak that vLLM also reserves is not resident.
_OVERHEAD_BYTES = 2 * 1024**3
# A process beside the engine, and the pids of both: as with NVML, of no process that can be looked up in a container.
_OTHER_BYTES = 528 * 1024**2
_ENGINE_PID, _OTHER_PID = 4_000_001, 4_000_002


class SimulatedNvml:
    """One H100 with a vLLM engine and another process on it: stands in for the NVML source of an exporter.

    The memory does not move with load, since vLLM takes its pool at start; it is what the default `EngineParameters` take.
    """

    def read(self) -> NvmlReading:
        """Return the same reading each time."""
        gpu = GpuReading(
            uuid=GPU_UUID,
            index=0,
            name="NVIDIA H100 80GB HBM3 (simulated)",
            memory_total_bytes=85_520_809_984,
            memory_used_bytes=_WEIGHT_BYTES + _KV_CACHE_BYTES + _OVERHEAD_BYTES + _OTHER_BYTES,
            memory_reserved_bytes=577_765_376,
            max_memory_clock_hertz=2.619e9,
            memory_bus_width_bits=5120,
            throttle_reasons=frozenset(),
            ecc_uncorrected_errors=0,
            processes=(
                GpuProcess(_ENGINE_PID, _WEIGHT_BYTES + _KV_CACHE_BYTES + _OVERHEAD_BYTES),
                GpuProcess(_OTHER_PID, _OTHER_BYTES),
            ),
        )
        return NvmlReading(gpus=(gpu,))

    def close(self) -> None:
        """Do nothing: there is no library to shut down."""


class SimulatedProcesses:
    """Says which process on the simulated GPU is the engine's: stands in for the process table of an exporter."""

    def engines_of(self, places: Mapping[str, EnginePlace], pids: Collection[int]) -> Mapping[str, tuple[EngineProcess, ...]]:
        """Return the engine's process for each target."""
        return {name: (EngineProcess(_ENGINE_PID),) for name in places if _ENGINE_PID in pids}
