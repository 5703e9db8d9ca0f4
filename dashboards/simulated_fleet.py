"""Something for the boards to show: two nodes of simulated engines, an exporter each, and a real Prometheus with the rules."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvcache_exporter.config import Config, ListenAddress, TargetConfig
from kvcache_exporter.gpu_owners import EnginePlace, EngineProcess
from kvcache_exporter.gpu_reading import GpuProcess, NvmlReading
from kvcache_exporter.node_gpus import GpuSources
from kvcache_exporter.serve import Exporter, Parts
from kvcache_exporter.simulator import (
    LLAMA_3_1_8B_CONFIG,
    EngineParameters,
    SimulatedEngineServer,
    SimulatedNvml,
    TrafficParameters,
)

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / ".cache" / "prometheus" / "bin"
RULES = ROOT / "alerts" / "kvcache.rules.yaml"

_ENGINE_PID, _OTHER_PID = 4_000_001, 4_000_101


@dataclass(frozen=True)
class SimulatedEngine:
    """One engine of a node, on a GPU of its own."""

    name: str
    model_name: str
    parameters: EngineParameters
    traffic: TrafficParameters


def _steady(rate: float, seed: int) -> TrafficParameters:
    return TrafficParameters(seed=seed, trough_rate=rate, crest_rate=rate)


# One model whose engines are filled, half filled and hardly used, and one whose engines are short of seats, not of blocks.
CHAT, CODE = "llama-3.1-8b-chat", "llama-3.1-8b-code"
NODES: Mapping[str, tuple[SimulatedEngine, ...]] = {
    "node-1": (
        SimulatedEngine("chat-0", CHAT, EngineParameters(), TrafficParameters()),
        SimulatedEngine("chat-1", CHAT, EngineParameters(), _steady(7.0, seed=2)),
        SimulatedEngine("code-0", CODE, EngineParameters(max_num_seqs=24), TrafficParameters(seed=3, crest_rate=8.0)),
    ),
    "node-2": (
        SimulatedEngine("chat-2", CHAT, EngineParameters(), _steady(1.5, seed=4)),
        SimulatedEngine("chat-3", CHAT, EngineParameters(), TrafficParameters(seed=5, crest_rate=12.0, period_seconds=240.0)),
        SimulatedEngine("code-1", CODE, EngineParameters(max_num_seqs=24), _steady(1.0, seed=6)),
    ),
}


class NodeGpus:
    """The simulated GPU once for each of some targets, with the process of its engine, and once more without an engine.

    Stands in for NVML and for the process table of an exporter. The spare GPU is lost from `lost_after` seconds on.
    """

    def __init__(self, targets: tuple[str, ...], *, lost_after: float = float("inf")) -> None:
        self._targets = targets
        self._lost_at = time.monotonic() + lost_after

    def read(self) -> NvmlReading:
        """The GPUs as they are now."""
        (gpu,) = SimulatedNvml().read().gpus
        engine, other = gpu.processes or ()
        gpus = [
            replace(
                gpu,
                uuid=f"GPU-simulated-{index}",
                index=index,
                utilization_ratio=0.95 - 0.2 * index,
                memory_utilization_ratio=0.7 - 0.2 * index,
                processes=(
                    GpuProcess(_ENGINE_PID + index, engine.memory_used_bytes),
                    GpuProcess(_OTHER_PID + index, other.memory_used_bytes),
                ),
            )
            for index in range(len(self._targets))
        ]
        spare = replace(
            gpu, uuid="GPU-simulated-spare", index=len(gpus), memory_used_bytes=other.memory_used_bytes, processes=(other,)
        )
        if time.monotonic() >= self._lost_at:
            spare = replace(type(gpu)(spare.uuid, spare.index, spare.name), lost=True)
        return NvmlReading((*gpus, spare), "570.86.15")

    def close(self) -> None:
        """Do nothing: there is no library to shut down."""

    def engines_of(self, places: Mapping[str, EnginePlace], pids: Collection[int]) -> Mapping[str, tuple[EngineProcess, ...]]:
        """The engine's process for each target."""
        return {name: (EngineProcess(_ENGINE_PID + self._targets.index(name)),) for name in places}


@contextmanager
def exporter_for(targets: tuple[TargetConfig, ...], gpus: NodeGpus) -> Iterator[str]:
    """Run an exporter of `targets` in this process; gives its host and port."""
    config = Config(
        targets=targets,
        listen_address=ListenAddress("127.0.0.1", 0),
        poll_interval_seconds=1.0,
        poll_timeout_seconds=0.9,
        request_lengths=(2048,),
    )
    exporter = Exporter(config, Parts(gpus=GpuSources(gpus, gpus), simulated=True))
    exporter.start()
    try:
        yield f"127.0.0.1:{exporter.port}"
    finally:
        exporter.close()


@contextmanager
def prometheus_of(
    exporters: Mapping[str, str], folder: Path, *, scrape_seconds: float, programs: Path = PROGRAMS
) -> Iterator[str]:
    """Run a Prometheus that scrapes exporters (`instance` -> host and port) and evaluates the shipped rules; gives its URL."""
    address = f"127.0.0.1:{_free_port()}"
    configs = "".join(
        f"  - {{targets: ['{exporter}'], labels: {{instance: '{instance}', namespace: ml}}}}\n"
        for instance, exporter in exporters.items()
    )
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {scrape_seconds:g}s, evaluation_interval: {scrape_seconds:g}s}}\n"
        f"rule_files: ['{RULES}']\nscrape_configs:\n- job_name: kvcache-exporter\n  static_configs:\n{configs}"
    )
    command = (
        programs / "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    )
    # Not from outside: the command is put together above (S603).
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:  # noqa: S603
        try:
            _wait_for(f"http://{address}/-/ready")
            yield f"http://{address}"
        finally:
            process.kill()


@contextmanager
def simulated_fleet(scrape_seconds: float) -> Iterator[str]:
    """Run all nodes and a Prometheus; gives its URL."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        exporters = {}
        for node, engines in NODES.items():
            targets = tuple(_target(stack, engine) for engine in engines)
            gpus = NodeGpus(tuple(engine.name for engine in engines), lost_after=180.0 if node == "node-1" else float("inf"))
            exporters[f"{node}:9948"] = stack.enter_context(exporter_for(targets, gpus))
        yield stack.enter_context(prometheus_of(exporters, folder, scrape_seconds=scrape_seconds))


def _target(stack: ExitStack, engine: SimulatedEngine) -> TargetConfig:
    server = stack.enter_context(SimulatedEngineServer(engine.parameters, engine.traffic, model_name=engine.model_name))
    return TargetConfig(engine.name, server.url, model_config=LLAMA_3_1_8B_CONFIG, max_num_seqs=engine.parameters.max_num_seqs)


def _wait_for(url: str) -> None:
    for _ in range(200):
        with suppress(OSError), urllib.request.urlopen(url, timeout=1):  # noqa: S310  # our own, on loopback
            return
        time.sleep(0.1)
    raise TimeoutError(f"{url} does not answer")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
