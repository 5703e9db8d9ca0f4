"""The catalogue: each metric that is published, what it is called and says, and what it reads."""

from __future__ import annotations

from kvcache_exporter import __version__
from kvcache_exporter.families.engine import ENGINE_FAMILIES, ENGINE_GPU_INFO, ENGINE_INFO
from kvcache_exporter.families.family import Family, Labelled
from kvcache_exporter.families.gpu import GPU_FAMILIES, GPU_INFO
from kvcache_exporter.families.source import HEALTH_FAMILIES, TARGET_FAMILIES

__all__ = [
    "BUILD_INFO",
    "ENGINE_FAMILIES",
    "ENGINE_GPU_INFO",
    "ENGINE_INFO",
    "FAMILIES",
    "GPUS",
    "GPU_FAMILIES",
    "GPU_INFO",
    "HEALTH_FAMILIES",
    "TARGET_FAMILIES",
    "Family",
    "Labelled",
]

GPUS = Family(
    "kvcache_gpus",
    "GPUs of this machine that answer, MIG instances not counted (NVML); 0 where NVML works and shows none, as in a container "
    "that was given no GPU. Absent when NVML fails or is not there.",
    (),
    lambda gpus: [((), sum(not gpu.lost and gpu.mig is None for gpu in gpus))],
)

BUILD_INFO = Family(
    "kvcache_exporter_build_info",
    "1; version of the exporter, and whether what it shows is simulated.",
    ("version", "simulated"),
    lambda simulated: [((__version__, simulated), 1)],
)

FAMILIES = (
    *ENGINE_FAMILIES,
    ENGINE_INFO,
    ENGINE_GPU_INFO,
    *TARGET_FAMILIES,
    *HEALTH_FAMILIES,
    GPUS,
    *GPU_FAMILIES,
    GPU_INFO,
    BUILD_INFO,
)
