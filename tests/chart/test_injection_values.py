"""When the policy that adds the sidecar is there, in which version of its API, and which values do not go with it."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest
from helm_engine import render

INJECTION: dict[str, Any] = {"mode": "sidecar", "sidecar": {"injection": {"enabled": True}}}


@pytest.mark.parametrize(("kubernetes", "version"), [("1.34", "v1beta1"), ("1.35", "v1beta1"), ("1.36", "v1"), ("1.37", "v1")])
def test_api_version_is_one_that_the_cluster_serves(kubernetes: str, version: str) -> None:
    rendered = render(INJECTION, kubernetes=kubernetes)
    for kind in ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"):
        assert rendered.one(kind)["apiVersion"] == f"admissionregistration.k8s.io/{version}"


def _clusters_have(monkeypatch: pytest.MonkeyPatch, *apis: str) -> None:
    monkeypatch.setattr("helm_engine.api_versions", lambda kubernetes, *, operator: list(apis))


def test_cluster_without_the_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _clusters_have(monkeypatch, "v1/Pod", "admissionregistration.k8s.io/v1")
    with pytest.raises(helm_python.HelmError, match="needs MutatingAdmissionPolicy, which this cluster has not"):
        render(INJECTION, kubernetes="1.33")


def test_without_a_cluster_the_api_is_the_stable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `helm template` renders it."""
    _clusters_have(monkeypatch)
    rendered = render(INJECTION, kubernetes="1.32")
    assert rendered.one("MutatingAdmissionPolicy")["apiVersion"] == "admissionregistration.k8s.io/v1"


@pytest.mark.parametrize(
    ("values", "name", "annotation"),
    [
        ({"config": {"targets": [{"url": "http://vllm:8000"}]}}, "config", "config"),
        ({"modelConfigs": [{"model": "Qwen/Qwen3-8B", "config": {"num_hidden_layers": 36}}]}, "modelConfigs", "model-volume"),
        ({"gpu": {"uuids": ["GPU-aaaa"]}}, "gpu.uuids", "visible-devices"),
        ({"sidecar": {"engineArgs": ["--block-size=16"]}}, "sidecar.engineArgs", "engine-args"),
        ({"sidecar": {"modelVolume": {"name": "model", "mountPath": "/models"}}}, "sidecar.modelVolume", "model-volume"),
    ],
)
def test_values_of_one_engine_are_refused(values: dict[str, Any], name: str, annotation: str) -> None:
    sidecar = {**values.get("sidecar", {}), **INJECTION["sidecar"]}
    with pytest.raises(helm_python.HelmError, match=f"{name} is set, .*kvcache-exporter.io/{annotation}"):
        render({**values, "mode": "sidecar", "sidecar": sidecar})


def test_nothing_is_injected_unless_asked_for() -> None:
    assert not {kind for kind in render({"mode": "sidecar"}).kinds if kind.startswith("Mutating")}
