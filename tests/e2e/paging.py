"""The whole path of a page with the real programs: exporter, Prometheus with the shipped rules, Alertmanager, a webhook."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lab import free_port

ROOT = Path(__file__).parents[2]
RULES = ROOT / "alerts" / "kvcache.rules.yaml"
ALERTMANAGER = ROOT / "alerts" / "alertmanager.example.yaml"
EXAMPLE_RECEIVERS = "http://127.0.0.1:9095"


@dataclass(frozen=True)
class Notification:
    """One call of the webhook: when it came (Unix seconds), for which receiver (`page`, `ticket`), and what is in it."""

    at: float
    receiver: str
    content: dict[str, Any]

    @property
    def firing(self) -> list[dict[str, Any]]:
        """The alerts in it that fire, as Alertmanager sends them."""
        return [alert for alert in self.content["alerts"] if alert["status"] == "firing"]


class Webhook:
    """Takes notifications as a pager and a ticket queue would."""

    def __init__(self) -> None:
        self.notifications: list[Notification] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        notifications = self.notifications

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                notifications.append(Notification(time.time(), self.path.strip("/"), content))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Stay silent."""

        return Handler


@dataclass(frozen=True)
class Running:
    """All of it at work: what the webhook got so far, and the address of Prometheus."""

    notifications: list[Notification]
    prometheus_url: str

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The value of each series that an instant query gives now, by its labels; nothing while Prometheus starts."""
        url = f"{self.prometheus_url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                result = json.load(response)["data"]["result"]
        except OSError:
            return {}
        return {tuple(sorted(series["metric"].items())): float(series["value"][1]) for series in result}


@dataclass(frozen=True)
class Programs:
    """Folders of the real programs."""

    prometheus: Path
    alertmanager: Path


@contextmanager
def paging(programs: Programs, folder: Path, targets: str, *, poll_seconds: float, scrape_seconds: float) -> Iterator[Running]:
    """Run all of it for the `targets` of an exporter's configuration file (YAML).

    Rules and routing are those that are shipped; of the latter only the addresses of the receivers are replaced.
    """
    exporter, prometheus, alertmanager = free_port(), free_port(), free_port()
    with ExitStack() as stack:
        webhook = Webhook()
        stack.callback(webhook.close)
        (folder / "exporter.yml").write_text(
            f"listen_address: 127.0.0.1:{exporter}\npoll_interval_seconds: {poll_seconds}\n"
            f"poll_timeout_seconds: {poll_seconds / 2}\nnvml: false\n{targets}"
        )
        (folder / "alertmanager.yml").write_text(ALERTMANAGER.read_text().replace(EXAMPLE_RECEIVERS, webhook.url))
        (folder / "prometheus.yml").write_text(
            f"global: {{scrape_interval: {scrape_seconds:g}s, evaluation_interval: {scrape_seconds:g}s}}\n"
            f"rule_files: ['{RULES}']\n"
            f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['127.0.0.1:{alertmanager}']}}]}}]}}\n"
            "scrape_configs:\n- job_name: kvcache-exporter\n"
            f"  static_configs: [{{targets: ['127.0.0.1:{exporter}'], labels: {{namespace: ml}}}}]\n"
        )
        for command in (
            (sys.executable, "-m", "kvcache_exporter", "serve", "--config", folder / "exporter.yml", "--log-level", "warning"),
            (
                programs.alertmanager / "prometheus-alertmanager",
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{alertmanager}",
                "--cluster.listen-address=",
            ),
            (
                programs.prometheus / "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{prometheus}",
            ),
        ):
            stack.enter_context(running_program(folder, [str(part) for part in command]))
        yield Running(webhook.notifications, f"http://127.0.0.1:{prometheus}")


@contextmanager
def alertmanager_alone(programs: Path, folder: Path) -> Iterator[str]:
    """An Alertmanager with the shipped routing and nobody to tell; yields its address."""
    port = free_port()
    command = [
        str(programs / "prometheus-alertmanager"),
        f"--config.file={ALERTMANAGER}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with running_program(folder, command):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running_program(folder: Path, command: list[str]) -> Iterator[None]:
    """Run a program with its output in a file of the folder, and kill it at the end."""
    with (
        (folder / f"{Path(command[0]).name}.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            process.kill()
