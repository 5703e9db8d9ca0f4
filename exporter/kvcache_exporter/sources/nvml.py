"""GPU identity and memory from NVML, through the module `pynvml` of the package nvidia-ml-py.

pynvml loads `libnvidia-ml.so.1` at the first nvmlInit and keeps it, with its function pointers, for the life of the process:
shutting NVML down does not unload it. A new session can therefore follow a driver that was reloaded, but not one that was
replaced by another version; that needs a new process, and the message of the error says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pynvml  # type: ignore[import-untyped]

from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_reading import GpuReading, NvmlReading

_ERROR_NAMES: dict[int, str] = {
    code: constant.removeprefix("NVML_ERROR_").lower()
    for constant, code in vars(pynvml).items()
    if constant.startswith("NVML_ERROR_")
}

# After these, calls of the same session keep failing although a new session may work (driver reloaded, devices given back).
_SESSION_ERRORS = frozenset({"uninitialized", "driver_not_loaded", "lib_rm_version_mismatch", "unknown"})

# How drivers and WSL say that they have no memory v2: drivers before 510 lack the function, WSL answers UNKNOWN.
_NO_MEMORY_V2 = frozenset({"function_not_found", "not_supported", "unknown", "argument_version_mismatch"})

_EXPLANATIONS = {
    "driver_not_loaded": "the NVIDIA kernel driver is not loaded on this machine",
    "lib_rm_version_mismatch": (
        "the NVML library that this process loaded is not of the version of the kernel driver; "
        "if the driver was upgraded, restart the exporter to load the new library"
    ),
    "no_permission": "this process may not open the GPU devices",
    "unknown": (
        "unknown error; in a container this mostly means that its access to the GPU devices was taken away "
        "(systemctl daemon-reload does that), and restarting the container gives it back"
    ),
}


class NoNvmlLibraryError(SourceError):
    """NVML's library could not be loaded, the normal state of a machine without NVIDIA GPUs; `reason` is `library_not_found`."""


class NvmlSource:
    """Reads all GPUs of this machine.

    Meant for one thread: calls into NVML can hang and have no deadline here. pynvml's session belongs to the process, so make
    one NvmlSource per process.
    """

    def __init__(self) -> None:
        self._open = False
        self._seen: dict[str, GpuReading] = {}

    def read(self) -> NvmlReading:
        """Return every GPU by uuid, those that were seen before and do not answer now as `lost`; sizes are bytes.

        A lost GPU keeps the index and name that it had.

        `device_errors` counts the device calls without a usable answer: by NVML error name, memory of 0 bytes as `not_supported`,
        and what cannot be understood as `invalid_answer`. nvmlInit is called at most once, and only if no session is open.

        Raises NoNvmlLibraryError if there is no NVML library, and SourceError with the lower-case NVML error name as its reason
        if NVML does not start, does not count its devices, or if its session has failed for all of them. In the last two cases
        the session is closed, so that the next read starts a new one.
        """
        if not self._open:
            _call("nvmlInit", pynvml.nvmlInit)
            self._open = True
        errors: Counter[str] = Counter()
        try:
            gpus = _read_gpus(_call("nvmlDeviceGetCount", pynvml.nvmlDeviceGetCount), errors)
        except SourceError:
            self.close()
            raise
        self._seen.update(gpus)
        lost = [GpuReading(gpu.uuid, gpu.index, gpu.name, lost=True) for gpu in self._seen.values() if gpu.uuid not in gpus]
        return NvmlReading(
            gpus=(*gpus.values(), *lost),
            driver_version=_driver_version(),
            device_errors=MappingProxyType(dict(errors)),
        )

    def close(self) -> None:
        """End the session; does nothing without one, and never raises."""
        if not self._open:
            return
        try:
            pynvml.nvmlShutdown()
        except Exception as error:
            # NVML counts nvmlInit calls, and only the last nvmlShutdown ends the session. One that failed is still owed:
            # a further nvmlInit on top of it would only raise the count, and the broken session would never end.
            self._open = _error_name(error) != "uninitialized"
        else:
            self._open = False


def _read_gpus(count: int, errors: Counter[str]) -> dict[str, GpuReading]:
    """Return the GPUs that say who they are, by uuid; raises SourceError if the session has failed for all of them."""
    gpus: dict[str, GpuReading] = {}
    for index in range(count):
        gpu = _read_gpu(index, errors)
        if gpu is not None:
            gpus.setdefault(gpu.uuid, gpu)
    # One device can fail alone; the session is at fault if none is left with memory to show, and one error is of its kind.
    session_error = next((name for name in errors if name in _SESSION_ERRORS), None)
    if session_error is not None and all(gpu.memory_total_bytes is None for gpu in gpus.values()):
        raise _source_error(session_error, "no GPU answers")
    return gpus


def _read_gpu(index: int, errors: Counter[str]) -> GpuReading | None:
    """Return the GPU at `index`, or None if it does not say which one it is; failed calls are added to `errors`."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    except Exception as error:
        errors[_error_name(error)] += 1
        return None
    try:
        name = _text(pynvml.nvmlDeviceGetName(handle))
    except Exception as error:
        errors[_error_name(error)] += 1
        name = None
    total = used = reserved = None
    try:
        total, used, reserved = _memory(handle)
    except Exception as error:
        reason = _error_name(error)
        errors[reason] += 1
        if reason == "gpu_is_lost":
            return GpuReading(uuid, index, name, lost=True)
    if total == 0:
        # GPUs that share the system's memory answer 0 of 0, which is not a measurement.
        errors["not_supported"] += 1
        total = used = reserved = None
    return GpuReading(uuid, index, name, total, used, reserved)


def _memory(handle: Any) -> tuple[int, int, int | None]:  # noqa: ANN401 - a pointer type of pynvml, which has no annotations
    """Return total, used and reserved bytes; reserved is None, and part of used, where only memory v1 is there."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if _error_name(error) not in _NO_MEMORY_V2:
            raise
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return memory.total, memory.used, None
    return memory.total, memory.used, memory.reserved


def _driver_version() -> str | None:
    try:
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        return None


def _text(value: str | bytes) -> str:
    """Return the same text for both kinds of strings that pynvml has returned over time; raises UnicodeDecodeError."""
    return value.decode() if isinstance(value, bytes) else value


def _error_name(error: Exception) -> str:
    if isinstance(error, pynvml.NVMLError):
        return _ERROR_NAMES.get(error.value, f"error_{error.value}")
    return "invalid_answer"


def _call(function: str, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - pynvml has no annotations
    try:
        return call()
    except Exception as error:
        name = _error_name(error)
        if name == "library_not_found":
            # pynvml drops the loader's own words, which tell a missing library from an empty or foreign one.
            raise NoNvmlLibraryError(name, f"NVML is not available on this machine: {error.__context__ or error}") from error
        raise _source_error(name, f"{function} failed") from error


def _source_error(name: str, what: str) -> SourceError:
    return SourceError(name, f"NVML: {what}: {_EXPLANATIONS.get(name, name.replace('_', ' '))}")
