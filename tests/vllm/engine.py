"""A real vLLM on this machine's CPU: started, read, held still and killed; and what its log says."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests
from child import Child
from import_shim import write_import_shim
from page import Page, fetch_page
from tiny_model import MAX_MODEL_LEN, write_tiny_model

VLLM_VERSION = "0.32.0"
BLOCK_SIZE = 32  # tokens; the smallest that vLLM takes on a CPU
MAX_NUM_SEQS = 32
SERVED_MODEL_NAME = "tiny"

# vllm/v1/core/kv_cache_utils.py, update_kv_cache_capacity; the first word is the device.
_CAPACITY = re.compile(r"KV cache size: ([\d,]+) tokens, Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")
# vllm/v1/metrics/loggers.py, LoggingStatLogger.log and _log_iteration_details.
_STATS = re.compile(r"Running: (\d+) reqs, Waiting: (\d+) reqs.* KV cache usage: ([\d.]+)%")
_STEP = re.compile(r"Iteration\(\d+\): .* (\d+) generation requests, .* KV cache usage: ([\d.]+)%")
_ENGINE_PROCESS = re.compile(r"\(EngineCore\S* pid=(\d+)\)")


@dataclass(frozen=True)
class LoggedCapacity:
    """The line that vLLM logs at start: `tokens`, and `max_concurrency` as printed, with two decimals."""

    tokens: int
    max_concurrency: str


@dataclass(frozen=True)
class LoggedStats:
    """One of the lines that vLLM logs at every interval. `usage_percent` is as printed, with one decimal."""

    at: float
    running: int
    waiting: int
    usage_percent: str


@dataclass(frozen=True)
class LoggedStep:
    """The line of one step: requests that were past their prompt in it, and the usage after it, as printed."""

    at: float
    generating: int
    usage_percent: str


class Workshop:
    """What engines need beside themselves, in a folder that the caller removes: model, import shim, and room for their files."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        self._shim = folder / "shim"
        self._scratch = folder / "scratch"
        self._scratch.mkdir()
        write_tiny_model(self.model)
        write_import_shim(self._shim, VLLM_VERSION)

    def environment(self) -> dict[str, str]:
        """Environment of an engine: nothing leaves the machine, and every file lands in the folder."""
        scratch = str(self._scratch)
        return {
            **os.environ,
            "PYTHONPATH": str(self._shim),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": scratch,
            "XDG_CACHE_HOME": scratch,
            "XDG_CONFIG_HOME": scratch,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOG_STATS_INTERVAL": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # The model runs inside the engine's process, on one thread, anywhere. In a worker of its own, as vLLM has it on a CPU
            # (vllm/platforms/cpu.py), the two wait for each other by sched_yield, and nothing else gets two cores for seconds.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }


class Engine(Child):
    """`vllm serve` of the tiny model on the loopback address, with a pool of `num_gpu_blocks` blocks."""

    start_seconds = 240.0

    def __init__(self, vllm: Path, workshop: Workshop, port: int, num_gpu_blocks: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [str(vllm), "serve", str(workshop.model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--served-model-name", SERVED_MODEL_NAME, "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager"]
        command += ["--num-gpu-blocks-override", str(num_gpu_blocks), "--block-size", str(BLOCK_SIZE)]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
        # A line in the log for each step.
        command += ["--enable-logging-iteration-details"]
        super().__init__(command, workshop.environment())

    def is_ready(self) -> bool:
        """Whether the engine answers that it is healthy."""
        return requests.get(f"{self.url}/health", timeout=5).ok

    def page(self) -> Page:
        """The engine's own /metrics."""
        return fetch_page(f"{self.url}/metrics")

    def capacity(self) -> LoggedCapacity:
        """What the log says that the pool holds."""
        match = next(match for _, line in self.lines if (match := _CAPACITY.search(line)))
        return LoggedCapacity(int(match[1].replace(",", "")), match[2])

    def stats_since(self, at: float) -> list[LoggedStats]:
        """The periodic lines that came after `at` (Unix seconds). An engine that has long been idle logs none."""
        matches = [(came, _STATS.search(line)) for came, line in self.lines_since(at)]
        return [LoggedStats(came, int(m[1]), int(m[2]), m[3]) for came, m in matches if m]

    def steps_since(self, at: float) -> list[LoggedStep]:
        """The line of each step of the engine that came after `at` (Unix seconds)."""
        matches = [(came, _STEP.search(line)) for came, line in self.lines_since(at)]
        return [LoggedStep(came, int(m[1]), m[2]) for came, m in matches if m]

    @contextlib.contextmanager
    def held_still(self) -> Iterator[None]:
        """Stop the process that steps the engine; the API server goes on to answer, and what it says no longer changes."""
        process = next(int(match[1]) for _, line in self.lines if (match := _ENGINE_PROCESS.search(line)))
        os.kill(process, signal.SIGSTOP)
        try:
            # What the last step gave is still on its way to the API server.
            time.sleep(0.4)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
