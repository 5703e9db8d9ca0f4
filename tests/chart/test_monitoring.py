"""Prometheus finds the pods and gets the rules, Grafana the dashboards of the repository, with the labels that they go by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from helm_engine import EXAMPLE_CHARTS, VALUES, Pod, Render, each_render, example, render, rendered, selects, the_chart, values_of

from promtool import ROOT, RULES, promtool

STACK = values_of(VALUES / "release-label.yaml")
BOARDS = sorted((ROOT / "dashboards").glob("*.json"))


def scraped_ports(result: Render, pods: list[Pod]) -> list[tuple[Pod, Mapping[str, Any]]]:
    """(pod, port of one of its containers) for each port that a monitor of the render would have scraped."""
    found = []
    for monitor in result.all("PodMonitor"):
        for pod in pods:
            if selects(monitor["spec"]["selector"], pod.labels):
                for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                    found += [(pod, port) for port in _ports(pod) if port["name"] == endpoint["port"]]
    for monitor in result.all("ServiceMonitor"):
        for service in result.all("Service"):
            if selects(monitor["spec"]["selector"], service["metadata"]["labels"]):
                for endpoint in monitor["spec"]["endpoints"]:
                    (port,) = (port for port in service["spec"]["ports"] if port["name"] == endpoint["port"])
                    found += [
                        (pod, own)
                        for pod in pods
                        if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)
                        for own in _ports(pod)
                        if port["targetPort"] in (own["name"], own["containerPort"])
                    ]
    return found


def _ports(pod: Pod) -> list[Mapping[str, Any]]:
    """Named ports, of sidecars too, as Prometheus discovers them."""
    return [port for container in pod.containers for port in container.get("ports", ()) if "name" in port]


@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
def test_each_pod_of_the_daemonset_is_scraped_once(monitor: str) -> None:
    result = render({"mode": "daemonset", monitor: {"enabled": True}})
    ((pod, port),) = scraped_ports(result, result.pods)
    assert (pod, port["name"], port["containerPort"]) == (result.pod, "kvcache-metrics", 9948)


@pytest.mark.parametrize("name", EXAMPLE_CHARTS)
def test_each_pod_with_a_sidecar_is_scraped_once(name: str) -> None:
    """And by the release that it is of."""
    result = render({"kvcache-exporter": {"podMonitor": {"enabled": True}}}, chart=example(name), namespace="ml")
    assert result.pods
    assert result.one("PodMonitor")["spec"]["namespaceSelector"] == {"matchNames": ["ml"]}
    found = [(pod, port["name"]) for pod, port in scraped_ports(result, result.pods)]
    assert found == [(pod, "kvcache-metrics") for pod in result.pods]


def test_label_of_the_stack_is_on_monitor_and_rules() -> None:
    result = render(STACK)
    for kind in ("PodMonitor", "PrometheusRule"):
        assert result.one(kind)["metadata"]["labels"].items() >= {"release": "kube-prometheus-stack"}.items()
    (endpoint,) = result.one("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (endpoint["interval"], endpoint["scrapeTimeout"]) == ("15s", "10s")


@pytest.mark.parametrize("value", ["1", "true", "null", "1e3", "0x1f", "on"])
def test_label_values_that_look_like_something_else_stay_text(value: str) -> None:
    labels = {"release": value}
    result = render({"podMonitor": {"enabled": True, "labels": labels}, "prometheusRule": {"enabled": True, "labels": labels}})
    for kind in ("PodMonitor", "PrometheusRule"):
        assert result.one(kind)["metadata"]["labels"]["release"] == value


@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
@pytest.mark.parametrize(("interval", "timeout"), [("15s", "16s"), ("15s", "1m"), ("500ms", "1s"), ("1m", "1h")])
def test_timeout_above_the_interval_is_refused(monitor: str, interval: str, timeout: str) -> None:
    """Prometheus would refuse its whole configuration."""
    with pytest.raises(helm_python.HelmError, match="scrapeTimeout"):
        render({monitor: {"enabled": True, "interval": interval, "scrapeTimeout": timeout}})


@pytest.mark.parametrize(
    ("interval", "timeout"), [("15s", "15s"), ("1m", "59s"), ("1h", "1m"), ("1s", "500ms"), ("1m30s", "90s")]
)
def test_timeout_up_to_the_interval_is_taken(interval: str, timeout: str) -> None:
    render({"podMonitor": {"enabled": True, "interval": interval, "scrapeTimeout": timeout}})


def test_both_monitors_are_refused() -> None:
    """Every target would be scraped twice, and every alert would come twice."""
    with pytest.raises(helm_python.HelmError, match=r"podMonitor.*serviceMonitor|serviceMonitor.*podMonitor"):
        render({"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}})


@pytest.mark.parametrize("key", ["podMonitor", "serviceMonitor", "prometheusRule"])
def test_cluster_without_the_operator_is_told_so(key: str) -> None:
    """By a sentence at the start, not by half a release."""
    with pytest.raises(helm_python.HelmError, match=r"monitoring\.coreos\.com"):
        render({key: {"enabled": True}}, operator=False)


def test_template_without_a_cluster_has_what_is_asked_for() -> None:
    """`helm template` knows no kinds, only group versions, and so cannot tell that there is no operator."""
    rendered_files = the_chart().render({"podMonitor": {"enabled": True}}, name="kv", namespace="monitoring")
    assert "kind: PodMonitor" in rendered_files["kvcache-exporter/templates/podmonitor.yaml"]


def test_nothing_of_the_operator_by_default() -> None:
    assert not render({}, operator=False).kinds & {"PodMonitor", "ServiceMonitor", "PrometheusRule"}


@each_render
def test_monitors_keep_the_labels_of_the_exporter(name: str) -> None:
    """None of them is stored as `exported_…`, whatever it is called one day."""
    for monitor in (*rendered(name).all("PodMonitor"), *rendered(name).all("ServiceMonitor")):
        for endpoint in monitor["spec"].get("podMetricsEndpoints", monitor["spec"].get("endpoints")):
            assert endpoint["honorLabels"] is True


@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
def test_series_have_the_job_and_the_node(monitor: str) -> None:
    """The rules look for a job that contains `kvcache-exporter`, whatever the release is called."""
    result = render({monitor: {"enabled": True}, "fullnameOverride": "x"}, release="r")
    (found,) = (manifest for manifest in result.manifests if manifest["kind"].lower() == monitor.lower())
    spec = found["spec"]
    (endpoint,) = spec.get("podMetricsEndpoints", spec.get("endpoints"))
    rules = {rule["targetLabel"]: rule for rule in endpoint["relabelings"]}
    assert rules["node"]["sourceLabels"] == ["__meta_kubernetes_pod_node_name"]
    assert rules["job"]["replacement"].startswith("kvcache-exporter")
    assert "jobLabel" not in spec


@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
@pytest.mark.parametrize(
    ("secret", "scheme"),
    [({}, "http"), ({"name": "web"}, "https"), ({"name": "web", "scheme": "HTTP"}, "http")],
)
def test_scrape_speaks_what_the_exporter_does(monitor: str, secret: Mapping[str, str], scheme: str) -> None:
    result = render({monitor: {"enabled": True}, "webConfigSecret": secret})
    (spec,) = (manifest["spec"] for manifest in result.manifests if manifest["kind"].lower() == monitor.lower())
    (endpoint,) = spec.get("podMetricsEndpoints", spec.get("endpoints"))
    assert endpoint["scheme"] == scheme


def test_relabelings_of_the_user_come_after_ours() -> None:
    own = {"action": "labeldrop", "regex": "node"}
    (endpoint,) = render({"podMonitor": {"enabled": True, "relabelings": [own]}}).one("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"][-1] == own
    assert len(endpoint["relabelings"]) > 1


# Rules and dashboards


def rule_groups() -> object:
    spec = render({"prometheusRule": {"enabled": True}}).one("PrometheusRule")["spec"]
    assert spec.keys() == {"groups"}
    return spec["groups"]


def test_rules_are_those_of_the_repository() -> None:
    """Helm has eaten no `{{ $labels.gpu }}` of theirs."""
    assert rule_groups() == yaml.safe_load(RULES.read_text())["groups"]


def test_rendered_rules_are_valid(prometheus: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": rule_groups()}))
    answer = promtool(prometheus, "check", "rules", file)
    assert answer.returncode == 0, answer.stdout


def dashboards(**values: object) -> list[dict[str, Any]]:
    """The ConfigMaps that Grafana's sidecar would load."""
    result = render({"dashboards": {"enabled": True, **values}})
    return [found for found in result.all("ConfigMap") if any(key.endswith(".json") for key in found["data"])]


def test_dashboards_are_those_of_the_repository() -> None:
    """To the byte: Helm has eaten no `{{ target }}` of theirs."""
    found = {name: text for config_map in dashboards() for name, text in config_map["data"].items()}
    assert found == {f"kvcache-{board.name}": board.read_text() for board in BOARDS}


def test_grafana_loads_the_dashboards() -> None:
    for config_map in dashboards():
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert all(name.endswith(".json") for name in config_map["data"])
        assert len(json.dumps(config_map)) < 1024 * 1024, "what etcd takes"
    names = [name for config_map in dashboards() for name in config_map["data"]]
    assert len(set(names)) == len(names) == len(BOARDS), "the sidecar writes all into one folder"


def test_label_of_dashboards_is_of_the_users_choice() -> None:
    for config_map in dashboards(label="grafana-board", labelValue="true"):
        assert config_map["metadata"]["labels"]["grafana-board"] == "true"
        assert "grafana_dashboard" not in config_map["metadata"]["labels"]
