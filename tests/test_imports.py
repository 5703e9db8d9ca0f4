"""Dependencies point one way, and each third-party package is imported where its edge is, and nowhere else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "exporter" / "kvcache_exporter"

# Each layer may import the layers above it here, and itself.
LAYERS = (
    {"errors", "model_config", "kv_cache_spec", "gpus", "gpu_reading", "readings", "capacity", "headroom", "plan", "snapshot"}
    | {"engine_state", "expected_blocks", "forecast", "history", "length_distribution", "limits", "load", "request_mix"}
    | {"running_requests", "recent_latency", "prefix_sharing", "visible_devices", "gpu_owners", "gpu_memory"}
    | {
        "memory_bandwidth",
        "weights",
        "human_integer",
        "shell_words",
        "container_words",
        "engine_args",
        "vllm_command_line",
        "default_seats",
    }
    | {"engine_pod"},
    {"sources", "config", "config_values", "yaml_section", "simulator", "health", "job", "capture"},
    {"target", "target_arguments", "target_weights", "discovery", "node_gpus", "gpu_placement", "polled_target", "poller"},
    {"collector", "families", "landing_page", "live_view", "logs", "server"}
    | {"basic_auth", "server_tls", "web_access", "web_config"},
    {"serve", "demo", "replay"},
    {"cli", "cli_options", "cli_plan", "cli_replay", "cli_serve", "__main__"},
)
CORE = LAYERS[0]

# What reads snapshots must not know where they come from.
EDGES_OUT = {"collector", "families", "landing_page", "live_view", "server"}

THIRD_PARTY = {
    "bcrypt": {"basic_auth"},
    "click": {"cli", "cli_options", "cli_plan", "cli_replay", "cli_serve"},
    "prometheus_client": {"collector", "families.family", "server", "serve"},
    "google": {"sources.pod_resources"},
    "grpc": {"sources.pod_resources"},
    "psutil": {"sources.processes"},
    "pynvml": {"sources.nvml", "sources.nvml.device", "sources.nvml.errors", "sources.nvml.events"},
    "requests": {"sources.http"},
    "urllib3": {"sources.http"},
    "yaml": {"config", "web_config", "yaml_section"},
    "_typeshed": {"server"},
}


def modules() -> Iterator[tuple[str, Path]]:
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            yield name, file


MODULES = dict(modules())


def imported(name: str) -> set[str]:
    """Modules that a module imports, in full, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "kvcache_exporter"}
    return found


def ours(name: str) -> set[str]:
    """Own modules that a module imports, by the first part of their name."""
    prefix = "kvcache_exporter."
    return {module.removeprefix(prefix).split(".")[0] for module in imported(name) if module.startswith(prefix)} - {"__version__"}


def layer(module: str) -> int:
    return next(index for index, names in enumerate(LAYERS) if module.split(".")[0] in names)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_one_way(name: str) -> None:
    for other in ours(name):
        assert layer(other) <= layer(name), f"{name} imports {other}"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_third_party_imports_stay_at_their_edge(name: str) -> None:
    for module in imported(name):
        top = module.split(".")[0]
        if top not in sys.stdlib_module_names and top != "kvcache_exporter":
            assert name in THIRD_PARTY.get(top, set()), f"{name} imports {top}"


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.split(".")[0] in CORE))
def test_core_is_pure(name: str) -> None:
    """No clock, no I/O, no third party: what the core may import is a short list."""
    allowed = {"__future__", "bisect", "collections", "collections.abc", "dataclasses", "functools", "itertools", "math", "re"}
    allowed |= {"json", "types", "typing"}
    assert {module for module in imported(name) if not module.startswith("kvcache_exporter")} <= allowed


@pytest.mark.parametrize("name", sorted(EDGES_OUT))
def test_what_shows_snapshots_does_not_know_their_sources(name: str) -> None:
    assert not ours(name) & {"sources", "poller", "target"}


def test_core_has_no_cycles() -> None:
    graph: dict[str, set[str]] = {name: set() for name in CORE}
    for module in MODULES:
        if (name := module.split(".")[0]) in CORE:
            graph[name] |= ours(module) & CORE - {name}
    while graph:
        leaves = {name for name, others in graph.items() if not others & graph.keys()}
        assert leaves, f"cycle among {sorted(graph)}"
        graph = {name: others for name, others in graph.items() if name not in leaves}


def test_help_imports_nothing_heavy() -> None:
    """Offline commands start at once: what only `serve` needs is not imported before it runs."""
    heavy = ("requests", "pynvml", "yaml", "prometheus_client")
    code = f"import sys, kvcache_exporter.cli; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
