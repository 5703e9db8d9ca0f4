"""What pynvml is asked of one device, in the exporter's units: bytes, hertz, ratios 0-1.

Each function makes its calls for one handle and raises what pynvml raises. Rules that name no other source are those of the NVML
API reference, "Device Queries" and "Multi Instance GPU Management".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml  # type: ignore[import-untyped]

from kvcache_exporter.gpu_reading import GpuProcess
from kvcache_exporter.sources.nvml.errors import NOT_SUPPORTED, error_name

# pynvml has no annotations; a handle is a pointer type of its own.
Handle = Any
Memory = tuple[int | None, int | None, int | None]

NO_MEMORY: Memory = (None, None, None)

# How drivers and WSL say that they have no memory v2: drivers before 510 lack the function, WSL answers UNKNOWN.
_NO_MEMORY_V2 = frozenset({"function_not_found", "not_supported", "unknown", "argument_version_mismatch"})

# The kernel gives no greater one (PID_MAX_LIMIT). Bindings that do not match the driver have put bytes into this field.
_MAX_PID = 4194304

_THROTTLE_BITS = (
    (pynvml.nvmlClocksThrottleReasonSwPowerCap, "power_cap"),
    (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown, "thermal"),
    (pynvml.nvmlClocksThrottleReasonHwSlowdown, "hw_slowdown"),
    (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, "power_brake"),
)


def _present(*functions: str) -> tuple[Callable[..., Any], ...]:
    return tuple(getattr(pynvml, function) for function in functions if hasattr(pynvml, function))


# The newest first; a driver that lacks it may have the next, and so may a pynvml. Clock reasons were renamed in driver 535.
_THROTTLE_REASONS = _present("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
_PROCESS_LISTS = tuple(
    _present(f"nvmlDeviceGet{kind}RunningProcesses_v3", f"nvmlDeviceGet{kind}RunningProcesses_v2")
    for kind in ("Compute", "Graphics", "MPSCompute")
)


def handle_at(index: int) -> Handle:
    """Return the handle of the device that NVML has at `index` now."""
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def uuid(handle: Handle) -> str:
    """Return `GPU-...` or `MIG-...`; raises UnicodeDecodeError if it is not text."""
    return _text(pynvml.nvmlDeviceGetUUID(handle))


def name(handle: Handle) -> str:
    """Return the product name, for a MIG instance with its profile at the end; raises UnicodeDecodeError if it is not text."""
    return _text(pynvml.nvmlDeviceGetName(handle))


def driver_version() -> str | None:
    """Return the version of the kernel driver; None if it cannot be had."""
    try:
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        return None


def memory(handle: Handle) -> Memory:
    """Return total, used and reserved bytes; reserved is None, and part of used, where only memory v1 is there.

    None of all three for 0 of 0, the answer of GPUs that share the system's memory, which is not a measurement.
    """
    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        reserved = info.reserved
    except pynvml.NVMLError as error:
        if error_name(error) not in _NO_MEMORY_V2:
            raise
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        reserved = None
    return (info.total, info.used, reserved) if info.total else NO_MEMORY


def utilization(handle: Handle) -> tuple[float, float]:
    """Return the share of the last sample period with a kernel running, and with memory being read or written."""
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu / 100, rates.memory / 100


def max_memory_clock_hertz(handle: Handle) -> float | None:
    """Return the highest memory clock; None for the 0 of a GPU that has no memory of its own."""
    megahertz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)
    return megahertz * 1e6 if megahertz else None


def memory_bus_width_bits(handle: Handle) -> int | None:
    """Return the width of the memory bus; None for the 0 of a GPU that has no memory of its own."""
    bits: int = pynvml.nvmlDeviceGetMemoryBusWidth(handle)
    return bits or None


def minor_number(handle: Handle) -> int:
    """Return N of the device file /dev/nvidiaN."""
    number: int = pynvml.nvmlDeviceGetMinorNumber(handle)
    return number


def throttle_reasons(handle: Handle) -> frozenset[str]:
    """Return why the clocks are lower than they could be now, of gpu_reading.THROTTLE_REASONS."""
    bits = _newest(_THROTTLE_REASONS, handle)
    return frozenset(reason for bit, reason in _THROTTLE_BITS if bits & bit)


def ecc_uncorrected_errors(handle: Handle) -> int:
    """Return uncorrected memory errors since the driver was loaded."""
    errors: int = pynvml.nvmlDeviceGetTotalEccErrors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    return errors


def processes(handle: Handle) -> tuple[GpuProcess, ...] | None:
    """Return the processes of all lists that this GPU has, by pid; None if it has none of the lists.

    Entries for one pid are one process, and the largest is right. NVML's 2^64-1, memory that cannot be told, is None in pynvml
    already. Fails if a list fails: with a part of them, a process would seem gone.
    """
    found: dict[int, int | None] = {}
    answered = False
    for versions in _PROCESS_LISTS:
        try:
            listed = _newest(versions, handle)
        except Exception as error:
            if error_name(error) not in NOT_SUPPORTED:
                raise
            continue
        answered = True
        for process in listed:
            # 0 stands for a process of another pid namespace.
            if 0 < process.pid <= _MAX_PID:
                sizes = (process.usedGpuMemory, found.get(process.pid))
                found[process.pid] = max((size for size in sizes if size is not None), default=None)
    return tuple(GpuProcess(pid, found[pid]) for pid in sorted(found)) if answered else None


def mig_mode(handle: Handle) -> bool:
    """Tell whether the GPU is cut into MIG instances now."""
    current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    return bool(current)


def mig_places(handle: Handle) -> int:
    """Return how many MIG instances the GPU can have at most."""
    places: int = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    return places


def mig_instance(handle: Handle, place: int) -> Handle | None:
    """Return the handle of the MIG instance at a place; None if there is none."""
    try:
        return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_FOUND:
            raise
        return None


def _newest(versions: tuple[Callable[..., Any], ...], handle: Handle) -> Any:  # noqa: ANN401
    """Ask with the newest of these functions that the driver has."""
    for function in versions[:-1]:
        try:
            return function(handle)
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
    return versions[-1](handle)


def _text(value: str | bytes) -> str:
    """Return the same text for both kinds of strings that pynvml has returned over time; raises UnicodeDecodeError."""
    return value.decode() if isinstance(value, bytes) else value
