"""CPU time of one reading of 8 GPUs with 2 processes each, all threads counted, beside that of 8 bare memory calls.

Run it as `python tests/bench/poll_nvml.py`; it needs a C compiler. The driver is the scripted library of the tests, which takes
about a microsecond a call, so the time is that of the exporter and of pynvml. A real driver adds its own.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pynvml  # type: ignore[import-untyped]

from fake_nvml import FakeNvml, build_library
from kvcache_exporter.sources.nvml import NvmlSource

GPUS = 8
PROCESSES = 2
WARM_UP = 200
ROUNDS = 3000
# Coarse clocks cannot time one reading well: what is timed is this many in a row.
BATCH = 10


def gpu(index: int) -> dict[str, Any]:
    """One GPU that has every figure."""
    total, reserved, used = 85520809984, 577765376, 77078724608
    pids = [4000 + PROCESSES * index + number for number in range(PROCESSES)]
    return {
        "index": index,
        "uuid": f"GPU-{index:08x}-0000-0000-0000-000000000000",
        "memory_v2": {"total": total, "reserved": reserved, "free": total - reserved - used, "used": used},
        "utilization": {"gpu": 97, "memory": 61},
        "memory_clock_mhz": 2619,
        "bus_width_bits": 5120,
        "throttle": ["SwPowerCap"],
        "ecc_uncorrected": 0,
        "compute_processes": [{"pid": pid, "usedGpuMemory": used // PROCESSES} for pid in pids],
        "graphics_processes": [],
        "mps_processes": [],
        "mig": "disabled",
    }


def cpu_seconds(call: Callable[[], object]) -> list[float]:
    """CPU seconds of one call, measured again and again."""
    for _ in range(WARM_UP):
        call()
    seconds = []
    for _ in range(ROUNDS // BATCH):
        started = time.process_time()
        for _ in range(BATCH):
            call()
        seconds.append((time.process_time() - started) / BATCH)
    return seconds


def memory_calls(handles: Sequence[object]) -> None:
    """Ask for the memory of each GPU, and for nothing else."""
    for handle in handles:
        pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)


def main() -> None:
    """Print a table of times."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fake = FakeNvml(library=build_library(folder), script=folder / "script")
        fake.show({"devices": [gpu(index) for index in range(GPUS)]})
        os.environ["FAKE_NVML_SCRIPT"] = str(fake.script)
        ctypes.CDLL(str(fake.library))
        source = NvmlSource()
        reading = source.read()
        assert not reading.device_errors
        assert all(gpu.processes is not None and len(gpu.processes) == PROCESSES for gpu in reading.gpus)
        calls = sum(fake.device_calls(index) for index in range(GPUS))
        source.read()
        calls = sum(fake.device_calls(index) for index in range(GPUS)) - calls
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(GPUS)]
        rows = {
            "NvmlSource.read()": (calls, cpu_seconds(source.read)),
            "bare memory calls": (GPUS, cpu_seconds(partial(memory_calls, handles))),
        }
        source.close()
    bare = statistics.median(rows["bare memory calls"][1])
    print(f"{'':<18} {'device calls':>12} {'median ms':>10} {'best ms':>8} {'ratio':>6}")
    for label, (number, seconds) in rows.items():
        median = statistics.median(seconds)
        print(f"{label:<18} {number:>12} {median * 1e3:>10.3f} {min(seconds) * 1e3:>8.3f} {median / bare:>6.1f}")


if __name__ == "__main__":
    main()
