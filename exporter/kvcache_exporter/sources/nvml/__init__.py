"""GPUs from NVML, through the module `pynvml` of the package nvidia-ml-py.

pynvml loads `libnvidia-ml.so.1` at the first nvmlInit and keeps it, with its function pointers, for the life of the process:
shutting NVML down does not unload it. A new session can therefore follow a driver that was reloaded, but not one that was
replaced by another version; that needs a new process, and the message of the error says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import pynvml  # type: ignore[import-untyped]

from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_reading import GpuReading, NvmlReading
from kvcache_exporter.sources.nvml.device import driver_version
from kvcache_exporter.sources.nvml.errors import SESSION_ERRORS, NoNvmlLibraryError, call, error_name, source_error
from kvcache_exporter.sources.nvml.events import XidEvents
from kvcache_exporter.sources.nvml.reader import DeviceReader, DeviceResult
from kvcache_exporter.sources.nvml.walk import DeviceWalk

__all__ = ["NoNvmlLibraryError", "NvmlSource"]


class NvmlSource:
    """Reads all GPUs of this machine.

    Meant for one thread, with a deadline on it: nvmlInit and nvmlDeviceGetCount can hang. Calls for one device are made in a
    thread of their own, and one that takes longer than `device_timeout_seconds` costs that device only. pynvml's session belongs
    to the process, so make one NvmlSource per process.
    """

    def __init__(self, device_timeout_seconds: float = 1.0) -> None:
        self._open = False
        self._seen: dict[str, GpuReading] = {}
        self._events = XidEvents()
        self._reader = DeviceReader(self._events)
        self._walk = DeviceWalk(self._reader.read, timeout_seconds=device_timeout_seconds)

    def read(self) -> NvmlReading:
        """Return every GPU by uuid, those that were seen before or are counted and do not answer now as `lost`.

        A lost GPU keeps the index and name that it had, and its Xid errors. One that never said which it is has "" for its uuid.
        Behind a GPU that is cut into MIG instances come these; one that is not there any more is not lost, but gone.

        `device_errors` counts the device calls without a usable answer: by NVML error name, memory of 0 bytes as `not_supported`,
        what cannot be understood as `invalid_answer`, and devices with a call that has not returned as `hung`. Other figures than
        memory that a GPU does not support are no errors. nvmlInit is called at most once, and only if no session is open.

        Raises NoNvmlLibraryError if there is no NVML library, and SourceError with the lower-case NVML error name as its reason
        if NVML does not start, does not count its devices, or if its session has failed for all of them; in the last two cases
        the session is closed, so that the next read starts a new one. The reason is `hung` if calls for all of them hang.
        """
        if not self._open:
            call("nvmlInit", pynvml.nvmlInit)
            self._open = True
        try:
            count = call("nvmlDeviceGetCount", pynvml.nvmlDeviceGetCount)
            errors = Counter(self._events.collect())
            gpus = self._read_gpus(count, errors)
        except SourceError:
            self.close()
            raise
        return NvmlReading(gpus=gpus, driver_version=driver_version(), device_errors=MappingProxyType(dict(errors)))

    def close(self) -> None:
        """End the session; does nothing without one, and never raises.

        Does nothing either while a call hangs: ending the session under it could hang as well, or crash the process.
        """
        if not self._open or self._walk.hung:
            return
        self._events.close()
        self._reader.forget()
        try:
            pynvml.nvmlShutdown()
        except Exception as error:
            # NVML counts nvmlInit calls, and only the last nvmlShutdown ends the session. One that failed is still owed:
            # a further nvmlInit on top of it would only raise the count, and the broken session would never end.
            self._open = error_name(error) != "uninitialized"
        else:
            self._open = False

    def _read_gpus(self, count: int, errors: Counter[str]) -> tuple[GpuReading, ...]:
        results = self._walk.read_all(count)
        for result in results.values():
            errors.update(result.errors)
        if len(results) < count:
            errors["hung"] += count - len(results)
        _raise_if_none_answers(count, results)
        gpus: dict[str, GpuReading] = {}
        for result in results.values():
            for gpu in result.gpus:
                gpus.setdefault(gpu.uuid, gpu)
        self._seen.update((gpu.uuid, gpu) for gpu in gpus.values() if gpu.mig is None)
        self._see_hung(index for index in range(count) if index not in results)
        lost = [self._lost(gpu) for gpu in self._seen.values() if gpu.uuid not in gpus]
        # A GPU that was known is what is silent in its place: one broken card is not to be two.
        places = {gpu.index for gpu in lost}
        silent = [index for index in range(count) if index not in results or not results[index].gpus]
        unknown = [GpuReading("", index, lost=True) for index in silent if index not in places]
        return (*gpus.values(), *lost, *unknown)

    def _see_hung(self, indexes: Iterable[int]) -> None:
        """Remember what devices said of themselves before they hung, which can be all that they ever said."""
        for index in indexes:
            uuid, name = self._reader.identities.get(index, ("", None))
            if uuid:
                self._seen.setdefault(uuid, GpuReading(uuid, index, name))

    def _lost(self, gpu: GpuReading) -> GpuReading:
        return GpuReading(gpu.uuid, gpu.index, gpu.name, lost=True, xid_errors=self._events.counts(gpu.uuid))


def _raise_if_none_answers(count: int, results: Mapping[int, DeviceResult]) -> None:
    """Raise if it is not single devices that fail: all of them hang, or none answers and the error is of the session's kind."""
    if count and not results:
        raise source_error("hung", "no GPU answers")
    failures = [result.failure for result in results.values()]
    session_error = next((name for name in failures if name in SESSION_ERRORS), None)
    if session_error is not None and None not in failures:
        raise source_error(session_error, "no GPU answers")
