"""Each recorded page, and the page of ours that it becomes, to the byte; a changed name or HELP shows as a diff.

`make golden` writes them anew. Recorded engines served tiny-llama or tiny-gemma3 with max_model_len 4096; of the pages that a
version's own logger wrote without an engine (`.driven`) nothing but the page is known.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvcache_exporter.collector import KVCacheCollector
from kvcache_exporter.config import TargetConfig
from kvcache_exporter.model_config import parse_model_config
from kvcache_exporter.readings import ServedModel
from kvcache_exporter.snapshot import Snapshot
from kvcache_exporter.sources.vllm_page import parse_metrics
from kvcache_exporter.target import Facts, TargetHistory
from kvcache_exporter.target_weights import ModelOnDisk
from lab import DATA, TINY_GEMMA3, TINY_LLAMA, capture

CAPTURES = sorted(file.name.removesuffix(".prom.gz") for file in (DATA / "vllm").glob("*.prom.gz"))
NOW = 1_800_000_000.0


def exposition(name: str) -> str:
    """Our page for one recorded page, without health and without the process's own metrics."""
    facts = Facts()
    if not name.endswith(".driven"):
        content = TINY_GEMMA3 if "gemma3" in name else TINY_LLAMA
        files = ModelOnDisk(content, parse_model_config(content))
        facts = Facts(ServedModel("tiny", 4096, "/models/tiny"), name.partition("_")[0], files)
    config = TargetConfig(name="engine", url="http://127.0.0.1:8000")
    target, refusal = TargetHistory(config, request_lengths=(1024, 8192), window_seconds=300).observe(
        parse_metrics(capture(name)), NOW, facts
    )
    assert refusal is None
    registry = CollectorRegistry()
    snapshot = Snapshot(at=NOW, targets=(target,), health=())
    registry.register(KVCacheCollector(lambda: snapshot, clock=lambda: NOW, stale_seconds=15))
    return generate_latest(registry).decode()


def golden(name: str) -> Path:
    return DATA / "golden" / f"{name}.prom"


@pytest.mark.parametrize("name", CAPTURES)
def test_page_is_as_recorded(name: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        golden(name).write_text(exposition(name))
    assert exposition(name) == golden(name).read_text()


def test_every_golden_page_has_its_capture() -> None:
    assert sorted(file.stem for file in (DATA / "golden").glob("*.prom")) == CAPTURES


@pytest.mark.parametrize("name", CAPTURES)
def test_promtool_finds_nothing(name: str, prometheus: Path) -> None:
    """`promtool check metrics` is clean."""
    result = subprocess.run(
        [prometheus / "promtool", "check", "metrics"], input=exposition(name), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
