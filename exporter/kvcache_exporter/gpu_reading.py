"""What NVML says of the GPUs of this machine: immutable values that cross from `sources/` into the core.

Every field that is not known is None. Sizes are bytes, ratios are 0-1, clocks are hertz.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NO_COUNTS: Mapping[str, int] = MappingProxyType({})
_NO_XIDS: Mapping[int, int] = MappingProxyType({})

THROTTLE_REASONS = ("power_cap", "thermal", "hw_slowdown", "power_brake")
"""Why a GPU can run below the clocks that it was asked for, of NVML's reasons those that tell of trouble."""


@dataclass(frozen=True)
class GpuProcess:
    """One process that holds memory of a GPU. `pid` is the host's; in some containers the memory is not known."""

    pid: int
    memory_used_bytes: int | None = None


@dataclass(frozen=True)
class MigInstance:
    """What makes a GPU reading one of a MIG instance: the GPU that it is cut from, and its profile such as `1g.10gb`."""

    parent_uuid: str
    profile: str | None = None


@dataclass(frozen=True)
class GpuReading:
    """One GPU or MIG instance as NVML reports it.

    `uuid` is "" for a device that has never said which one it is. `index` is NVML's, for a MIG instance that of its parent.
    `memory_used_bytes` excludes the driver's reserved part when `memory_reserved_bytes` is known (NVML memory v2), and includes
    it when that is None (v1). A GPU that is cut into MIG instances (`mig_enabled`) has no memory figures of its own: its
    instances have them, so that sums over readings are right.

    `utilization_ratio` is the share of time in which a kernel ran, `memory_utilization_ratio` in which memory was read or
    written. `max_memory_clock_hertz` and `memory_bus_width_bits` make the peak bandwidth. `minor_number` is N of the device file
    /dev/nvidiaN. `throttle_reasons` are of THROTTLE_REASONS. `ecc_uncorrected_errors` counts since the driver was loaded,
    `xid_errors` by Xid since the exporter started. `processes` has each pid once; None when NVML gives no list, and an empty one
    is no proof that there are none.

    A GPU that was seen before, or is counted by NVML, and does not answer now has `lost` set and no figures but its Xid errors.
    """

    uuid: str
    index: int | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    lost: bool = False
    mig_enabled: bool = False
    mig: MigInstance | None = None
    utilization_ratio: float | None = None
    memory_utilization_ratio: float | None = None
    max_memory_clock_hertz: float | None = None
    memory_bus_width_bits: int | None = None
    minor_number: int | None = None
    throttle_reasons: frozenset[str] | None = None
    ecc_uncorrected_errors: int | None = None
    xid_errors: Mapping[int, int] = field(default_factory=lambda: _NO_XIDS)
    processes: tuple[GpuProcess, ...] | None = None

    @property
    def memory_free_bytes(self) -> int | None:
        """What is neither used nor reserved; not room for requests, since vLLM takes its pool at start."""
        if self.memory_total_bytes is None or self.memory_used_bytes is None:
            return None
        return self.memory_total_bytes - self.memory_used_bytes - (self.memory_reserved_bytes or 0)


@dataclass(frozen=True)
class NvmlReading:
    """All GPUs of this machine at one moment; `device_errors` counts failed device calls by NVML error name in lower case."""

    gpus: tuple[GpuReading, ...]
    driver_version: str | None = None
    device_errors: Mapping[str, int] = field(default_factory=lambda: _NO_COUNTS)
