"""Engines and GPUs, joined: who is on which GPU, what each GPU's memory is made of, how much of its bandwidth decoding takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvcache_exporter.config import TargetConfig
from kvcache_exporter.gpu_memory import MemorySplit, Tenant, split_memory
from kvcache_exporter.gpu_owners import (
    EngineGpus,
    EngineProcess,
    Parallelism,
    configured_gpus,
    find_container,
    owners_of,
    pod_gpus,
    process_gpus,
    uuid_of_device,
)
from kvcache_exporter.gpu_reading import GpuReading, NvmlReading
from kvcache_exporter.memory_bandwidth import bandwidth_utilization
from kvcache_exporter.node_gpus import NodeReading, uuids_in_order
from kvcache_exporter.snapshot import EngineSnapshot, GpuSnapshot, TargetSnapshot
from kvcache_exporter.visible_devices import resolve_devices


@dataclass(frozen=True)
class Node:
    """Targets whose engines know their GPUs, and the GPUs with what they hold."""

    targets: tuple[TargetSnapshot, ...]
    gpus: tuple[GpuSnapshot, ...]


class GpuPlacement:
    """Places the engines of targets on GPUs.

    GPUs that are configured by index are looked up once, when NVML first lists all of them: so did the engine when it started,
    and indexes move when a GPU is lost.
    """

    def __init__(self) -> None:
        self._configured: dict[str, tuple[str, ...]] = {}

    def forget(self, name: str) -> None:
        """Another target may take this name: what was looked up for it holds no longer."""
        self._configured.pop(name, None)

    def place(self, node: NodeReading, targets: Sequence[TargetSnapshot], configs: Mapping[str, TargetConfig]) -> Node:
        """Join one tick's readings; without NVML no engine is placed. `configs` has each target's settings by its name."""
        if node.nvml is None:
            return Node(tuple(targets), ())
        placed = {target.name: self._gpus_of(target, configs[target.name], node, node.nvml) for target in targets}
        readings = {gpu.uuid: gpu for gpu in node.nvml.gpus}
        processes = node.processes or {}
        # An engine that is nowhere could be anywhere, and its processes would pass for those of others.
        tenants_known = node.processes is not None and all(placed.values())
        engines = {(target.name, engine.reading.engine): engine for target in targets for engine in target.engines}
        return Node(
            targets=tuple(_with_gpus(target, placed[target.name], readings) for target in targets),
            gpus=tuple(
                GpuSnapshot(gpu, _split(gpu, placed, engines, configs, processes, tenants_known=tenants_known))
                for gpu in node.nvml.gpus
            ),
        )

    def _gpus_of(
        self, target: TargetSnapshot, config: TargetConfig, node: NodeReading, nvml: NvmlReading
    ) -> tuple[EngineGpus, ...]:
        """The GPUs of each engine of a target by the first way that tells them; empty when none does."""
        names = tuple(engine.reading.engine for engine in target.engines)
        # How many ranks an engine has decides which of them is where.
        if not names or config.unknown_arguments:
            return ()
        parallelism = Parallelism(names, config.tensor_parallel_size, config.pipeline_parallel_size)
        order = uuids_in_order(nvml)
        if config.gpus is not None:
            return configured_gpus(self._resolve_configured(config, order), parallelism)
        if config.pod is not None and node.containers is not None:
            container = find_container(node.containers, config.pod)
            devices = () if container is None else container.devices
            uuids = [uuid for device in devices if (uuid := uuid_of_device(device, nvml.gpus)) is not None]
            if uuids and len(uuids) == len(devices):
                return pod_gpus(uuids, parallelism)
        processes = (node.processes or {}).get(target.name, ())
        return process_gpus(processes, nvml.gpus, parallelism)

    def _resolve_configured(self, config: TargetConfig, order: Sequence[str]) -> tuple[str, ...]:
        known = self._configured.get(config.name)
        if known is not None:
            return known
        uuids = resolve_devices(order, config.gpus or ())
        if len(uuids) == len(config.gpus or ()) and all(uuids):
            self._configured[config.name] = uuids
            return uuids
        return ()


def _split(
    gpu: GpuReading,
    placed: Mapping[str, Sequence[EngineGpus]],
    engines: Mapping[tuple[str, str], EngineSnapshot],
    configs: Mapping[str, TargetConfig],
    processes: Mapping[str, tuple[EngineProcess, ...]],
    *,
    tenants_known: bool,
) -> MemorySplit | None:
    tenants = [
        _tenant(configs[name], engines[name, one.engine], one, gpu.uuid, processes.get(name))
        for name, one in owners_of(placed, gpu.uuid)
    ]
    return split_memory(gpu, tenants, tenants_known=tenants_known)


def _tenant(
    config: TargetConfig, engine: EngineSnapshot, gpus: EngineGpus, uuid: str, processes: Sequence[EngineProcess] | None
) -> Tenant:
    """What the engine holds there. One that sleeps has given memory back, and its page does not tell how much."""
    pids = None if processes is None else frozenset(process.pid for process in processes)
    if engine.reading.awake is False:
        return Tenant(None, None, pids)
    stage = None if gpus.stages is None else gpus.stages[gpus.uuids.index(uuid)]
    pool = _pool_bytes_per_rank(config, engine)
    weights = None if engine.weights is None else engine.weights.bytes_per_rank
    return Tenant(_at_stage(pool, stage), _at_stage(weights, stage), pids)


def _pool_bytes_per_rank(config: TargetConfig, engine: EngineSnapshot) -> tuple[int, ...] | None:
    blocks, layout = engine.reading.num_gpu_blocks, engine.layout
    if blocks is None or layout is None or layout.engine.pipeline_parallel_size != config.pipeline_parallel_size:
        return None
    return tuple(size * blocks for size in layout.bytes_per_block_per_rank)


def _at_stage(per_rank: Sequence[int] | None, stage: int | None) -> int | None:
    """The entry of a stage; where the stage is not known, the one that all have in common."""
    if per_rank is None:
        return None
    if stage is not None:
        return per_rank[stage] if stage < len(per_rank) else None
    return per_rank[0] if len(set(per_rank)) == 1 else None


def _with_gpus(target: TargetSnapshot, placed: Sequence[EngineGpus], readings: Mapping[str, GpuReading]) -> TargetSnapshot:
    by_engine = {one.engine: one for one in placed}
    engines = tuple(
        _engine_with_gpus(engine, by_engine[engine.reading.engine], readings) if engine.reading.engine in by_engine else engine
        for engine in target.engines
    )
    return replace(target, engines=engines)


def _engine_with_gpus(engine: EngineSnapshot, gpus: EngineGpus, readings: Mapping[str, GpuReading]) -> EngineSnapshot:
    there = [readings[uuid] for uuid in gpus.uuids if uuid in readings]
    utilization = None
    if engine.decode_reads is not None and len(there) == len(gpus.uuids):
        utilization = bandwidth_utilization(engine.decode_reads, there)
    return replace(engine, gpus=gpus, memory_bandwidth_utilization_ratio=utilization)
