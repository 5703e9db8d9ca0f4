"""Every manifest of every variant is one that the API server takes, in each version of Kubernetes."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import yaml
from helm_engine import (
    KUBERNETES,
    OPERATOR_KINDS,
    VARIANTS,
    each_render,
    each_variant,
    render,
    rendered,
    variant,
    variant_values,
)
from kubernetes_schemas import complaint

each_kubernetes = pytest.mark.parametrize("kubernetes", KUBERNETES)


@each_kubernetes
@each_render
def test_manifests_are_valid(name: str, kubernetes: str) -> None:
    manifests = rendered(name, kubernetes=kubernetes).manifests
    assert [complaint(manifest, kubernetes) for manifest in manifests if complaint(manifest, kubernetes)] == []


def test_variants_have_every_kind_of_the_operator() -> None:
    """Else the checks of those kinds would look at nothing."""
    assert {kind for name in VARIANTS for kind in variant(name).kinds} >= {"DaemonSet", *OPERATOR_KINDS}


class OncePerKey(yaml.CSafeLoader):
    """Refuses a key that is given twice, as the API server does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key is given twice among {keys}"
        return super().construct_mapping(node, deep=deep)


@each_render
def test_no_key_is_given_twice(name: str) -> None:
    documents = list(yaml.load_all(rendered(name).text, Loader=OncePerKey))
    assert len(documents) >= len(rendered(name).manifests)


def test_key_that_is_given_twice_is_told() -> None:
    with pytest.raises(AssertionError, match="'a', 'a'"):
        yaml.load("b:\n  a: 1\n  a: 2\n", Loader=OncePerKey)


@pytest.mark.parametrize(("release", "namespace"), [("a" * 53, "b" * 63), ("1e3", "2026")], ids=["longest", "numbers"])
@each_variant
def test_names_of_any_release_are_taken(name: str, release: str, namespace: str) -> None:
    """Those that YAML takes for numbers if they are not quoted, too."""
    result = render(variant_values(name), release=release, namespace=namespace)
    assert [complaint(manifest, KUBERNETES[-1]) for manifest in result.manifests if complaint(manifest, KUBERNETES[-1])] == []
    for manifest in result.manifests:
        cluster_wide = manifest["apiVersion"].startswith(("rbac.", "admissionregistration."))
        assert len(manifest["metadata"]["name"]) <= (253 if cluster_wide else 63)
        assert all(len(value) <= 63 for value in manifest["metadata"].get("labels", {}).values())


@each_render
def test_nothing_is_there_twice(name: str) -> None:
    keys = [
        (manifest["kind"], manifest["metadata"].get("namespace"), manifest["metadata"]["name"])
        for manifest in rendered(name).manifests
    ]
    assert len(set(keys)) == len(keys)


def _first(kind: str) -> dict[str, Any]:
    """Some manifest of a kind, to spoil."""
    return deepcopy(next(manifest for name in VARIANTS for manifest in variant(name).all(kind)))


def _in_container(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["spec"]["template"]["spec"]["containers"][0].update({key: value})


@pytest.mark.parametrize(
    ("kind", "spoil", "word"),
    [
        ("DaemonSet", _in_container("imagePullPolice", "Always"), "imagePullPolice"),
        ("DaemonSet", _in_container("ports", [{"containerPort": "http"}]), "containerPort"),
        ("ConfigMap", lambda manifest: manifest["metadata"]["labels"].update(year=2026), "labels.year"),
        ("PodMonitor", lambda manifest: manifest["spec"]["podMetricsEndpoints"][0].update(honourLabels=True), "honourLabels"),
        ("PodMonitor", lambda manifest: manifest["spec"]["podMetricsEndpoints"][0].update(interval=15), "interval"),
        ("ServiceMonitor", lambda manifest: manifest["spec"].pop("selector"), "selector"),
        ("PrometheusRule", lambda manifest: manifest["spec"]["groups"][0]["rules"][0].update(summary="full"), "summary"),
        ("PrometheusRule", lambda manifest: manifest["metadata"]["labels"].update(release=1), "release"),
    ],
)
def test_schemas_refuse_what_the_api_server_would(kind: str, spoil: Callable[[dict[str, Any]], object], word: str) -> None:
    manifest = _first(kind)
    assert complaint(manifest, KUBERNETES[-1]) is None
    spoil(manifest)
    assert word in str(complaint(manifest, KUBERNETES[-1]))
