"""What is published of one GPU or MIG instance, as NVML reports it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvcache_exporter.families.family import Family, Labelled
from kvcache_exporter.gpu_memory import COMPONENTS
from kvcache_exporter.gpu_reading import THROTTLE_REASONS, GpuReading
from kvcache_exporter.memory_bandwidth import peak_bandwidth
from kvcache_exporter.snapshot import GpuSnapshot

_GPU_LABELS = ("gpu", "uuid")


def _gpu(name: str, documentation: str, read: Callable[[GpuReading], float | None], *, is_counter: bool = False) -> Family:
    def one(gpu: GpuSnapshot) -> Iterable[Labelled]:
        return [((), read(gpu.reading))]

    return Family(name, documentation, _GPU_LABELS, one, is_counter)


def _components(gpu: GpuSnapshot) -> Iterator[Labelled]:
    if gpu.memory is not None:
        yield from (((component,), gpu.memory.components.get(component)) for component in COMPONENTS)


def _throttled(gpu: GpuSnapshot) -> Iterator[Labelled]:
    reasons = gpu.reading.throttle_reasons
    if reasons is not None:
        yield from (((reason,), float(reason in reasons)) for reason in THROTTLE_REASONS)


def _xids(gpu: GpuSnapshot) -> Iterator[Labelled]:
    for xid, number in gpu.reading.xid_errors.items():
        yield (str(xid),), number


GPU_FAMILIES = (
    _gpu(
        "kvcache_gpu_memory_total_bytes",
        "Memory of the GPU or MIG instance (NVML). Absent where NVML has no figure, as on GPUs that share the system's memory, "
        "and for a GPU that is cut into MIG instances, which have their own.",
        lambda gpu: gpu.memory_total_bytes,
    ),
    _gpu(
        "kvcache_gpu_memory_used_bytes",
        "Memory in use (NVML). vLLM takes its pool at start, so this is not the use of the KV cache. Drivers without "
        "memory v2 count the reserved part in; then kvcache_gpu_memory_reserved_bytes is absent.",
        lambda gpu: gpu.memory_used_bytes,
    ),
    _gpu(
        "kvcache_gpu_memory_reserved_bytes",
        "Memory that the driver keeps for itself (NVML memory v2).",
        lambda gpu: gpu.memory_reserved_bytes,
    ),
    Family(
        "kvcache_gpu_memory_component_bytes",
        "What the memory of the GPU is made of; adds up to its total. kv_cache: the engines' whole pools, used or not (computed "
        "from their blocks and config.json). weights: configured, or from config.json or the checkpoint. other_processes: those "
        "that are no engine's (NVML). overhead: the rest of what is used, such as CUDA contexts, graphs, and activations that "
        "PyTorch keeps. unknown: what is used and cannot be told apart, since one of the others is not known. reserved, free: "
        "NVML; free is not room for requests.",
        (*_GPU_LABELS, "component"),
        _components,
    ),
    _gpu(
        "kvcache_gpu_utilization_ratio",
        "Share of time in which any kernel ran, 0-1 (NVML, over its last sample of up to a second). Absent on MIG instances.",
        lambda gpu: gpu.utilization_ratio,
    ),
    _gpu(
        "kvcache_gpu_memory_controller_utilization_ratio",
        "Share of time in which memory was read or written, 0-1 (NVML). Not the share of the bandwidth. Absent on MIG instances.",
        lambda gpu: gpu.memory_utilization_ratio,
    ),
    _gpu(
        "kvcache_gpu_memory_bandwidth_peak_bytes_per_second",
        "What the memory can move at most: its highest clock times bus width, at both edges of the clock (computed from NVML). "
        "Absent on MIG instances, and where NVML does not tell.",
        peak_bandwidth,
    ),
    Family(
        "kvcache_gpu_throttled",
        "1 while the GPU runs slower for this reason, else 0 (NVML): power_cap, thermal, hw_slowdown, power_brake.",
        (*_GPU_LABELS, "reason"),
        _throttled,
    ),
    _gpu(
        "kvcache_gpu_ecc_uncorrected_errors_total",
        "Uncorrected memory errors since the driver was loaded (NVML). Absent where ECC is off or not there.",
        lambda gpu: gpu.ecc_uncorrected_errors,
        is_counter=True,
    ),
    Family(
        "kvcache_gpu_xid_errors_total",
        "Xid errors that the driver reported since the exporter started (NVML events). No series for an Xid that did not come.",
        (*_GPU_LABELS, "xid"),
        _xids,
        is_counter=True,
    ),
    _gpu(
        "kvcache_gpu_up",
        "1 for a GPU that answers, 0 for one that was seen, or is counted or configured, and does not answer.",
        lambda gpu: float(not gpu.lost),
    ),
)

GPU_INFO = Family(
    "kvcache_gpu_info",
    "1; name of the GPU and version of its driver; for a MIG instance its profile and the GPU that it is part of.",
    (*_GPU_LABELS, "name", "mig_profile", "parent_uuid", "driver_version", "simulated"),
    lambda gpu, driver_version, simulated: [((*_gpu_info(gpu.reading), driver_version or "", simulated), 1)],
)


def _gpu_info(gpu: GpuReading) -> tuple[str, str, str]:
    return (gpu.name or "", "", "") if gpu.mig is None else (gpu.name or "", gpu.mig.profile or "", gpu.mig.parent_uuid)
