"""What a GPU's memory is made of: parts that add up to its total, and a part that says what cannot be told.

vLLM's reserve for the peak of activations is not resident: until a large batch has run it is in `free`; then PyTorch keeps it,
and it is in `overhead` (`vllm/v1/worker/gpu_worker.py`, `determine_available_memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvcache_exporter.gpu_reading import GpuReading

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
OVERHEAD = "overhead"
OTHER_PROCESSES = "other_processes"
UNKNOWN = "unknown"
RESERVED = "reserved"
FREE = "free"

COMPONENTS = (WEIGHTS, KV_CACHE, OVERHEAD, OTHER_PROCESSES, UNKNOWN, RESERVED, FREE)
"""All components, in the order in which they are shown."""


@dataclass(frozen=True)
class Tenant:
    """What one engine holds on one GPU, in bytes: its whole KV pool, null block included, and its weights. None: not known.

    `pids` are its processes on this machine, None where it is not known which they are.
    """

    kv_cache_bytes: int | None
    weight_bytes: int | None
    pids: frozenset[int] | None = None


@dataclass(frozen=True)
class MemorySplit:
    """Bytes by component, of COMPONENTS, adding up to the total that NVML reports. One that is not there is not known.

    `contradiction`: the engines' parts came to more than NVML says is in use, so they were left out.
    """

    components: Mapping[str, int]
    contradiction: bool = False


def split_memory(gpu: GpuReading, tenants: Sequence[Tenant], *, tenants_known: bool) -> MemorySplit | None:
    """Split the memory of one GPU; None where NVML has no figures for it.

    `tenants` are the engines on it. `tenants_known` is set when all engines of this machine are known to be placed, so that what
    holds memory here and is none of `tenants` is no engine.

    `overhead` is what is used and is neither weights, cache nor another process: CUDA contexts, graphs, workspaces, activations
    that PyTorch keeps, and the driver's reserve where NVML does not tell it apart. When one of the others cannot be told,
    `unknown` stands for it and the overhead together.
    """
    total, used = gpu.memory_total_bytes, gpu.memory_used_bytes
    if total is None or used is None:
        return None
    frame = {FREE: gpu.memory_free_bytes or 0}
    if gpu.memory_reserved_bytes is not None:
        frame[RESERVED] = gpu.memory_reserved_bytes
    if not tenants:
        return MemorySplit({**frame, (OTHER_PROCESSES if tenants_known else UNKNOWN): used})
    parts = _parts(gpu, tenants, tenants_known=tenants_known)
    rest = used - sum(parts.values())
    if rest < 0:
        return MemorySplit({**frame, UNKNOWN: used}, contradiction=True)
    is_complete = parts.keys() == {WEIGHTS, KV_CACHE, OTHER_PROCESSES}
    return MemorySplit({**frame, **parts, (OVERHEAD if is_complete else UNKNOWN): rest})


def _parts(gpu: GpuReading, tenants: Sequence[Tenant], *, tenants_known: bool) -> dict[str, int]:
    parts = {
        WEIGHTS: _sum([tenant.weight_bytes for tenant in tenants]),
        KV_CACHE: _sum([tenant.kv_cache_bytes for tenant in tenants]),
        OTHER_PROCESSES: _other_processes(gpu, [tenant.pids for tenant in tenants]) if tenants_known else None,
    }
    return {component: size for component, size in parts.items() if size is not None}


def _other_processes(gpu: GpuReading, pids: Sequence[Collection[int] | None]) -> int | None:
    """Memory of the processes that are no engine's; None where the list is missing or incomplete.

    A list without the engines' own processes is one of those that NVML cuts short, as it does in containers.
    """
    if gpu.processes is None or any(not ours for ours in pids):
        return None
    ours = {pid for one in pids for pid in one or ()}
    listed = {process.pid for process in gpu.processes}
    if any(not listed.intersection(one or ()) for one in pids):
        return None
    return _sum([process.memory_used_bytes for process in gpu.processes if process.pid not in ours])


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
