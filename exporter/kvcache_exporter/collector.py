"""Snapshot -> metric families, fresh at every scrape.

One engine looks like this:

    kvcache_usage_ratio{target="llama",engine="0",model_name="llama-3.1-8b"} 0.62
    kvcache_remaining_request_slots{target="llama",engine="0",model_name="llama-3.1-8b",length="max"} 21.0
    kvcache_up{target="llama",source="vllm"} 1.0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvcache_exporter.families import (
    BUILD_INFO,
    ENGINE_FAMILIES,
    ENGINE_GPU_INFO,
    ENGINE_INFO,
    FAMILIES,
    GPU_FAMILIES,
    GPU_INFO,
    GPUS,
    HEALTH_FAMILIES,
    TARGET_FAMILIES,
    Family,
    Labelled,
)
from kvcache_exporter.gpu_reading import GpuReading
from kvcache_exporter.snapshot import GpuSnapshot, Snapshot, TargetSnapshot

# A reading that nothing has replaced for this many intervals is no longer shown.
STALE_INTERVALS = 3


class KVCacheCollector(Collector):
    """Shows the newest snapshot.

    `latest` returns it, `clock` gives Unix seconds, and readings older than `stale_seconds` are left out.
    """

    def __init__(
        self,
        latest: Callable[[], Snapshot | None],
        *,
        clock: Callable[[], float] = time.time,
        stale_seconds: float,
        simulated: bool = False,
    ) -> None:
        self._latest = latest
        self._clock = clock
        self._stale_seconds = stale_seconds
        self._simulated = "true" if simulated else "false"

    def describe(self) -> Iterable[Metric]:
        """Return the families without samples, so that registering does not wait for a snapshot."""
        return [family.empty() for family in FAMILIES]

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have samples."""
        page = _PageOfFamilies()
        page.add(BUILD_INFO, (), BUILD_INFO.read(self._simulated))
        snapshot = self._latest()
        if snapshot is not None:
            for target in snapshot.targets:
                self._add_target(page, target, snapshot.gpus)
            for health in snapshot.health:
                for family in HEALTH_FAMILIES:
                    page.add(family, (health.target, health.source), family.read(health))
            if snapshot.nvml is not None and self._is_fresh(snapshot.nvml_read_at):
                self._add_gpus(page, snapshot.gpus, snapshot.nvml.driver_version)
        yield from page.families()

    def _add_gpus(self, page: _PageOfFamilies, gpus: Sequence[GpuSnapshot], driver_version: str | None) -> None:
        page.add(GPUS, (), GPUS.read([gpu.reading for gpu in gpus]))
        for gpu in gpus:
            labels = (_index(gpu.reading), gpu.reading.uuid)
            for family in GPU_FAMILIES:
                page.add(family, labels, family.read(gpu))
            page.add(GPU_INFO, labels, GPU_INFO.read(gpu, driver_version, self._simulated))

    def _add_target(self, page: _PageOfFamilies, target: TargetSnapshot, gpus: Sequence[GpuSnapshot]) -> None:
        if target.read_at is not None and not self._is_fresh(target.read_at):
            return
        indexes = {gpu.reading.uuid: _index(gpu.reading) for gpu in gpus}
        for family in TARGET_FAMILIES:
            page.add(family, (target.name,), family.read(target, self._simulated))
        for engine in target.engines:
            labels = (target.name, engine.reading.engine, engine.model_name)
            for family in ENGINE_FAMILIES:
                page.add(family, labels, family.read(engine))
            page.add(ENGINE_INFO, labels, ENGINE_INFO.read(engine, target, self._simulated))
            page.add(ENGINE_GPU_INFO, labels, ENGINE_GPU_INFO.read(engine, lambda uuid: indexes.get(uuid, "")))

    def _is_fresh(self, read_at: float | None) -> bool:
        return read_at is not None and self._clock() - read_at <= self._stale_seconds


def _index(gpu: GpuReading) -> str:
    return "" if gpu.index is None else str(gpu.index)


class _PageOfFamilies:
    """The families of one scrape, in the order of FAMILIES; those without samples are left out."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, family: Family, labels: Sequence[str], samples: Iterable[Labelled]) -> None:
        for more, value in samples:
            if value is None:
                continue
            metric = self._families.get(family.name)
            if metric is None:
                metric = self._families[family.name] = family.empty()
            metric.add_metric((*labels, *more), value)  # type: ignore[attr-defined]  # all kinds that empty() makes have it

    def families(self) -> Iterator[Metric]:
        for family in FAMILIES:
            metric = self._families.get(family.name)
            if metric is not None:
                yield metric
