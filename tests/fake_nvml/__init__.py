"""A scripted NVML library that the real pynvml loads, for tests on machines without a GPU.

`plugin.py` has the pytest fixture. A machine is described as a step, a mapping with the keys of `nvml.yaml` files. An answer can
be the name of an NVML error wherever this says "or error":

    init, shutdown      "ok" or error
    driver              driver version
    count               number of devices, or error; the number of described devices if absent
    all_device_calls    the error that every call for one device answers
    event_set           error of nvmlEventSetCreate
    event_wait          error of nvmlEventSetWait_v2
    functions_not_found names of functions, with their version, that this driver does not have
    hang_seconds        how long calls that hang take, 3600 if absent; unless a device has `hang_on`, those of `on` hang for all
    on                  a function, named without a version; nvmlDeviceGetMemoryInfo if absent
    devices             list of devices

and for each device, and for each MIG instance:

    index               its NVML index; not for instances
    handle_error        the error that getting its handle answers
    hang_on             the function that hangs for this device alone, named without a version
    uuid, name          str or bytes, or error
    name_raises         UnicodeDecodeError: the name is not valid UTF-8, so that pynvml itself raises it
    memory_v1           {total, free, used} in bytes, or error
    memory_v2           {total, reserved, free, used} in bytes, or error
    total               short for a memory_v2 of that many bytes that are all free
    utilization         {gpu, memory} in percent, or error
    memory_clock_mhz    number, or error
    bus_width_bits      number, or error
    minor_number        number, or error
    throttle            list of pynvml's names without `nvmlClocksEventReason`, or the bits as a number, or error
    ecc_uncorrected     number, or error
    compute_processes, graphics_processes, mps_processes
                        list of {pid, usedGpuMemory} in bytes, null for not available, or error; pids are cut to 32 bits as in C
    events              error of nvmlDeviceRegisterEvents
    xids                list of Xids, each delivered once to each event set, and again when the step is shown again
    mig                 "disabled", or {instances: [...]} with null for an empty place, or error
    power_mw            not looked at

What is not described is not supported. Keys that are not in these lists raise KeyError.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]
import yaml

Step = Mapping[str, Any]

SONAME = "libnvidia-ml.so.1"
MAX_DEVICES = 64

_SOURCE = Path(__file__).with_name("nvml.c")
_NOT_AVAILABLE = 2**64 - 1
_MIG_PLACES = 7


def build_library(folder: Path) -> Path:
    """Compile the library into `folder` with `cc` and return its path; raises CalledProcessError if that fails."""
    library = folder / SONAME
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-pthread", "-shared", "-fPIC", f"-Wl,-soname,{SONAME}"]
    subprocess.run(["cc", *flags, "-o", str(library), str(_SOURCE)], check=True)
    return library


def load_steps(path: Path) -> list[Step]:
    """Return the steps of an `nvml.yaml` file; a step that names no devices has those of the step before it."""
    steps: list[Step] = []
    devices: Mapping[str, Any] = {"devices": []}
    for step in yaml.safe_load(path.read_text())["steps"]:
        # In YAML 1.1 a plain `on` is a truth value.
        step = {"on" if key is True else key: value for key, value in step.items()}
        if "devices" in step:
            devices = {key: step[key] for key in ("devices", "count") if key in step}
        steps.append({**devices, **step})
    return steps


@dataclass(frozen=True)
class FakeNvml:
    """The library at `library`, answering from the file `script`."""

    library: Path
    script: Path

    def show(self, step: Step) -> None:
        """Let NVML describe this machine from its next call on; takes effect in all processes that use the script."""
        complete = self.script.with_suffix(".new")
        complete.write_text("".join(f"{line}\n" for line in _lines(step)))
        complete.replace(self.script)

    def environment(self) -> dict[str, str]:
        """Return the environment of this process with what another process needs to load this library and script."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self.library.parent), "FAKE_NVML_SCRIPT": str(self.script)}

    @property
    def init_calls(self) -> int:
        """How often this process has called nvmlInit."""
        return self._counter("fake_nvml_init_calls")

    @property
    def sessions(self) -> int:
        """How many nvmlInit calls of this process are not yet matched by an nvmlShutdown."""
        return self._counter("fake_nvml_sessions")

    @property
    def event_sets(self) -> int:
        """How many event sets are not freed."""
        return self._counter("fake_nvml_event_sets")

    @property
    def hanging(self) -> int:
        """How many calls hang at this moment."""
        return self._counter("fake_nvml_hanging")

    def device_calls(self, index: int) -> int:
        """How many calls for one device, its MIG instances counted in, this process has made."""
        counters = (ctypes.c_int * MAX_DEVICES).in_dll(ctypes.CDLL(str(self.library)), "fake_nvml_device_calls")
        return counters[index]

    def _counter(self, symbol: str) -> int:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(self.library)), symbol).value


_STEP_KEYS = {"init", "shutdown", "driver", "count", "all_device_calls", "event_set", "event_wait"} | {
    "functions_not_found",
    "hang_seconds",
    "on",
    "devices",
}
_NO_FIGURES = {"index", "handle_error", "hang_on", "name_raises", "total", "mig", "power_mw"}


def _lines(step: Step) -> Iterator[str]:
    _refuse_unknown(step, _STEP_KEYS)
    devices = step.get("devices", [])
    yield f"init {_status(step.get('init', 'ok'))}"
    yield f"shutdown {_status(step.get('shutdown', 'ok'))}"
    yield f"driver {_hex(step.get('driver', '550.90.07'))}"
    yield f"count {_or_error(str, step.get('count', len(devices)))}"
    yield f"devices {_status(step.get('all_device_calls', 'ok'))}"
    yield f"event_set {_status(step.get('event_set', 'ok'))}"
    yield f"event_wait {_status(step.get('event_wait', 'ok'))}"
    for function in step.get("functions_not_found", ()):
        yield f"absent.{_function(function)} {_status('NVML_ERROR_FUNCTION_NOT_FOUND')}"
    seconds = step.get("hang_seconds", 3600)
    if "hang_seconds" in step and not any("hang_on" in device for device in devices):
        yield f"hang.{_function(step.get('on', 'nvmlDeviceGetMemoryInfo'))} {seconds}"
    for device in devices:
        yield from _device_lines(str(device["index"]), device, seconds)


def _device_lines(prefix: str, device: Mapping[str, Any], hang_seconds: float) -> Iterator[str]:
    _refuse_unknown(device, _FIGURES.keys() | _NO_FIGURES)
    yield f"{prefix}.handle {_status(device.get('handle_error', 'ok'))}"
    if "hang_on" in device:
        yield f"{prefix}.hang.{_function(device['hang_on'])} {hang_seconds}"
    described = {"name": "NVIDIA H100 80GB HBM3", "events": "ok", **device}
    if device.get("name_raises") == "UnicodeDecodeError":
        described["name"] = b"NVIDIA \xf8"
    elif "name_raises" in device:
        raise ValueError(f"name_raises: {device['name_raises']}")
    if "total" in device:
        described["memory_v2"] = {"total": device["total"], "reserved": 0, "free": device["total"], "used": 0}
    for key, value in described.items():
        if key in _FIGURES:
            name, text = _FIGURES[key]
            yield f"{prefix}.{name} {_or_error(text, value)}"
    if "mig" in device:
        yield from _mig_lines(prefix, device["mig"], hang_seconds)


def _mig_lines(prefix: str, mig: str | Mapping[str, Any], hang_seconds: float) -> Iterator[str]:
    if isinstance(mig, str):
        yield f"{prefix}.mig {f'0 {_MIG_PLACES}' if mig == 'disabled' else _status(mig)}"
        return
    _refuse_unknown(mig, {"instances"})
    yield f"{prefix}.mig 1 {_MIG_PLACES}"
    for place, instance in enumerate(mig["instances"]):
        if instance is not None:
            yield from _device_lines(f"{prefix}/{place}", instance, hang_seconds)


def _refuse_unknown(described: Mapping[str, Any], known: set[str]) -> None:
    if unknown := described.keys() - known:
        raise KeyError(f"the scripted NVML does not know {sorted(map(str, unknown))}")


def _or_error(text: Callable[[Any], str], value: object) -> str:
    return _status(value) if isinstance(value, str) and (value == "ok" or value.startswith("NVML_ERROR_")) else text(value)


def _status(name: str) -> str:
    return name if name == "ok" else f"error {getattr(pynvml, name)}"


def _function(name: str) -> str:
    if f" {name}(" not in _SOURCE.read_text() and f" {name}_v2(" not in _SOURCE.read_text() and name != "nvmlInit":
        raise ValueError(f"the scripted NVML has no function {name}")
    return name


def _hex(text: str | bytes) -> str:
    return (text.encode() if isinstance(text, str) else text).hex()


def _fields(names: tuple[str, ...], figures: Mapping[str, int]) -> str:
    _refuse_unknown(figures, set(names))
    return " ".join(str(figures[name]) for name in names)


def _throttle(reasons: int | list[str]) -> str:
    if isinstance(reasons, list):
        reasons = sum(getattr(pynvml, f"nvmlClocksEventReason{name}") for name in reasons)
    return str(reasons)


def _processes(processes: list[Mapping[str, int | None]]) -> str:
    words = []
    for process in processes:
        _refuse_unknown(process, {"pid", "usedGpuMemory"})
        used = process["usedGpuMemory"]
        words.append(f"{process['pid']}:{_NOT_AVAILABLE if used is None else used}")
    return " ".join(words)


# By key of the YAML: the key of the script, and how what stands there is written in it.
_FIGURES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "uuid": ("uuid", _hex),
    "name": ("name", _hex),
    "memory_v1": ("memory_v1", partial(_fields, ("total", "free", "used"))),
    "memory_v2": ("memory_v2", partial(_fields, ("total", "reserved", "free", "used"))),
    "utilization": ("utilization", partial(_fields, ("gpu", "memory"))),
    "memory_clock_mhz": ("memory_clock", str),
    "bus_width_bits": ("bus_width", str),
    "minor_number": ("minor_number", str),
    "throttle": ("throttle", _throttle),
    "ecc_uncorrected": ("ecc", str),
    "compute_processes": ("compute", _processes),
    "graphics_processes": ("graphics", _processes),
    "mps_processes": ("mps", _processes),
    "events": ("events", _status),
    "xids": ("xids", lambda xids: " ".join(map(str, xids))),
}
