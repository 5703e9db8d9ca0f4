"""The real Prometheus scrapes the demo and answers the question that the product is for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab import free_port, wait_until


@contextmanager
def program(*command: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def api(prometheus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Prometheus that scrapes a demo once a second."""
    folder = tmp_path_factory.mktemp("prometheus")
    exporter, port = f"127.0.0.1:{free_port()}", free_port()
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: kvcache-exporter, static_configs: [{{targets: ['{exporter}']}}]}}]\n"
    )
    demo = (sys.executable, "-m", "kvcache_exporter", "demo", "--listen-address", exporter)
    server = (
        prometheus / "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    with program(*demo), program(*server):
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: query(address, "kvcache_capacity_bytes"), seconds=40)
        yield address


def query(api: str, expression: str) -> list[dict[str, Any]]:
    url = f"{api}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            result: list[dict[str, Any]] = json.load(response)["data"]["result"]
            return result
    except OSError:
        return []


def value(api: str, expression: str) -> float:
    (sample,) = query(api, expression)
    return float(sample["value"][1])


def test_scrape_is_accepted(api: str) -> None:
    assert value(api, 'up{job="kvcache-exporter"}') == 1
    assert value(api, 'scrape_samples_scraped{job="kvcache-exporter"}') > 40


def test_remaining_slots_of_each_length(api: str) -> None:
    slots = {sample["metric"]["length"]: float(sample["value"][1]) for sample in query(api, "kvcache_remaining_request_slots")}
    assert {"max", "2048"} <= slots.keys() <= {"typical", "p95", "max", "2048"}
    assert 0 <= slots["max"] <= 52
    assert slots["max"] <= slots["2048"] <= 211


def test_numbers_agree_with_each_other_in_promql(api: str) -> None:
    """Joins as a user would write them: every engine series has the same three labels."""
    assert value(api, "kvcache_used_blocks + kvcache_headroom_blocks - kvcache_capacity_blocks") == 0
    assert value(api, "kvcache_capacity_bytes / kvcache_capacity_blocks / 16 - kvcache_bytes_per_token") == 0
    assert value(api, "abs(kvcache_used_blocks / kvcache_capacity_blocks - kvcache_usage_ratio)") < 1e-4
    assert value(api, "kvcache_usage_ratio * on (target, engine) group_left (simulated) kvcache_engine_info >= 0") >= 0
    assert value(api, "sum(kvcache_requests_waiting) >= 0") >= 0


def test_promtool_accepts_a_live_page(prometheus: Path, api: str) -> None:
    (target,) = {sample["metric"]["instance"] for sample in query(api, "kvcache_exporter_build_info")}
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as response:
        page = response.read()
    result = subprocess.run([prometheus / "promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


def test_names_end_in_base_units(api: str) -> None:
    """What promtool does not see: percent, milli-units and binary prefixes in names."""
    names = {sample["metric"]["__name__"] for sample in query(api, '{__name__=~"kvcache_.*"}')}
    assert len(names) > 25
    assert not [name for name in names if re.search(r"percent|_pct|milli|_ms$|_[kmgt]i?b(ytes)?$|_perc$", name)]
