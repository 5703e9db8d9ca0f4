"""An engine that Kubernetes tells: found through a pods API, and known by the command that it was started with."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from engine import Engine
from exporter import POLL_INTERVAL_SECONDS, Exporter
from flags import MAX_NUM_SEQS
from report import Report
from says import REQUEST_LENGTHS, ExporterSays, differences

from pods_api_server import NODE, PodsApiServer, pod

_TARGET = "ml/vllm-0"
_OPTS_IN = {"kvcache-exporter.io/scrape": "true"}


def compare_discovered(report: Report, folder: Path, engine: Engine, complete: Callable[[Exporter], ExporterSays]) -> None:
    """Compare what an exporter that knows nothing but its node says of an idle engine, and what stays when its pod goes."""
    with PodsApiServer() as api:
        watched = f"kubernetes: {{api_server: '{api.url}', node_name: {NODE}}}"
        with Exporter(folder, watched, request_lengths=REQUEST_LENGTHS) as exporter:
            api.apply(pod("vllm-0", containers=[{"name": "vllm", "command": list(engine.command)}], labels=_OPTS_IN))
            says = complete(exporter)
            problems = differences(engine.says(), says)
            (info,) = says.page.all("kvcache_engine_info")
            seats = f"{info.labels['max_num_seqs']} {info.labels['max_num_seqs_source']}"
            api.delete("vllm-0")
            time.sleep(2 * POLL_INTERVAL_SECONDS)
            left = [sample for sample in exporter.says().page.samples if sample.labels.get("target") == _TARGET]
    expected = f"{MAX_NUM_SEQS} configured"
    report.compare(
        "Found through a pods API, by the command that it was started with",
        [
            ("target", "namespace/pod", info.labels["target"], info.labels["target"] == _TARGET),
            ("max_num_seqs (command line)", MAX_NUM_SEQS, seats, seats == expected),
            ("every number", len(engine.says().exporter_should_say()), f"{len(problems)} differ", not problems),
            ("series two intervals after its pod is gone", 0, len(left), not left),
        ],
    )
    report.explain(problems)
