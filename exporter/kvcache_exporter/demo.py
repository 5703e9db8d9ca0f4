"""`kvcache-exporter demo`: the exporter as it is, over HTTP, on a simulated engine and a simulated GPU."""

from __future__ import annotations

import sys
import time

from kvcache_exporter import live_view
from kvcache_exporter.config import Config, ListenAddress, TargetConfig
from kvcache_exporter.node_gpus import GpuSources
from kvcache_exporter.serve import Parts, open_exporter, stop_on_signal
from kvcache_exporter.simulator import (
    LLAMA_3_1_8B_CONFIG,
    EngineParameters,
    SimulatedEngineServer,
    SimulatedNvml,
    SimulatedProcesses,
)

_REDRAW_SECONDS = 1.0
_LINE_SECONDS = 5.0
_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def demo_config(engine_url: str, parameters: EngineParameters, listen_address: ListenAddress) -> Config:
    """Return the configuration that a user would write for this engine."""
    target = TargetConfig(
        name="simulated",
        url=engine_url,
        model_config=LLAMA_3_1_8B_CONFIG,
        max_num_seqs=parameters.max_num_seqs,
    )
    return Config(
        targets=(target,),
        listen_address=listen_address,
        poll_interval_seconds=1.0,
        poll_timeout_seconds=0.9,
        request_lengths=(2048,),
    )


def run_demo(listen_address: ListenAddress, *, duration_seconds: float | None) -> int:
    """Run until a signal or `duration_seconds`; returns the exit status."""
    parameters = EngineParameters()
    with SimulatedEngineServer(parameters) as engine:
        exporter = open_exporter(
            demo_config(engine.url, parameters, listen_address),
            Parts(gpus=GpuSources(SimulatedNvml(), SimulatedProcesses()), simulated=True),
        )
        if exporter is None:
            return 1
        stop = stop_on_signal()
        exporter.start()
        in_terminal = sys.stdout.isatty()
        if not in_terminal:
            print(f"simulated engine and GPU; metrics at {exporter.url}/metrics", flush=True)  # noqa: T201  # the command's output
        started = time.monotonic()
        elapsed = 0.0
        while duration_seconds is None or elapsed < duration_seconds:
            wait = _REDRAW_SECONDS if in_terminal else _LINE_SECONDS
            if stop.wait(wait if duration_seconds is None else min(wait, duration_seconds - elapsed)):
                break
            elapsed = time.monotonic() - started
            snapshot = exporter.poller.latest()
            if snapshot is not None:
                shown = (
                    _CLEAR_SCREEN + live_view.screen(snapshot, metrics_url=f"{exporter.url}/metrics", elapsed_seconds=elapsed)
                    if in_terminal
                    else live_view.line(snapshot, elapsed_seconds=elapsed)
                )
                print(shown, flush=True)  # noqa: T201  # the command's output
        exporter.close()
    return 0
