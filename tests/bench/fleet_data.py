"""A simulated fleet's series over time: as OpenMetrics text, or served to a Prometheus that scrapes it.

Which series an engine, a GPU and a node have is not written down here: they are those of a page that the exporter makes when it
knows everything. Only labels and values are replaced.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any, TextIO

from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvcache_exporter.config import TargetConfig
from kvcache_exporter.engine_state import STATES
from kvcache_exporter.limits import LIMITS
from lab import TINY_LLAMA, Lab, Upstream, capture, models_answer
from test_series_count import EightGpus, EightProcesses, grown

# Target of the engine, and index of the GPU, that all others are made after.
TEMPLATE = "0"
LISTED_LENGTH = 1024
BLOCK_TOKENS = 16
JOB = "kvcache-exporter"
CLUSTERS = ("eu-1", "eu-2", "us-1", "us-2")
NAMESPACES = ("chat", "search", "batch")
# What tells the series of one metric and one engine, GPU or source apart.
APART = ("length", "limit", "state", "reason", "component", "source", "quantile")
# Not served in these states; the rest of a page goes on.
NO_ROOM = ("starting", "asleep", "frozen")
ROOM = (
    "kvcache_used_",
    "kvcache_usage_ratio",
    "kvcache_headroom_",
    "kvcache_remaining_request_slots",
    "kvcache_binding_limit",
    "kvcache_exhaustion_seconds",
    "kvcache_offered_load_",
)

Sample = tuple[str, Mapping[str, str], float]
# The values of a series at each scrape, by metric and by what tells it apart.
Values = Mapping[tuple[str, str], Sequence[float]]
# Metric, labels of the page, and the value at each scrape.
NodeSeries = tuple[str, Mapping[str, str], Sequence[float]]


@dataclass(frozen=True)
class Node:
    """An exporter's series; `scraped` is what the scrape puts on them, `place` when it comes, as a part of the interval."""

    scraped: Mapping[str, str]
    place: float
    series: Sequence[NodeSeries]


@dataclass(frozen=True)
class Model:
    """What an engine of it holds; `typical` and `longest` are tokens of a request, `load` is how full its engines are."""

    name: str
    blocks: int
    bytes_per_token: int
    typical: int
    longest: int
    load: float


# From the one with most engines to the one with fewest.
MODELS = (
    Model("meta-llama/Llama-3.1-8B-Instruct", 27_135, 131_072, 2_100, 131_072, 0.45),
    Model("Qwen/Qwen3-32B", 9_800, 262_144, 3_000, 40_960, 0.6),
    Model("meta-llama/Llama-3.3-70B-Instruct", 11_000, 327_680, 2_600, 131_072, 0.7),
    Model("mistralai/Mistral-Small-3.2-24B-Instruct-2506", 14_300, 163_840, 1_900, 131_072, 0.4),
    Model("google/gemma-3-27b-it", 7_300, 507_904, 1_200, 131_072, 0.55),
    Model("Qwen/Qwen2.5-Coder-32B-Instruct", 9_700, 262_144, 5_200, 32_768, 0.75),
    Model("microsoft/phi-4", 19_000, 204_800, 900, 16_384, 0.3),
    Model("mistralai/Mixtral-8x7B-Instruct-v0.1", 21_000, 131_072, 1_500, 32_768, 0.35),
    Model("Qwen/Qwen3-8B", 25_000, 147_456, 1_100, 40_960, 0.2),
    Model("allenai/OLMo-2-1124-13B-Instruct", 4_200, 819_200, 1_000, 4_096, 0.4),
    Model("CohereLabs/c4ai-command-r-08-2024", 17_000, 163_840, 6_000, 131_072, 0.65),
    Model("bigcode/starcoder2-15b", 30_000, 81_920, 2_400, 16_384, 0.05),
)


def template() -> list[Sample]:
    """The series of a node with one engine and eight GPUs about which everything is known."""
    page = capture("0.32.0_moderate")
    with ExitStack() as stack:
        upstream = stack.enter_context(Upstream())
        target = TargetConfig(name=TEMPLATE, url=upstream.url, model_config=TINY_LLAMA, max_num_seqs=64)
        lab = Lab(target, gpus=EightGpus(), processes=EightProcesses(), request_lengths=(LISTED_LENGTH,))  # type: ignore[arg-type]
        for factor in range(1, 20):
            upstream.page(grown(page, factor), models=models_answer())
            lab.poll()
        families = list(text_string_to_metric_families(lab.text()))
    return [
        (sample.name, {name: value for name, value in sample.labels.items() if value}, sample.value)
        for family in families
        for sample in family.samples
    ]


def fleet(nodes: int, engines: int, scrapes: Sequence[float]) -> Iterator[Node]:
    """The nodes, each with its values at these times (Unix seconds)."""
    samples = template()
    of_node = [sample for sample in samples if not sample[1].keys() & {"target", "gpu"}]
    of_engine = [sample for sample in samples if sample[1].get("target") == TEMPLATE]
    of_gpu = [sample for sample in samples if "target" not in sample[1] and sample[1].get("gpu") == TEMPLATE]
    for index in range(nodes):
        # A node is the same one whatever the number of nodes, and whichever part of its time is asked for.
        random = Random(index)
        scraped = {
            "cluster": CLUSTERS[index % len(CLUSTERS)],
            "namespace": random.choice(NAMESPACES),
            "job": JOB,
            "instance": f"10.{index // 250}.{index % 250}.7:9948",
        }
        yield Node(scraped, random.random(), list(node_series(random, engines, (of_node, of_engine, of_gpu), scrapes)))


def write_openmetrics(file: TextIO, nodes: int, engines: int, scrapes: Sequence[float]) -> None:
    """Write what Prometheus stores of these nodes; each is scraped at a time of its own between one of these and the next."""
    step = scrapes[1] - scrapes[0]
    for node in fleet(nodes, engines, scrapes):
        stamps = [f" {at + node.place * step:.3f}\n" for at in scrapes]
        for name, labels, values in [*node.series, ("up", {}, [1.0] * len(scrapes))]:
            series = series_text(name, {**labels, **node.scraped})
            file.write("".join([series + text(value) + stamp for value, stamp in zip(values, stamps, strict=True)]))
    file.write("# EOF\n")


@contextmanager
def served(nodes: int, engines: int, scrapes: Sequence[float]) -> Iterator[list[dict[str, Any]]]:
    """Serve the page of each node as it is at the time of the request; what a scrape configuration says of the nodes."""
    pages = []
    targets = []
    for index, node in enumerate(fleet(nodes, engines, scrapes)):
        pages.append([(series_text(name, labels), values) for name, labels, values in node.series])
        targets.append({**node.scraped, "__metrics_path__": f"/{index}"})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            passed = bisect_right(scrapes, time.time()) - 1
            page = "".join([f"{series}{text(values[passed])}\n" for series, values in pages[int(self.path[1:])]])
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield [{"targets": [f"127.0.0.1:{http.server_port}"], "labels": labels} for labels in targets]
        http.shutdown()


def series_text(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "} "


def text(value: float) -> str:
    """As the exporter writes it."""
    return "+Inf" if value == math.inf else repr(value)


def node_series(
    random: Random, engines: int, samples: tuple[list[Sample], list[Sample], list[Sample]], scrapes: Sequence[float]
) -> Iterator[NodeSeries]:
    """All series of a node; `samples` are those of a node, of an engine and of a GPU."""
    of_node, of_engine, of_gpu = samples
    weights = [1 / rank for rank in range(1, len(MODELS) + 1)]
    # Most engines of a node serve the same model, as one deployment puts them there.
    usual = random.choices(MODELS, weights)[0]

    def series(sample: Sample, values: Values, own: Mapping[str, str]) -> NodeSeries:
        name, labels, value = sample
        apart = next((labels[label] for label in APART if label in labels), "")
        replaced = {label: own.get(label, old) for label, old in labels.items()}
        return name, replaced, values.get((name, apart)) or [value] * len(scrapes)

    success = {("kvcache_last_success_timestamp_seconds", source): scrapes for source in ("nvml", "processes")}
    for sample in of_node:
        yield series(sample, success, {})
    for place in range(engines):
        model = usual if random.random() < 0.8 else random.choices(MODELS, weights)[0]
        own = {
            "target": f"{model.name.rpartition('/')[2].lower()}-{place}",
            "model_name": model.name,
            "url": f"http://127.0.0.1:{8000 + place}",
            "gpu": str(place),
            "uuid": f"GPU-{uuid.UUID(int=random.getrandbits(128))}",
        }
        state = random.choice(NO_ROOM) if random.random() < 0.015 else "serving"
        lost = random.random() < 0.002
        # What was drawn before must not depend on how many scrapes are written.
        moves = Random(f"{own['uuid']} {scrapes[0]}")
        values = engine_values(moves, model, state, scrapes)
        for sample in of_engine:
            if state == "serving" or not sample[0].startswith(ROOM):
                yield series(sample, values, own)
        gpu = gpu_values(moves, model, lost, scrapes)
        for sample in of_gpu:
            # Of a GPU that does not answer there is no more than that.
            if not lost or sample[0] == "kvcache_gpu_up":
                yield series(sample, gpu, own)


def engine_values(random: Random, model: Model, state: str, scrapes: Sequence[float]) -> Values:
    """The figures of an engine under a load that comes and goes over hours, swings, and is at times more than it holds."""
    lengths = {"max": model.longest, "typical": model.typical, "p95": 3 * model.typical, str(LISTED_LENGTH): LISTED_LENGTH}
    request_blocks = {name: math.ceil(tokens / BLOCK_TOKENS) for name, tokens in lengths.items()}
    slots = {name: model.blocks // blocks for name, blocks in request_blocks.items()}
    values: dict[tuple[str, str], list[float]] = {}

    def put(name: str, value: float, apart: str = "") -> None:
        values.setdefault((f"kvcache_{name}", apart), []).append(float(value))

    level, hours, phase = model.load + random.gauss(0, 0.05), random.uniform(1, 6), random.uniform(0, 2 * math.pi)
    turn = 2 * math.pi / (hours * 3600)
    swing, preempted, looked_up, found = 0.0, 0, 0, 0
    for at in scrapes:
        swing = 0.95 * swing + random.gauss(0, 0.02)
        load = max(0.0, level * (1 + 0.3 * math.sin(turn * at + phase)) + swing)
        slope = level * 0.3 * turn * math.cos(turn * at + phase)
        # A rank test finds no trend in what hardly changes.
        trend = slope if abs(slope) > 5e-5 else 0.0
        used = min(model.blocks, int(load * model.blocks))
        free = model.blocks - used
        running = used // request_blocks["typical"]
        waiting = int(max(0.0, load - 1) * slots["typical"])
        preempted += random.randrange(3) if waiting else 0
        hits = random.uniform(0.2, 0.4)
        looked_up += running * model.typical
        found += int(hits * running * model.typical)
        now = state if state != "serving" else "serving" if running else "idle"
        left = {name: 0 if waiting else int(0.9 * free / blocks) for name, blocks in request_blocks.items()}
        binding = "kv_blocks" if load > 0.2 else "max_num_seqs"
        for unit, scale in (("blocks", 1), ("tokens", BLOCK_TOKENS), ("bytes", BLOCK_TOKENS * model.bytes_per_token)):
            put(f"capacity_{unit}", model.blocks * scale)
            put(f"used_{unit}", used * scale)
            put(f"headroom_{unit}", free * scale)
        put("usage_ratio", used / model.blocks)
        for name, tokens in lengths.items():
            put("request_length_tokens", tokens, name)
            put("request_slots", slots[name], name)
            put("remaining_request_slots", left[name], name)
        put("headroom_ratio", left["typical"] / slots["typical"])
        put("exhaustion_seconds", 0.0 if not free else max(0.0, 1 - load) / trend if trend > 0 else math.inf)
        put("offered_load_ratio", load)
        put("offered_load_trend_per_second", trend)
        for limit in LIMITS:
            put("binding_limit", limit == binding, limit)
        for name in STATES:
            put("engine_state", name == now, name)
        put("requests_running", running)
        put("requests_waiting", waiting, "capacity")
        put("preemptions_total", preempted)
        put("prefix_cache_query_tokens_total", looked_up)
        put("prefix_cache_hit_tokens_total", found)
        put("prefix_cache_hit_ratio", hits)
        put("memory_bandwidth_utilization_ratio", 0.6 * used / model.blocks, "computed")
        for quantile, seconds in (("0.5", 0.2), ("0.95", 0.6)):
            put("time_to_first_token_seconds", seconds * (1 + load + waiting), quantile)
            put("time_per_output_token_seconds", seconds / 20 * (1 + load), quantile)
        put("bytes_per_token", model.bytes_per_token)
        put("last_success_timestamp_seconds", at, "vllm")
        put("poll_duration_seconds", random.uniform(0.01, 0.17), "vllm")
    return values


def gpu_values(random: Random, model: Model, lost: bool, scrapes: Sequence[float]) -> Values:
    """The figures of the GPU of an engine; a stranger holds memory of a few."""
    stranger = 2e9 if random.random() < 0.01 else 0.0
    constants = {
        ("kvcache_gpu_up", ""): float(not lost),
        ("kvcache_gpu_memory_component_bytes", "kv_cache"): float(model.blocks * BLOCK_TOKENS * model.bytes_per_token),
        ("kvcache_gpu_memory_component_bytes", "other_processes"): stranger,
    }
    return {
        **{name: [value] * len(scrapes) for name, value in constants.items()},
        ("kvcache_gpu_utilization_ratio", ""): [min(1.0, max(0.0, random.gauss(0.7, 0.1))) for _ in scrapes],
    }
