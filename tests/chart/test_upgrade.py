"""What may never change between versions of a release stays as it is, and two releases keep out of each other's way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import helm_python
import pytest
import yaml
from helm_engine import VALUES, VARIANTS, Render, chart_files, load, render, selects, values_of, variant_values

OWN_LABELS = values_of(VALUES / "own-labels.yaml")
STABLE = {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"}


@pytest.fixture(scope="module")
def next_version() -> helm_python.Chart:
    """The chart as of a later version, of itself and of the exporter."""
    files = chart_files()
    description = yaml.safe_load(files["Chart.yaml"])
    return load({**files, "Chart.yaml": yaml.safe_dump({**description, "version": "9.8.7", "appVersion": "9.8.7"}).encode()})


def selectors(result: Render) -> dict[str, Any]:
    """All selectors, by the object that has them."""
    return {
        f"{manifest['kind']} {manifest['metadata']['name']}": manifest["spec"][key]
        for manifest in result.manifests
        for key in manifest.get("spec", {}).keys() & {"selector", "podSelector"}
    }


def all_values() -> dict[str, Any]:
    """Values of all variants, and some labels of the user's in either mode."""
    return {name: variant_values(name) for name in VARIANTS} | {
        f"labels-{mode}": {**OWN_LABELS, "mode": mode} for mode in ("daemonset", "sidecar")
    }


each_values = pytest.mark.parametrize("values", all_values().values(), ids=all_values())


@each_values
def test_selectors_outlive_an_upgrade(values: Mapping[str, Any], next_version: helm_python.Chart) -> None:
    before, after = render(values), render(values, chart=next_version)
    assert selectors(before) == selectors(after)
    assert before.text != after.text or not before.manifests, "the version shows somewhere, or this compares a thing with itself"


@each_values
def test_workloads_select_by_name_and_instance_only(values: Mapping[str, Any]) -> None:
    result = render(values)
    for pod in result.pods:
        selector = pod.owner["spec"]["selector"]
        assert selector.keys() == {"matchLabels"}
        assert {"app.kubernetes.io/name", "app.kubernetes.io/instance"} <= selector["matchLabels"].keys() <= STABLE
        assert selector["matchLabels"].items() <= pod.labels.items()
    for service in result.all("Service"):
        assert service["spec"]["selector"].keys() <= STABLE
    if result.pods:
        for kind in ("PodMonitor", "ServiceMonitor"):
            assert all(monitor["spec"]["selector"]["matchLabels"].keys() <= STABLE for monitor in result.all(kind))


def test_labels_of_the_user_are_where_they_belong() -> None:
    result = render({**OWN_LABELS, "mode": "daemonset"})
    assert result.pod.labels["team"] == "ml"
    assert result.pod.labels["app.kubernetes.io/name"] == "kv"
    for manifest in result.manifests:
        assert manifest["metadata"]["labels"]["cost-centre"] == "42"


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "daemonset"},
        {"mode": "daemonset", "fullnameOverride": "exporter"},
        {"mode": "daemonset", "nameOverride": "kv"},
    ],
)
@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
def test_releases_in_one_namespace_keep_to_their_own_pods(values: Mapping[str, Any], monitor: str) -> None:
    """With the label of a name that both are given, too."""
    enabled = {**values, monitor: {"enabled": True}, "networkPolicy": {"enabled": True}}
    one, two = render(enabled, release="one"), render(enabled, release="two")
    for own, other in ((one, two), (two, one)):
        for selector in selectors(own).values():
            labels = [pod.labels for pod in own.pods] + [service["metadata"]["labels"] for service in own.all("Service")]
            assert any(selects(_label_selector(selector), each) for each in labels)
            foreign = [pod.labels for pod in other.pods] + [service["metadata"]["labels"] for service in other.all("Service")]
            assert not any(selects(_label_selector(selector), each) for each in foreign)


def _label_selector(selector: Mapping[str, Any]) -> Mapping[str, Any]:
    """A Service's selector is bare labels."""
    return selector if selector.keys() & {"matchLabels", "matchExpressions"} else {"matchLabels": selector}


def test_daemonset_is_rolled_node_by_node() -> None:
    strategy = render({"mode": "daemonset"}).one("DaemonSet")["spec"]["updateStrategy"]
    assert strategy["type"] == "RollingUpdate"


def test_changed_configuration_rolls_the_pods() -> None:
    """By a checksum in the pod template, which nothing else changes."""
    base = {"mode": "daemonset"}
    first, same, other = (
        render({**base, "config": {"poll_interval_seconds": seconds}, **more}).pod.annotations
        for seconds, more in ((5, {}), (5, {"service": {"annotations": {"a": "b"}}}), (7, {}))
    )
    assert first == same
    assert first["checksum/config"] != other["checksum/config"]
