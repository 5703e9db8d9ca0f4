"""A simulated vLLM engine on a simulated GPU, for `kvcache-exporter demo` and for tests; all that it shows says so.

traffic ──> engine ──> stats ──> page ──> server        hardware: the model's config.json, and the GPU
"""

from kvcache_exporter.simulator.engine import RequestReading, SimulatedEngine
from kvcache_exporter.simulator.hardware import GPU_UUID, LLAMA_3_1_8B_CONFIG, SimulatedNvml, SimulatedProcesses
from kvcache_exporter.simulator.histogram import HistogramReading
from kvcache_exporter.simulator.page import render_page
from kvcache_exporter.simulator.parameters import EngineParameters
from kvcache_exporter.simulator.server import SimulatedEngineServer
from kvcache_exporter.simulator.stats import EngineStats
from kvcache_exporter.simulator.traffic import Arrival, SimulatedTraffic, TrafficParameters, arrivals

__all__ = [
    "GPU_UUID",
    "LLAMA_3_1_8B_CONFIG",
    "Arrival",
    "EngineParameters",
    "EngineStats",
    "HistogramReading",
    "RequestReading",
    "SimulatedEngine",
    "SimulatedEngineServer",
    "SimulatedNvml",
    "SimulatedProcesses",
    "SimulatedTraffic",
    "TrafficParameters",
    "arrivals",
    "render_page",
]
