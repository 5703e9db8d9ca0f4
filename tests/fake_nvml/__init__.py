"""A scripted NVML library that the real pynvml loads, for tests on machines without a GPU.

`plugin.py` has the pytest fixture. A machine is described as a step, a mapping with the keys of `nvml.yaml` files:

    init, shutdown      "ok" or the name of an NVML error
    driver              driver version
    count               number of devices, or the name of an NVML error; the number of described devices if absent
    all_device_calls    the name of an NVML error that every call for one device answers
    hang_seconds        how long each memory call takes
    devices             list of devices

and for each device:

    index               its NVML index
    handle_error        the name of an NVML error that getting its handle answers
    uuid, name          str or bytes
    name_raises         UnicodeDecodeError: the name is not valid UTF-8, so that pynvml itself raises it
    memory_v1           {total, free, used} in bytes, or the name of an NVML error
    memory_v2           {total, reserved, free, used} in bytes, or the name of an NVML error
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]
import yaml

Step = Mapping[str, Any]

SONAME = "libnvidia-ml.so.1"


def build_library(folder: Path) -> Path:
    """Compile the library into `folder` with `cc` and return its path; raises CalledProcessError if that fails."""
    library = folder / SONAME
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", f"-Wl,-soname,{SONAME}"]
    subprocess.run(["cc", *flags, "-o", str(library), str(Path(__file__).with_name("nvml.c"))], check=True)
    return library


def load_steps(path: Path) -> list[Step]:
    """Return the steps of an `nvml.yaml` file; a step that names no devices has those of the step before it."""
    steps: list[Step] = []
    devices: Mapping[str, Any] = {"devices": []}
    for step in yaml.safe_load(path.read_text())["steps"]:
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

    def _counter(self, symbol: str) -> int:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(self.library)), symbol).value


def _lines(step: Step) -> Iterator[str]:
    yield f"init {_status(step.get('init', 'ok'))}"
    yield f"shutdown {_status(step.get('shutdown', 'ok'))}"
    yield f"driver {_hex(step.get('driver', '550.90.07'))}"
    devices = step.get("devices", [])
    count = step.get("count", len(devices))
    yield f"count {_status(count) if isinstance(count, str) else count}"
    yield f"devices {_status(step.get('all_device_calls', 'ok'))}"
    if "hang_seconds" in step:
        yield f"hang {step['hang_seconds']}"
    for device in devices:
        index = device["index"]
        yield f"{index}.handle {_status(device.get('handle_error', 'ok'))}"
        if "uuid" in device:
            yield f"{index}.uuid {_hex(device['uuid'])}"
        not_utf8 = device.get("name_raises") == "UnicodeDecodeError"
        yield f"{index}.name {_hex(b'NVIDIA ' + bytes([0xF8]) if not_utf8 else device.get('name', 'NVIDIA H100 80GB HBM3'))}"
        for key, figures in (("memory_v1", ("total", "free", "used")), ("memory_v2", ("total", "reserved", "free", "used"))):
            if key in device:
                memory = device[key]
                yield f"{index}.{key} " + (
                    _status(memory) if isinstance(memory, str) else " ".join(str(memory[figure]) for figure in figures)
                )


def _status(name: str) -> str:
    return name if name == "ok" else f"error {getattr(pynvml, name)}"


def _hex(text: str | bytes) -> str:
    return (text.encode() if isinstance(text, str) else text).hex()
