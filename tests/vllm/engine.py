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
from flags import CACHE_FLAGS
from import_shim import write_import_shim
from page import Page, fetch_page
from says import EngineSays
from tiny_model import TinyModel, write_tiny_model

VLLM_VERSION = "0.32.0"
KV_CACHE_GIB = 1
SERVED_MODEL_NAME = "tiny"

# All three in vllm/v1/core/kv_cache_utils.py. Before the first one comes the name of the device.
_CAPACITY = re.compile(r"KV cache size: ([\d,]+) tokens, Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")
_GROUPS = re.compile(r"kv cache group sizes \(([\d, ]+)\)")
_BLOCKS_WITHOUT_OVERRIDE = re.compile(r"Overriding num_gpu_blocks=(\d+) with num_gpu_blocks_override")
# vllm/v1/metrics/loggers.py, LoggingStatLogger.log and _log_iteration_details.
_STATS = re.compile(r"Running: (\d+) reqs, Waiting: (\d+) reqs.* KV cache usage: ([\d.]+)%")
_STEP = re.compile(r"Iteration\(\d+\): (\d+) context requests, .* (\d+) generation requests, .* KV cache usage: ([\d.]+)%")
_ENGINE_PROCESS = re.compile(r"\(EngineCore\S* pid=(\d+)\)")


@dataclass(frozen=True)
class LoggedCapacity:
    """What vLLM logs at start.

    `max_concurrency` is as printed, with two decimals. `group_block_sizes` are tokens in a block of each group, logged only when
    there are several. `blocks_without_override` is what KV_CACHE_GIB would have made.
    """

    tokens: int
    max_concurrency: str
    group_block_sizes: tuple[int, ...]
    blocks_without_override: int


@dataclass(frozen=True)
class LoggedStats:
    """One of the lines that vLLM logs at every interval. `usage_percent` is as printed, with one decimal."""

    at: float
    running: int
    waiting: int
    usage_percent: str


@dataclass(frozen=True)
class LoggedStep:
    """The line of one step: requests whose prompt was read in it, those past their prompt, and the usage after it, as printed."""

    at: float
    reading: int
    generating: int
    usage_percent: str


class Workshop:
    """What engines need beside themselves, in a folder that the caller removes: model, import shim, and room for their files."""

    def __init__(self, folder: Path, model: TinyModel) -> None:
        self.model = model
        self.model_folder = folder / "model"
        self._shim = folder / "shim"
        self._scratch = folder / "scratch"
        self._scratch.mkdir(parents=True)
        write_tiny_model(self.model_folder, model)
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
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            # The model runs inside the engine's process, on one thread, anywhere. In a worker of its own, as vLLM has it on a CPU
            # (vllm/platforms/cpu.py), the two wait for each other by sched_yield, and nothing else gets two cores for seconds.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }


class Engine(Child):
    """`vllm serve` of a tiny model on the loopback address, with a pool of `num_gpu_blocks` blocks."""

    start_seconds = 240.0

    def __init__(self, vllm: Path, workshop: Workshop, port: int, num_gpu_blocks: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.model = workshop.model
        self.config = workshop.model_folder / "config.json"
        command = [str(vllm), "serve", str(workshop.model_folder), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--served-model-name", SERVED_MODEL_NAME, "--load-format", "dummy", "--enforce-eager"]
        command += ["--num-gpu-blocks-override", str(num_gpu_blocks), *CACHE_FLAGS]
        # A line in the log for each step.
        command += ["--enable-logging-iteration-details"]
        self.command = tuple(command)
        super().__init__(command, workshop.environment())

    def is_ready(self) -> bool:
        """Whether the engine answers that it is healthy."""
        return requests.get(f"{self.url}/health", timeout=5).ok

    def page(self) -> Page:
        """The engine's own /metrics."""
        return fetch_page(f"{self.url}/metrics")

    def says(self) -> EngineSays:
        """What that page means."""
        return EngineSays(self.page(), self.model)

    def capacity(self) -> LoggedCapacity:
        """What the log says that the pool holds."""
        capacity = self._logged(_CAPACITY)
        sizes = self._logged(_GROUPS)[1] if len(self.model.group_block_sizes) > 1 else str(self.model.block_size)
        return LoggedCapacity(
            tokens=int(capacity[1].replace(",", "")),
            max_concurrency=capacity[2],
            group_block_sizes=tuple(map(int, sizes.split(","))),
            blocks_without_override=int(self._logged(_BLOCKS_WITHOUT_OVERRIDE)[1]),
        )

    def stats_since(self, at: float) -> list[LoggedStats]:
        """The periodic lines that came after `at` (Unix seconds). An engine that has long been idle logs none."""
        matches = [(came, _STATS.search(line)) for came, line in self.lines_since(at)]
        return [LoggedStats(came, int(m[1]), int(m[2]), m[3]) for came, m in matches if m]

    def steps_since(self, at: float) -> list[LoggedStep]:
        """The line of each step of the engine that came after `at` (Unix seconds)."""
        matches = [(came, _STEP.search(line)) for came, line in self.lines_since(at)]
        return [LoggedStep(came, int(m[1]), int(m[2]), m[3]) for came, m in matches if m]

    @contextlib.contextmanager
    def held_still(self) -> Iterator[None]:
        """Stop the process that steps the engine; the API server goes on to answer, and what it says no longer changes."""
        process = int(self._logged(_ENGINE_PROCESS)[1])
        os.kill(process, signal.SIGSTOP)
        try:
            # What the last step gave is still on its way to the API server.
            time.sleep(0.4)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def _logged(self, pattern: re.Pattern[str]) -> re.Match[str]:
        return next(match for _, line in self.lines if (match := pattern.search(line)))
