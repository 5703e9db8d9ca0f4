"""The GPUs of this machine from tick to tick: NVML, and what tells which engine is on which of them.

Each source has a thread of its own; one that hangs or fails takes its own figures along and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvcache_exporter.config import Config, TargetConfig
from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_owners import ContainerGpus, EnginePlace, EngineProcess
from kvcache_exporter.gpu_reading import GpuReading, NvmlReading
from kvcache_exporter.health import HealthBook
from kvcache_exporter.job import Job, Outcome
from kvcache_exporter.sources.nvml import NoNvmlLibraryError
from kvcache_exporter.visible_devices import resolve_devices

log = logging.getLogger(__name__)

T = TypeVar("T")

SOURCE_NVML = "nvml"
SOURCE_PROCESSES = "processes"
SOURCE_POD_RESOURCES = "pod_resources"

# Processes are looked up when those on the GPUs change, and again after this long: a pid may have gone to another process.
_PROCESSES_SECONDS = 60.0


class GpuSource(Protocol):
    """What reads GPUs: the real NVML, or a simulated one."""

    def read(self) -> NvmlReading:
        """Return all GPUs, or raise SourceError."""


class ProcessSource(Protocol):
    """What tells the processes of engines on this machine."""

    def engines_of(self, places: Mapping[str, EnginePlace], pids: Collection[int]) -> Mapping[str, tuple[EngineProcess, ...]]:
        """Return the processes among `pids` of each target that runs here, or raise SourceError."""


class PodResourcesSource(Protocol):
    """What tells the GPUs of containers on this machine."""

    def list(self) -> tuple[ContainerGpus, ...]:
        """Return the containers that have GPUs, or raise SourceError."""


@dataclass(frozen=True)
class GpuSources:
    """What is asked about GPUs: NVML, and what tells whose they are; None for what is not asked."""

    nvml: GpuSource
    processes: ProcessSource | None = None
    pod_resources: PodResourcesSource | None = None


@dataclass(frozen=True)
class NodeReading:
    """What this tick says of the GPUs; None for what was not read. `processes` are those of each target that runs here."""

    nvml: NvmlReading | None = None
    processes: Mapping[str, tuple[EngineProcess, ...]] | None = None
    containers: tuple[ContainerGpus, ...] | None = None


class NodeGpus:
    """Reads the GPUs and their owners, each source in its own thread."""

    def __init__(self, config: Config, sources: GpuSources) -> None:
        seconds = config.poll_timeout_seconds
        self._nvml = _SourceState(
            SOURCE_NVML, Job("nvml", sources.nvml.read), seconds, "NVML does not answer; its driver may hang"
        )
        self._no_library = False
        self._reported: set[str] = set()
        self._selection = None if config.gpus is None else GpuSelection(config.gpus)
        self._containers = None
        if sources.pod_resources is not None:
            self._containers = _SourceState(
                SOURCE_POD_RESOURCES, Job("pod resources", sources.pod_resources.list), seconds, "the kubelet does not answer"
            )
        self._processes = None if sources.processes is None else _ProcessState(sources.processes, config)

    def start(self, now: float, targets: Mapping[str, TargetConfig]) -> None:
        """Begin to read. `targets` are those of this tick, by name."""
        if not self._no_library:
            self._nvml.start()
        if self._containers is not None:
            self._containers.start()
        if self._processes is not None:
            self._processes.start(now, {name: EnginePlace(one.url, one.container_id) for name, one in targets.items()})

    def finish(self, now: float, deadline: float, health: HealthBook) -> NodeReading:
        """Wait until `deadline` (of the monotonic clock) for what was begun."""
        reading = None if self._no_library else self._finish_nvml(now, deadline, health)
        containers = None if self._containers is None else self._containers.finish(now, deadline, health)
        processes = None if self._processes is None else self._processes.finish(now, deadline, health, reading)
        return NodeReading(reading, processes, containers)

    def _finish_nvml(self, now: float, deadline: float, health: HealthBook) -> NvmlReading | None:
        outcome = self._nvml.wait(deadline, health)
        if outcome is not None and isinstance(outcome.error, NoNvmlLibraryError):
            self._no_library = True
            log.info("no GPU series", extra={"fields": {"reason": str(outcome.error)}})
            return None
        reading = self._nvml.take(outcome, now, health)
        if reading is None:
            return None
        for reason, number in reading.device_errors.items():
            health.count("", SOURCE_NVML, reason, number)
        self._report_once(reading)
        return reading if self._selection is None else self._selection.of(reading)

    def _report_once(self, reading: NvmlReading) -> None:
        new = reading.device_errors.keys() - self._reported
        self._reported = set(reading.device_errors)
        if new:
            log.warning("GPU calls without an answer", extra={"fields": {"reasons": ", ".join(sorted(new))}})


class _SourceState(Generic[T]):
    """One source: a job that is not begun again before it has come back, and counted as hung once."""

    def __init__(self, source: str, job: Job[T], timeout_seconds: float, hung_sentence: str) -> None:
        self._source = source
        self._job = job
        self._timeout_seconds = timeout_seconds
        self._hung_sentence = hung_sentence
        self._is_hung = False

    def start(self) -> bool:
        """Begin, unless the call before has not come back."""
        began = self._job.start()
        if began:
            self._is_hung = False
        return began

    def finish(self, now: float, deadline: float, health: HealthBook) -> T | None:
        """Wait for the value; None when there is none, and why is in the health."""
        return self.take(self.wait(deadline, health), now, health)

    def wait(self, deadline: float, health: HealthBook) -> Outcome[T] | None:
        """Wait until `deadline`; a call that was found to hang is not waited for again."""
        outcome = self._job.finish(0.0 if self._is_hung else deadline - time.monotonic())
        if outcome is None and not self._is_hung:
            self._is_hung = True
            error = SourceError("hung", f"{self._hung_sentence} (waited {self._timeout_seconds:g} s)")
            health.failure("", self._source, error, duration_seconds=self._timeout_seconds)
        return outcome

    def take(self, outcome: Outcome[T] | None, now: float, health: HealthBook) -> T | None:
        """The value of an outcome, with its health noted."""
        if outcome is None:
            return None
        if outcome.error is not None:
            health.failure("", self._source, outcome.error, duration_seconds=outcome.duration_seconds)
        elif outcome.value is not None:
            health.success("", self._source, at=now, duration_seconds=outcome.duration_seconds)
        return outcome.value


class _ProcessState:
    """The engines' processes: looked up beside the next tick when those on the GPUs have changed, and kept till the next time."""

    def __init__(self, processes: ProcessSource, config: Config) -> None:
        self._places: Mapping[str, EnginePlace] = {}
        self._pids: frozenset[int] = frozenset()
        self._looked_up: tuple[frozenset[int], Mapping[str, EnginePlace]] | None = None
        self._look_up_at = 0.0
        self._is_pending = False
        self._found: Mapping[str, tuple[EngineProcess, ...]] | None = None
        job = Job("processes", lambda: processes.engines_of(self._places, self._pids))
        self._state = _SourceState(SOURCE_PROCESSES, job, config.poll_timeout_seconds, "/proc does not answer")

    def start(self, now: float, places: Mapping[str, EnginePlace]) -> None:
        self._places = places
        wanted = (self._pids, places)
        if self._pids and (wanted != self._looked_up or now >= self._look_up_at) and self._state.start():
            self._looked_up, self._look_up_at = wanted, now + _PROCESSES_SECONDS
            self._is_pending = True

    def finish(
        self, now: float, deadline: float, health: HealthBook, reading: NvmlReading | None
    ) -> Mapping[str, tuple[EngineProcess, ...]] | None:
        if self._is_pending:
            outcome = self._state.wait(deadline, health)
            self._is_pending = outcome is None
            self._found = self._state.take(outcome, now, health)
        if reading is None:
            return None
        self._pids = frozenset(process.pid for gpu in reading.gpus for process in gpu.processes or ())
        # Of processes and engines that came since, nothing is known yet: one could be the other's.
        return self._found if (self._pids, self._places) == self._looked_up else None


class GpuSelection:
    """The GPUs that the operator wants to see.

    Indexes are looked up once, when NVML first lists enough GPUs: they move when a GPU is lost, and uuids do not.
    """

    def __init__(self, entries: tuple[str, ...]) -> None:
        self._entries = entries
        self._uuids: dict[str, str] = {}

    def of(self, reading: NvmlReading) -> NvmlReading:
        """The reading without the GPUs that are not wanted; one that is wanted and not there is shown as lost."""
        order = uuids_in_order(reading)
        for entry in self._entries:
            found = resolve_devices(order, [entry])
            if found and found[0]:
                self._uuids.setdefault(entry, found[0])
        wanted = {uuid: entry for entry, uuid in self._uuids.items()}
        gpus = [gpu for gpu in reading.gpus if gpu.uuid in wanted or (gpu.mig is not None and gpu.mig.parent_uuid in wanted)]
        there = {gpu.uuid for gpu in gpus}
        for entry in self._entries:
            uuid = self._uuids.get(entry, "" if entry.isdecimal() else entry)
            if uuid not in there:
                gpus.append(GpuReading(uuid, int(entry) if entry.isdecimal() else None, lost=True))
        return NvmlReading(tuple(gpus), reading.driver_version, reading.device_errors)


def uuids_in_order(reading: NvmlReading) -> tuple[str, ...]:
    """The uuids of whole GPUs in NVML's order, lost ones at the index that they had unless another has it now."""
    by_index: dict[int, str] = {}
    for gpu in sorted(reading.gpus, key=lambda gpu: gpu.lost):
        if gpu.mig is None and gpu.index is not None:
            by_index.setdefault(gpu.index, gpu.uuid)
    return tuple(by_index.get(index, "") for index in range(max(by_index, default=-1) + 1))
