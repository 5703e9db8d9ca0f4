"""GPUs by name: the memory that NVML reports, which decides some of vLLM's defaults. Figures: vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_exporter.kv_cache_spec.engine_config import GIB


@dataclass(frozen=True)
class Gpu:
    """`name` as people write it, memory in bytes of one GPU."""

    name: str
    memory_bytes: int


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 80 * GIB),
        Gpu("H100-NVL", 94 * GIB),
        Gpu("H200", 141 * GIB),
        Gpu("H20", 96 * GIB),
        Gpu("GH200", 96 * GIB),
        Gpu("B200", 180 * GIB),
        Gpu("B300", 270 * GIB),
        Gpu("GB200", 186 * GIB),
        Gpu("A100-80", 80 * GIB),
        Gpu("A100-40", 40 * GIB),
        Gpu("A10G", 24 * GIB),
        Gpu("L4", 24 * GIB),
        Gpu("L40S", 48 * GIB),
        Gpu("RTX-PRO-6000", 96 * GIB),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU whose name is in `name` (`H100`, `NVIDIA H100 80GB HBM3`); the longest match wins. Raises ValueError."""
    wanted = name.upper().replace(" ", "-")
    matches = [gpu for gpu in GPUS.values() if gpu.name in wanted or all(part in wanted for part in gpu.name.split("-"))]
    if not matches:
        raise ValueError(f"{name!r} is not a GPU that is known here: {', '.join(GPUS)}")
    return max(matches, key=lambda gpu: len(gpu.name))
