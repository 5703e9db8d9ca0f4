"""How many series a node makes: 8 engines and 8 GPUs with everything known stay under 800."""

from __future__ import annotations

import re
from contextlib import ExitStack

from kvcache_exporter.config import TargetConfig
from kvcache_exporter.gpu_owners import EnginePlace, EngineProcess
from kvcache_exporter.gpu_reading import GpuProcess, GpuReading, NvmlReading
from lab import TINY_LLAMA, Lab, Upstream, capture, models_answer

GIB = 1024**3
COUNTER = re.compile(rb"^(vllm:\w+_(?:total|bucket|sum|count)\{.*\} )(\S+)$", re.MULTILINE)


def grown(page: bytes, factor: int) -> bytes:
    """The page later: each of its counters has grown."""
    return COUNTER.sub(lambda match: match[1] + str(float(match[2]) * factor).encode(), page)


class EightGpus:
    """A node of H100s, each with an engine and another process."""

    def read(self) -> NvmlReading:
        return NvmlReading(
            tuple(
                GpuReading(
                    f"GPU-{index}",
                    index,
                    "NVIDIA H100 80GB HBM3",
                    80 * GIB,
                    70 * GIB,
                    GIB,
                    utilization_ratio=0.9,
                    memory_utilization_ratio=0.5,
                    max_memory_clock_hertz=2.619e9,
                    memory_bus_width_bits=5120,
                    throttle_reasons=frozenset(),
                    ecc_uncorrected_errors=0,
                    processes=(GpuProcess(index + 1, 60 * GIB), GpuProcess(100, GIB)),
                )
                for index in range(8)
            ),
            "570.86.15",
        )


class EightProcesses:
    """Each target holds the GPU of its name."""

    def engines_of(self, places: dict[str, EnginePlace], pids: set[int]) -> dict[str, tuple[EngineProcess, ...]]:
        return {name: (EngineProcess(int(name) + 1),) for name in places}


def test_node_of_eight_engines_and_gpus_stays_under_800_series() -> None:
    page = capture("0.32.0_moderate")
    with ExitStack() as stack:
        upstreams = [stack.enter_context(Upstream()) for _ in range(8)]
        targets = [
            TargetConfig(name=str(index), url=upstream.url, model_config=TINY_LLAMA, max_num_seqs=64)
            for index, upstream in enumerate(upstreams)
        ]
        lab = Lab(*targets, gpus=EightGpus(), processes=EightProcesses(), request_lengths=(1024,))  # type: ignore[arg-type]
        for factor in range(1, 20):
            for upstream in upstreams:
                upstream.page(grown(page, factor), models=models_answer())
            lab.poll()
        series = [line for line in lab.text().splitlines() if line and not line.startswith("#")]
    for name in (
        "kvcache_remaining_request_slots",
        "kvcache_headroom_ratio",
        "kvcache_exhaustion_seconds",
        "kvcache_memory_bandwidth_utilization_ratio",
        'kvcache_gpu_memory_component_bytes{component="overhead"',
    ):
        assert any(line.startswith(name) for line in series), f"{name} is not there: not everything was known"
    assert len(series) < 800
