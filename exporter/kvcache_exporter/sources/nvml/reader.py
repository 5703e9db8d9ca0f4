"""One device as a reading: who it is, its memory, the figures that can each be missing alone, and its MIG instances."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcache_exporter.gpu_reading import GpuReading, MigInstance
from kvcache_exporter.sources.nvml import device
from kvcache_exporter.sources.nvml.device import NO_MEMORY, Handle, Memory
from kvcache_exporter.sources.nvml.errors import LOST_ERRORS, Asked, error_name
from kvcache_exporter.sources.nvml.events import XidEvents

# NVML names an instance "NVIDIA H100 80GB HBM3 MIG 1g.10gb"; with "1c." before and "+me" or the like behind, if it has that.
_PROFILE = re.compile(r"\bMIG ((?:\d+c\.)?\d+g\.\d+gb\S*)$")


@dataclass(frozen=True)
class DeviceResult:
    """What one device answered: the GPU and behind it its MIG instances, none of them if it does not say which GPU it is.

    `errors` names the calls without a usable answer. `failure` is the one of identity or memory: such a device does not answer.
    """

    gpus: tuple[GpuReading, ...]
    errors: tuple[str, ...]
    failure: str | None = None


class DeviceReader:
    """Reads devices by index; threads may share it if no two read the same device.

    What does not change in a session (name, clocks, what a GPU lacks) is asked once for each uuid; `forget` ends a session.
    `identities` has uuid and name by index, as soon as they are known and as long as the session.
    """

    def __init__(self, events: XidEvents) -> None:
        self.identities: dict[int, tuple[str, str | None]] = {}
        self._events = events
        self._facts: dict[tuple[str, Callable[..., Any]], Any] = {}

    def forget(self) -> None:
        """Drop what is known from the session that ends."""
        self.identities.clear()
        self._facts.clear()

    def read(self, index: int) -> DeviceResult:
        """Return what the device at `index` answers; nothing that NVML may answer is raised."""
        try:
            handle = device.handle_at(index)
            uuid = device.uuid(handle)
        except Exception as error:
            reason = error_name(error)
            return DeviceResult((), (reason,), reason)
        asked = Asked()
        self.identities[index] = (uuid, self._facts.get((uuid, device.name)))
        name = self._fact(asked, device.name, uuid, handle)
        self.identities[index] = (uuid, name)
        # Before anything can fail: the Xids of a GPU that is about to be lost say why.
        self._events.register(handle, uuid, asked)
        if self._mig_enabled(asked, uuid, handle):
            gpu = self._gpu(asked, index, uuid, name, handle, NO_MEMORY, mig_enabled=True)
            return DeviceResult((gpu, *self._instances(asked, index, uuid, handle)), tuple(asked.errors))
        memory, failure = _memory(asked, handle)
        if failure in LOST_ERRORS:
            lost = GpuReading(uuid, index, name, lost=True, xid_errors=self._events.counts(uuid))
            return DeviceResult((lost,), tuple(asked.errors), failure)
        gpu = self._gpu(asked, index, uuid, name, handle, memory, mig_enabled=False)
        return DeviceResult((gpu,), tuple(asked.errors), failure)

    def _gpu(
        self, asked: Asked, index: int, uuid: str, name: str | None, handle: Handle, memory: Memory, *, mig_enabled: bool
    ) -> GpuReading:
        # With MIG, NVML has no utilization, and the processes stand with the instances.
        kernel, access = (None, None) if mig_enabled else asked.ask(device.utilization, handle) or (None, None)
        return GpuReading(
            uuid,
            index,
            name,
            *memory,
            mig_enabled=mig_enabled,
            utilization_ratio=kernel,
            memory_utilization_ratio=access,
            max_memory_clock_hertz=self._fact(asked, device.max_memory_clock_hertz, uuid, handle),
            memory_bus_width_bits=self._fact(asked, device.memory_bus_width_bits, uuid, handle),
            minor_number=self._fact(asked, device.minor_number, uuid, handle),
            throttle_reasons=asked.ask(device.throttle_reasons, handle),
            ecc_uncorrected_errors=asked.ask(device.ecc_uncorrected_errors, handle),
            xid_errors=self._events.counts(uuid),
            processes=None if mig_enabled else asked.ask(device.processes, handle),
        )

    def _instances(self, asked: Asked, index: int, parent_uuid: str, parent: Handle) -> list[GpuReading]:
        found = []
        for place in range(asked.ask(device.mig_places, parent) or 0):
            handle = asked.ask(device.mig_instance, parent, place)
            uuid: str | None = None if handle is None else asked.ask(device.uuid, handle)
            if uuid is None:
                continue
            name = self._fact(asked, device.name, uuid, handle)
            profile = _PROFILE.search(name or "")
            memory, _ = _memory(asked, handle)
            mig = MigInstance(parent_uuid, profile[1] if profile else None)
            found.append(GpuReading(uuid, index, name, *memory, mig=mig, processes=asked.ask(device.processes, handle)))
        return found

    def _mig_enabled(self, asked: Asked, uuid: str, handle: Handle) -> bool:
        """Tell whether MIG is on; that it can be switched is what does not change."""
        key = (uuid, device.mig_mode)
        if key in self._facts:
            return False
        enabled = asked.ask(device.mig_mode, handle)
        if enabled is None and not asked.failed:
            self._facts[key] = None
        return bool(enabled)

    def _fact(self, asked: Asked, call: Callable[..., Any], uuid: str, handle: Handle) -> Any:  # noqa: ANN401
        """Return what does not change in a session; only an error is a reason to ask again."""
        key = (uuid, call)
        if key not in self._facts:
            value = asked.ask(call, handle)
            if asked.failed:
                return None
            self._facts[key] = value
        return self._facts[key]


def _memory(asked: Asked, handle: Handle) -> tuple[Memory, str | None]:
    """Return the memory, and the name of the error if the device fails; memory that is not supported is counted as an error."""
    try:
        memory = device.memory(handle)
    except Exception as error:
        name = error_name(error)
        asked.errors.append(name)
        return NO_MEMORY, None if name == "not_supported" else name
    if memory == NO_MEMORY:
        asked.errors.append("not_supported")
    return memory, None
