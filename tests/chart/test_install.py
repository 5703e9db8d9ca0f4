"""What an install gives with few values, where its pods run, and what Helm says after it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from helm_engine import CHART, VALUES, each_variant, example, render, values_of, variant

from kvcache_exporter.families import FAMILIES
from promtool import ROOT

STACK = {"release": "kube-prometheus-stack"}
NVIDIA_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def short(mode: str) -> dict[str, Any]:
    """A values file of ten lines at most."""
    file = VALUES / f"short-{mode}.yaml"
    assert len(file.read_text().splitlines()) <= 10
    return values_of(file)


def test_ten_lines_watch_the_engines_of_all_nodes() -> None:
    result = render(short("daemonset"))
    assert result.kinds >= {"DaemonSet", "ClusterRole", "ClusterRoleBinding", "ServiceAccount", "ConfigMap"}
    assert NVIDIA_TAINT in result.pod.spec["tolerations"]
    assert result.pod.environment["NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    for kind in ("PodMonitor", "PrometheusRule"):
        assert result.one(kind)["metadata"]["labels"].items() >= STACK.items()
    assert sum("grafana_dashboard" in found["metadata"]["labels"] for found in result.all("ConfigMap")) == 3


def test_ten_lines_put_a_sidecar_beside_engines_that_ask_for_it() -> None:
    result = render(short("sidecar"))
    assert result.kinds >= {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}
    assert not result.pods, "the sidecars are in the engines' pods"
    for kind in ("PodMonitor", "PrometheusRule"):
        assert result.one(kind)["metadata"]["labels"].items() >= STACK.items()
    assert result.one("PodMonitor")["spec"]["namespaceSelector"] == {"any": True}


def values_in(readme: Path) -> list[dict[str, Any]]:
    """Whole values files that a README shows: what is piped into `helm install`, and blocks that begin with the mode."""
    text = readme.read_text()
    piped = re.findall(r"--values - <<'END'\n(.*?)END\n", text, re.DOTALL)
    blocks = re.findall(r"```yaml\n(mode: .*?)```", text, re.DOTALL)
    return [yaml.safe_load(block) for block in (*piped, *blocks)]


@pytest.mark.parametrize("readme", [ROOT / "README.md", CHART / "README.md"], ids=["project", "chart"])
def test_values_that_the_readmes_show_do_what_they_say(readme: Path) -> None:
    daemonset, sidecar = (render(values) for values in values_in(readme))
    assert daemonset.kinds >= {"DaemonSet", "PodMonitor", "PrometheusRule"}
    assert sidecar.kinds >= {"MutatingAdmissionPolicy", "PodMonitor"}
    for result in (daemonset, sidecar):
        assert result.one("PodMonitor")["metadata"]["labels"].items() >= STACK.items()
        assert "https://huggingface.co/{root}/resolve/main/config.json" in result.text


# Nodes


def test_pods_run_on_tainted_gpu_nodes_by_default_and_on_any_other() -> None:
    """A DaemonSet that fits no node is not told from one that is content: it wants none and has none."""
    spec = render({}).pod.spec
    assert spec["tolerations"] == [NVIDIA_TAINT]
    assert "nodeSelector" not in spec
    assert "affinity" not in spec


def test_tolerations_of_the_user_replace_those_of_the_chart() -> None:
    values = values_of(VALUES / "taints.yaml")
    spec = render(values).pod.spec
    assert spec["tolerations"] == values["tolerations"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert "tolerations" not in render({"tolerations": []}).pod.spec


# Notes


def test_notes_say_what_replaces_tolerations() -> None:
    notes = render({}).notes
    assert "nvidia.com/gpu:NoSchedule" in notes
    assert re.search(r"a list given there\s+replaces", notes)


@each_variant
def test_notes_name_metrics_that_there_are_and_no_hole(name: str) -> None:
    notes = variant(name).notes
    assert set(re.findall(r"\bkvcache_[a-z_]+", notes)) <= {family.name for family in FAMILIES}
    assert not re.search(r"<no value>|%!|<nil>|map\[", notes)
    assert "METRICS.md" in notes


@pytest.mark.parametrize("values", [{}, {"mode": "sidecar"}, {"mode": "sidecar", "sidecar": {"injection": {"enabled": True}}}])
def test_command_of_the_notes_turns_the_stacks_parts_on(values: Mapping[str, Any]) -> None:
    """The shortest way for who has kube-prometheus-stack, as it is printed after the install."""
    given = re.findall(r"--set (\S+)", render(values).notes)
    assert given
    merged: dict[str, Any] = dict(values)
    for expression in given:
        merged.update(helm_python.parse_set_string(expression))
    result = render(merged)
    for kind in ("PodMonitor", "PrometheusRule"):
        assert result.one(kind)["metadata"]["labels"].items() >= STACK.items()
    assert any("grafana_dashboard" in found["metadata"]["labels"] for found in result.all("ConfigMap"))
    assert "--set" not in result.notes, "nothing is left to be told"


@pytest.mark.parametrize("file", sorted(VALUES.glob("short-*.yaml")), ids=lambda file: file.stem)
def test_notes_of_a_full_install_say_what_scrapes_it(file: Path) -> None:
    assert "scraped as job kvcache-exporter" in render(values_of(file)).notes


def examples_of_the_readme() -> list[dict[str, Any]]:
    """Each block of values, for the chart itself or for one that has it as a dependency."""
    text = (CHART / "README.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) + re.findall(
        r"<<'END'\n(.*?)^END$", text, re.DOTALL | re.MULTILINE
    )
    # What calls named templates or is a part of a pod is no values file.
    found = [values_from(block) for block in blocks if "{{" not in block]
    return [values for values in found if values.keys() <= {*values_of(CHART / "values.yaml"), "kvcache-exporter"}]


def values_from(text: str) -> dict[str, Any]:
    return helm_python.values_from_yaml(text.replace("…", "more"))


@pytest.mark.parametrize("values", examples_of_the_readme(), ids=str)
def test_values_of_the_readme_are_taken(values: dict[str, Any]) -> None:
    if "kvcache-exporter" in values:
        render(values, chart=example("vllm-with-sidecar"))
    else:
        render(values)


def test_readme_has_examples() -> None:
    assert len(examples_of_the_readme()) >= 4


def test_readme_names_metrics_that_there_are() -> None:
    names = {name.rstrip("_") for name in re.findall(r"\bkvcache_[a-z_]+", (CHART / "README.md").read_text())}
    assert names - {"kvcache_exporter"} <= {family.name for family in FAMILIES}
