"""Which GPUs an engine runs on, and which processes on them are its own.

An engine of `ranks` workers (tensor times pipeline parallel) runs on as many GPUs. Three things can tell which: the operator, the
kubelet, and the processes that hold the memory. What none of them tells is left out, never guessed from an index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcache_exporter.gpu_reading import GpuReading

CONFIGURED = "configured"
POD_RESOURCES = "pod_resources"
PROCESS = "process"


@dataclass(frozen=True)
class ContainerGpus:
    """The GPUs that the kubelet has given to one container, as its device plugin names them: uuids, or device files.

    `shared` is set where others may have been given the same GPU (time slicing, MPS).
    """

    namespace: str
    pod: str
    container: str
    devices: tuple[str, ...]
    shared: bool = False


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine runs: the address of its API server, and the id of its container where a container runtime has told it."""

    url: str
    container_id: str | None = None


@dataclass(frozen=True)
class EngineProcess:
    """A process of an engine that holds GPU memory. Ranks are of the process's title, None where it has none."""

    pid: int
    data_parallel_rank: int | None = None
    pipeline_parallel_rank: int | None = None
    tensor_parallel_rank: int | None = None


@dataclass(frozen=True)
class Parallelism:
    """The engines of a target (their data-parallel ranks, in order) and the shape of each."""

    engines: tuple[str, ...]
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def ranks(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class EngineGpus:
    """The GPUs of one engine on this machine, by uuid; `method` is how they were told.

    `stages` is the pipeline stage of the worker on each GPU, None where that is not known: they are then all of one size, or
    their shares cannot be told.
    """

    engine: str
    uuids: tuple[str, ...]
    method: str
    stages: tuple[int, ...] | None = None


def configured_gpus(uuids: Sequence[str], parallelism: Parallelism) -> tuple[EngineGpus, ...]:
    """Share out GPUs that are given in the order of the engine's CUDA_VISIBLE_DEVICES.

    Workers take them in the order of their ranks, tensor-parallel rank first, one data-parallel engine after the other (vLLM,
    `DPEngineCoreProc` and `Worker.init_device`). Fewer than the ranks of a single engine are its part on this machine. Empty when
    there are not enough for several engines.
    """
    ranks, engines = parallelism.ranks, parallelism.engines
    if len(engines) == 1:
        mine = tuple(uuids[:ranks])
        return (EngineGpus(engines[0], mine, CONFIGURED, _stages(mine, parallelism)),) if mine else ()
    if len(uuids) < ranks * len(engines):
        return ()
    shares = [tuple(uuids[start * ranks : (start + 1) * ranks]) for start in range(len(engines))]
    return tuple(
        EngineGpus(engine, share, CONFIGURED, _stages(share, parallelism)) for engine, share in zip(engines, shares, strict=True)
    )


def pod_gpus(uuids: Sequence[str], parallelism: Parallelism) -> tuple[EngineGpus, ...]:
    """The GPUs of a container as those of its engine; the kubelet does not tell in which order the container sees them.

    Empty for several engines, and for more GPUs than the engine has ranks: which it takes cannot be told.
    """
    if len(parallelism.engines) != 1 or not 0 < len(uuids) <= parallelism.ranks:
        return ()
    stages = (0,) * len(uuids) if parallelism.pipeline_parallel_size == 1 else None
    return (EngineGpus(parallelism.engines[0], tuple(uuids), POD_RESOURCES, stages),)


def process_gpus(
    processes: Sequence[EngineProcess], gpus: Sequence[GpuReading], parallelism: Parallelism
) -> tuple[EngineGpus, ...]:
    """The GPUs on which an engine's processes hold memory; a process that is on several is where it holds the most.

    Empty for several engines unless each process tells its data-parallel rank.
    """
    placed = [(process, uuid) for process in processes if (uuid := _home(process.pid, gpus)) is not None]
    if len(parallelism.engines) == 1:
        by_engine = {parallelism.engines[0]: placed}
    elif any(process.data_parallel_rank is None for process, _ in placed):
        return ()
    else:
        by_engine = {
            engine: [(process, uuid) for process, uuid in placed if str(process.data_parallel_rank) == engine]
            for engine in parallelism.engines
        }
    return tuple(_of_processes(engine, found, parallelism) for engine, found in by_engine.items() if found)


def _of_processes(engine: str, placed: Sequence[tuple[EngineProcess, str]], parallelism: Parallelism) -> EngineGpus:
    ordered = sorted(placed, key=lambda one: (one[0].pipeline_parallel_rank or 0, one[0].tensor_parallel_rank or 0))
    stage_of = {uuid: process.pipeline_parallel_rank for process, uuid in ordered}
    if parallelism.pipeline_parallel_size == 1:
        stage_of = dict.fromkeys(stage_of, 0)
    stages = tuple(stage for stage in stage_of.values() if stage is not None)
    return EngineGpus(engine, tuple(stage_of), PROCESS, stages if len(stages) == len(stage_of) else None)


def _home(pid: int, gpus: Sequence[GpuReading]) -> str | None:
    holds = {gpu.uuid: process.memory_used_bytes or 0 for gpu in gpus for process in gpu.processes or () if process.pid == pid}
    return max(holds, key=lambda uuid: holds[uuid]) if holds else None


def _stages(uuids: Sequence[str], parallelism: Parallelism) -> tuple[int, ...] | None:
    if len(uuids) < parallelism.ranks and parallelism.pipeline_parallel_size > 1:
        return None
    return tuple(rank // parallelism.tensor_parallel_size for rank in range(len(uuids)))


def uuid_of_device(device: str, gpus: Sequence[GpuReading]) -> str | None:
    """The uuid that a device of a ContainerGpus stands for; None where it names no GPU or MIG instance here.

    GKE's plugin names device files, such as `nvidia0`; their number is not NVML's index.
    """
    uuid_of = {f"nvidia{gpu.minor_number}": gpu.uuid for gpu in gpus if gpu.minor_number is not None}
    uuid_of.update({gpu.uuid: gpu.uuid for gpu in gpus})
    return uuid_of.get(device)


def find_container(containers: Sequence[ContainerGpus], pod: str) -> ContainerGpus | None:
    """The container that `pod` names as `namespace/pod` or `namespace/pod/container`; None if it is not there, or is not one."""
    namespace, _, rest = pod.partition("/")
    name, _, container = rest.partition("/")
    found = [
        one
        for one in containers
        if one.namespace == namespace and one.pod == name and (not container or one.container == container)
    ]
    return found[0] if len(found) == 1 else None


def owners_of(engine_gpus: Mapping[str, Sequence[EngineGpus]], uuid: str) -> tuple[tuple[str, EngineGpus], ...]:
    """The engines on one GPU, each with the name of its target."""
    return tuple((target, one) for target, engines in engine_gpus.items() for one in engines if uuid in one.uuids)
