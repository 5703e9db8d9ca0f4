"""When does the page come? Traffic scenarios in real time through the exporter, Prometheus, Alertmanager and a webhook.

    python tests/e2e/page_scenarios.py SCENARIO_DIR...

Each folder has `capture.jsonl.gz` (a page of an engine each second), `engine.json` (its settings) and `truth.jsonl.gz` (what
really happened). All run beside each other as engines of one exporter, polled every 5 s, scraped and evaluated every 15 s, with
the shipped rules and the shipped routing; it takes as long as the longest, some 35 minutes. Printed is, for each, when a request
first waited for blocks or was preempted, when the first page about the KV cache came, and how many notifications there were.
"""

from __future__ import annotations

import bisect
import gzip
import json
import math
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from paging import ROOT, Notification, Programs, paging

POLL_SECONDS = 5.0
SCRAPE_SECONDS = 15.0
KV_ALERTS = frozenset({"KVCacheExhaustionPredicted", "KVCacheExhausted", "KVCachePreemptionStorm"})

_MODEL_NAME = re.compile(r'model_name="[^"]*"')
_WAITING = re.compile(r"^vllm:num_requests_waiting\{[^}]*\} (\S+)", re.MULTILINE)
# A recording does not tell what its requests wait for: a queue that stays so long is taken for one.
_QUEUE_SECONDS = 5.0


@dataclass(frozen=True)
class Scenario:
    """A capture to be served on a clock. `first_wait` is in seconds from its start, None if no request waited for blocks."""

    name: str
    times: Sequence[float]
    pages: Sequence[bytes]
    engine: dict[str, Any]
    first_wait: float | None

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.times[-1]

    def page(self, elapsed: float) -> bytes:
        """The newest page after so many seconds; the last one stays."""
        return self.pages[max(0, bisect.bisect_right(self.times, elapsed) - 1)]

    def target(self, url: str) -> str:
        """Its entry under `targets` of the exporter's configuration."""
        return (
            f"- {{name: {self.name}, url: '{url}/{self.name}', max_num_seqs: {self.engine.get('max_num_seqs', 32)}, "
            f"max_model_len: {self.engine['max_model_len']}, kv_cache_bytes_per_token: {self.engine['bytes_per_token']}}}\n"
        )


def load(folder: Path) -> Scenario:
    """Read a scenario; its model is named after it, so that notifications of each are its own."""
    times, pages, waiting = [], [], []
    with gzip.open(folder / "capture.jsonl.gz", "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            text = _MODEL_NAME.sub(f'model_name="{folder.name}"', entry["metrics"])
            times.append(entry["t"])
            pages.append(text.encode())
            waiting.append(sum(float(value) for value in _WAITING.findall(text)))
    with gzip.open(folder / "truth.jsonl.gz", "rt") as lines:
        truth = [json.loads(line) for line in lines]
    start = times[0]
    times = [at - start for at in times]
    foretold = [row["t"] - truth[0]["t"] + row["exhausted_in"] for row in truth if row.get("exhausted_in") is not None]
    is_told = any("exhausted_in" in row for row in truth)
    first_wait = min(foretold, default=None) if is_told else _first_queue(times, waiting)
    return Scenario(folder.name, times, pages, json.loads((folder / "engine.json").read_text()), first_wait)


def _first_queue(times: Sequence[float], waiting: Sequence[float]) -> float | None:
    since: float | None = None
    for at, number in zip(times, waiting, strict=True):
        since = (at if since is None else since) if number else None
        if since is not None and at - since >= _QUEUE_SECONDS:
            return since
    return None


class Stage:
    """Serves all scenarios, each below a path of its name, on one clock that `begin` starts."""

    def __init__(self, scenarios: Sequence[Scenario]) -> None:
        self._scenarios = {scenario.name: scenario for scenario in scenarios}
        self.began = math.inf
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def begin(self) -> None:
        """Let time run from now."""
        self.began = time.time()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _answer(self, path: str) -> tuple[str, bytes] | None:
        name, _, rest = path.strip("/").partition("/")
        scenario = self._scenarios[name]
        if rest == "metrics":
            return "text/plain; version=0.0.4", scenario.page(time.time() - self.began)
        if rest == "version":
            return "application/json", b'{"version": "0.32.0"}'
        if rest == "v1/models":
            model = {"id": name, "root": "/nowhere", "parent": None, "max_model_len": scenario.engine["max_model_len"]}
            return "application/json", json.dumps({"data": [model]}).encode()
        return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stage = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = stage._answer(self.path)
                if answer is None:
                    self.send_error(404)
                    return
                content_type, body = answer
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Stay silent."""

        return Handler


@dataclass(frozen=True)
class Row:
    """What came of one scenario: the first page about its KV cache, and calls of the webhook while it ran."""

    scenario: Scenario
    first_page: float | None
    alerts: tuple[str, ...]
    pages: int
    tickets: int

    def __str__(self) -> str:
        """As a row of the table."""
        lead = None
        if self.first_page is not None and self.scenario.first_wait is not None:
            lead = self.scenario.first_wait - self.first_page
        seconds = (self.scenario.first_wait, self.first_page, lead)
        shown = " ".join(f"{'-' if value is None else f'{value:.0f}':>10}" for value in seconds)
        return f"{self.scenario.name:<16} {shown} {self.pages:>6} {self.tickets:>8}  {', '.join(self.alerts)}"


def row_of(scenario: Scenario, began: float, notifications: Sequence[Notification]) -> Row:
    """Sum up what came for one scenario before it ended."""
    calls = []
    for notification in notifications:
        elapsed = notification.at - began
        names = {
            alert["labels"]["alertname"] for alert in notification.firing if alert["labels"].get("model_name") == scenario.name
        }
        if names and elapsed <= scenario.seconds:
            calls.append((elapsed, notification.receiver, names))
    kv_pages = [elapsed for elapsed, receiver, names in calls if receiver == "page" and names & KV_ALERTS]
    return Row(
        scenario,
        min(kv_pages, default=None),
        tuple(sorted({name for _, _, names in calls for name in names})),
        sum(receiver == "page" for _, receiver, _ in calls),
        sum(receiver == "ticket" for _, receiver, _ in calls),
    )


def main(folders: Sequence[Path]) -> None:
    """Run the scenarios and print the table."""
    scenarios = [load(folder) for folder in folders]
    programs = Programs(ROOT / ".cache" / "prometheus" / "bin", ROOT / ".cache" / "alertmanager" / "bin")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stage = Stage(scenarios)
        stack.callback(stage.close)
        targets = "targets:\n" + "".join(scenario.target(stage.url) for scenario in scenarios)
        running = stack.enter_context(paging(programs, folder, targets, poll_seconds=POLL_SECONDS, scrape_seconds=SCRAPE_SECONDS))
        notifications = running.notifications
        stage.begin()
        end = stage.began + max(scenario.seconds for scenario in scenarios)
        while time.time() < end:
            time.sleep(min(60.0, end - time.time()))
            print(f"{time.time() - stage.began:.0f} s, {len(notifications)} notifications", file=sys.stderr, flush=True)
        rows = [row_of(scenario, stage.began, notifications) for scenario in scenarios]
    print(f"{'scenario':<16} {'first wait':>10} {'first page':>10} {'lead s':>10} {'pages':>6} {'tickets':>8}  alerts")
    print("\n".join(map(str, rows)))


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
