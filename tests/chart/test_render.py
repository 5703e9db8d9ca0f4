"""Every variant renders and lints, its parts refer to each other rightly, and the exporter takes what the chart hands it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import pytest
from exporter_container import config_text, mounted_text, serve_options
from helm_engine import (
    CHART,
    EXAMPLE_CHARTS,
    KUBERNETES,
    Pod,
    Render,
    each_render,
    each_variant,
    render,
    rendered,
    selects,
    variant_values,
)

from kvcache_exporter.config import parse_config
from promtool import ROOT

GOLDEN = ROOT / "tests" / "data" / "chart" / "golden"
# The shortest, all there is, roles in namespaces, and the three ways to run.
RECORDED = (
    "daemonset",
    "daemonset-everything",
    "daemonset-namespaces",
    "kube-prometheus-stack",
    "sidecar-injection",
    *EXAMPLE_CHARTS,
)


@pytest.mark.parametrize("kubernetes", [KUBERNETES[0], KUBERNETES[-1]])
@each_variant
def test_lint_finds_nothing(name: str, kubernetes: str) -> None:
    """`helm lint --strict`, with the values of the variant."""
    report = helm_python.lint(CHART, variant_values(name), strict=True, namespace="monitoring", kube_version=f"v{kubernetes}.0")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("name", RECORDED)
def test_render_is_as_recorded(name: str, request: pytest.FixtureRequest) -> None:
    """`make golden` writes them anew, to be read as a diff."""
    file = GOLDEN / f"{name}.yaml"
    if request.config.getoption("--update-golden"):
        file.write_text(without_copies(rendered(name)))
    assert without_copies(rendered(name)) == file.read_text()


def without_copies(result: Render) -> str:
    """The render but for rules and dashboards, which are compared with their sources elsewhere."""
    documents = result.text.split("---\n# Source: ")[1:]
    copies = ("kvcache-exporter/templates/prometheusrule.yaml\n", "kvcache-exporter/templates/dashboards.yaml\n")
    return "".join(f"---\n# Source: {document}" for document in documents if not document.startswith(copies))


def test_every_recorded_render_is_compared() -> None:
    assert sorted(file.stem for file in GOLDEN.glob("*.yaml")) == sorted(RECORDED)


@each_render
def test_pods_refer_to_what_is_there(name: str) -> None:
    result = rendered(name)
    # Secrets and claims of the user's.
    given = set(_strings(variant_values(name.partition(" in ")[0]))) if name not in EXAMPLE_CHARTS else set()
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in result.manifests}
    for pod in result.pods:
        volumes = {volume["name"] for volume in pod.spec.get("volumes", ())}
        assert len(volumes) == len(pod.spec.get("volumes", ()))
        for container in pod.containers:
            mounts = container.get("volumeMounts", ())
            assert {mount["name"] for mount in mounts} <= volumes
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
            variables = [entry["name"] for entry in container.get("env", ())]
            assert len(set(variables)) == len(variables)
        for kind, wanted in _references(pod):
            assert (kind, wanted) in names or wanted in given, f"{kind} {wanted}"


def _references(pod: Pod) -> Iterator[tuple[str, str]]:
    """(kind, name) of each object that a pod refers to."""
    if "serviceAccountName" in pod.spec:
        yield "ServiceAccount", pod.spec["serviceAccountName"]
    for part in _mappings(pod.spec):
        for key, kind, field in (
            ("configMap", "ConfigMap", "name"),
            ("configMapKeyRef", "ConfigMap", "name"),
            ("secret", "Secret", "secretName"),
            ("secretKeyRef", "Secret", "name"),
            ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
        ):
            if key in part and not part[key].get("optional"):
                yield kind, part[key][field]


def _mappings(node: object) -> Iterator[Mapping[str, Any]]:
    """All mappings in a manifest."""
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _mappings(child)


def _strings(node: object) -> Iterator[str]:
    """All strings in a manifest that are no keys."""
    if isinstance(node, str):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _strings(child)


@each_render
def test_probes_and_ports_of_the_exporter_fit(name: str) -> None:
    for pod in rendered(name).pods:
        (port,) = pod.exporter["ports"]
        assert port["name"] == "kvcache-metrics"
        probes = {key: pod.exporter[key]["httpGet"] for key in pod.exporter if key.endswith("Probe")}
        assert {probe["path"] for probe in probes.values()} <= {"/healthz", "/readyz"}
        assert {probe["port"] for probe in probes.values()} <= {port["name"], port["containerPort"]}
        assert probes["livenessProbe"]["path"] == "/healthz"
        options = serve_options(pod)
        assert str(options["listen_address"] or ":9948").rpartition(":")[2] == str(port["containerPort"])


@each_render
def test_services_and_policies_pick_the_pods_of_the_release(name: str) -> None:
    result = rendered(name)
    for service in result.all("Service"):
        assert [pod for pod in result.pods if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)]
    for policy in result.all("NetworkPolicy"):
        ports = {rule["ports"][0]["port"] for rule in policy["spec"]["ingress"][:1]}
        for pod in result.pods:
            assert selects(policy["spec"]["podSelector"], pod.labels)
            assert ports <= {value for port in pod.exporter["ports"] for value in (port["name"], port["containerPort"])}


# What the exporter takes


@each_render
def test_exporter_takes_its_arguments(name: str) -> None:
    for pod in rendered(name).pods:
        assert "command" not in pod.exporter, "the image's own entry point"
        options = serve_options(pod)
        assert options["config_path"] or options["vllm_url"]


@each_render
def test_exporter_takes_its_configuration(name: str) -> None:
    result = rendered(name)
    for pod in result.pods:
        text = config_text(result, pod)
        if text is not None:
            parse_config(text, Path("config.yaml"), needs_targets=serve_options(pod)["vllm_url"] is None)


def test_models_config_is_where_the_exporter_looks_for_it() -> None:
    """In the layout of a Hugging Face cache, whether given as a mapping or as text."""
    content = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "torch_dtype": "bfloat16"}
    models = [{"model": "org/a", "config": content}, {"model": "org/b", "config": json.dumps(content)}]
    result = render({"modelConfigs": models})
    config = parse_config(str(config_text(result, result.pod)), Path("config.yaml"))
    assert config.kubernetes is not None
    for model in ("a", "b"):
        file = Path(str(config.kubernetes.model_config)) / f"models--org--{model}" / "config.json"
        assert json.loads(mounted_text(result, result.pod, file)) == content
