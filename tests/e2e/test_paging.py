"""A page on its whole way, with the real programs: simulated engines, exporter, Prometheus, Alertmanager, a webhook."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from paging import ALERTMANAGER, ROOT, Notification, Programs, Running, alertmanager_alone, paging

from kvcache_exporter.simulator import EngineParameters, SimulatedEngineServer, TrafficParameters
from lab import wait_until

AUTOSCALING = ROOT / "alerts" / "autoscaling"

# An engine whose cache fills within a minute, one that is half full for good, and one whose few seats are always taken.
ENGINES = {
    "rising": (EngineParameters(), TrafficParameters()),
    "steady": (EngineParameters(), TrafficParameters(trough_rate=10.0, crest_rate=10.0)),
    "seats": (EngineParameters(max_num_seqs=16), TrafficParameters(trough_rate=6.0, crest_rate=6.0)),
}
BYTES_PER_TOKEN = 131_072


def target(name: str, url: str, parameters: EngineParameters) -> str:
    settings = f"max_num_seqs: {parameters.max_num_seqs}, kv_cache_bytes_per_token: {BYTES_PER_TOKEN}"
    return f"- {{name: {name}, url: '{url}', {settings}}}\n"


def about(name: str, notifications: Sequence[Notification]) -> list[tuple[str, dict[str, str], dict[str, str]]]:
    """(receiver, labels, annotations) of each firing alert of one engine."""
    return [
        (notification.receiver, alert["labels"], alert["annotations"])
        for notification in list(notifications)
        for alert in notification.firing
        if alert["labels"].get("target") == name
    ]


@pytest.fixture(scope="module")
def running(prometheus: Path, alertmanager: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(SimulatedEngineServer(engine, traffic, model_name=f"model-{name}"))
            for name, (engine, traffic) in ENGINES.items()
        }
        targets = "targets:\n" + "".join(target(name, server.url, ENGINES[name][0]) for name, server in servers.items())
        programs = Programs(prometheus, alertmanager)
        folder = tmp_path_factory.mktemp("paging")
        yield stack.enter_context(paging(programs, folder, targets, poll_seconds=1.0, scrape_seconds=1.0))


def test_page_comes_for_the_engine_that_fills_and_for_no_other(running: Running) -> None:
    wait_until(lambda: about("rising", running.notifications), seconds=120)
    receiver, labels, annotations = about("rising", running.notifications)[0]
    assert (receiver, labels["alertname"], labels["severity"]) == ("page", "KVCacheExhaustionPredicted", "page")
    assert labels["engine"] == "0"
    assert labels["model_name"] == "model-rising"
    assert annotations["summary"].startswith("KV cache of rising engine 0 will be full in ")
    assert annotations["runbook_url"].endswith("/alerts/runbooks/KVCacheExhaustionPredicted.md")
    assert annotations["dashboard"] == "/d/kvcache-engine?var-target=rising&var-engine=0"
    assert about("steady", running.notifications) == []
    assert about("seats", running.notifications) == []


def the_one(values: Mapping[tuple[tuple[str, str], ...], float]) -> float:
    (value,) = values.values()
    return value


def test_autoscalers_ask_for_as_many_engines_as_the_requests_fill(running: Running) -> None:
    """The queries of the examples, on the model that is half full and on the one whose seats are taken and that has a queue."""
    wait_until(lambda: running.query("model_name:kvcache_busy_engines:sum"), seconds=60)
    trigger = yaml.safe_load((AUTOSCALING / "keda-scaledobject.yaml").read_text())["spec"]["triggers"][0]["metadata"]
    (rule,) = yaml.safe_load((AUTOSCALING / "prometheus-adapter-values.yaml").read_text())["rules"]["external"]
    series = next(iter(running.query(rule["seriesQuery"])))
    assert ("namespace", "ml") in series
    for model, at_least, at_most in (("model-steady", 0.1, 0.9), ("model-seats", 1.0, 100.0)):
        keda = trigger["query"].replace("llama-3.1-8b", model)
        adapter = rule["metricsQuery"].replace("<<.GroupBy>>", "namespace").replace("<<.Series>>", dict(series)["__name__"])
        adapter = adapter.replace("<<.LabelMatchers>>", f'namespace="ml",model_name="{model}"')
        busy = the_one(running.query(keda))
        assert at_least <= busy <= at_most
        assert abs(the_one(running.query(adapter)) - busy) < 0.2 * busy


def test_both_autoscalers_fill_engines_alike() -> None:
    trigger = yaml.safe_load((AUTOSCALING / "keda-scaledobject.yaml").read_text())["spec"]["triggers"][0]["metadata"]
    (metric,) = yaml.safe_load((AUTOSCALING / "hpa.yaml").read_text())["spec"]["metrics"]
    (rule,) = yaml.safe_load((AUTOSCALING / "prometheus-adapter-values.yaml").read_text())["rules"]["external"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    assert metric["external"]["target"]["averageValue"] == f"{float(trigger['threshold']) * 1000:.0f}m"


def suppressed(address: str, alerts: Sequence[Mapping[str, str]]) -> set[tuple[str, str]]:
    """(alert, engine) of those that an Alertmanager mutes when all of these fire."""
    body = json.dumps([{"labels": labels} for labels in alerts]).encode()
    request = urllib.request.Request(f"{address}/api/v2/alerts", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5):
        pass
    with urllib.request.urlopen(f"{address}/api/v2/alerts", timeout=5) as response:
        found = json.load(response)
    assert len(found) == len(alerts)
    muted = [alert["labels"] for alert in found if alert["status"]["inhibitedBy"]]
    return {(labels["alertname"], labels["engine"]) for labels in muted}


def test_what_has_happened_mutes_what_was_foreseen_of_the_same_engine(alertmanager: Path, tmp_path: Path) -> None:
    engine = {"target": "t", "engine": "0", "job": "kvcache-exporter", "instance": "i", "severity": "page"}
    names = ("KVCacheExhausted", "KVCacheExhaustionPredicted", "KVCacheHeadroomLow", "KVCachePreemptionStorm")
    alerts = [{**engine, "alertname": name} for name in names]
    alerts += [{**engine, "alertname": "KVCacheHeadroomLow", "engine": "1"}]
    with alertmanager_alone(alertmanager, tmp_path) as address:
        wait_until(lambda: answers(f"{address}/-/ready"))
        assert suppressed(address, alerts) == {("KVCacheExhaustionPredicted", "0"), ("KVCacheHeadroomLow", "0")}


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def test_shipped_routing_is_accepted(alertmanager: Path) -> None:
    check = subprocess.run(
        [alertmanager / "amtool", "check-config", str(ALERTMANAGER)], capture_output=True, text=True, check=False
    )
    assert (check.returncode, "SUCCESS" in check.stdout) == (0, True), check.stdout + check.stderr


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (("severity=page", "alertname=KVCacheExhausted"), "on-call"),
        (("severity=ticket", "alertname=KVCacheHeadroomLow"), "tickets"),
    ],
)
def test_severity_decides_who_is_told(alertmanager: Path, labels: tuple[str, ...], receiver: str) -> None:
    command: list[str | Path] = [alertmanager / "amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == receiver
