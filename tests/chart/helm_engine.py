"""The chart as Helm's own engine renders it, without a cluster: what `helm install --dry-run` and `helm template` would say.

A chart that differs from the one in the repository is a mapping of path to content, so that no test writes to disk.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

# The public methods do not take the version of Kubernetes and its APIs, which the library underneath does.
from helm_python import _native

from promtool import ROOT

CHART = ROOT / "helm" / "kvcache-exporter"
# Values as users write them.
VALUES = ROOT / "tests" / "data" / "chart" / "values"
EXAMPLES = ROOT / "helm" / "examples"
EXAMPLE_CHARTS = sorted(folder.parent.name for folder in EXAMPLES.glob("*/Chart.yaml"))
VARIANTS = sorted(file.name.removesuffix("-values.yaml") for file in (CHART / "ci").glob("*-values.yaml"))
KUBERNETES = ("1.34", "1.35", "1.36", "1.37")
OPERATOR_API = "monitoring.coreos.com/v1"
OPERATOR_KINDS = ("PodMonitor", "ServiceMonitor", "PrometheusRule")

Manifest = dict[str, Any]
Values = Mapping[str, Any]
Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Pod:
    """A pod as a workload of the render makes it; `owner` is the workload's manifest."""

    owner: Manifest
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        """Containers of every kind, those of `initContainers` too."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def exporter(self) -> Mapping[str, Any]:
        """The exporter's container."""
        (found,) = (container for container in self.containers if container["name"] == "kvcache-exporter")
        return found

    @property
    def environment(self) -> dict[str, Any]:
        """The exporter's environment: name to value, or to where the value comes from."""
        return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in self.exporter.get("env", ())}


@dataclass(frozen=True)
class Render:
    """What a release would put into the cluster, and what Helm prints after it."""

    text: str
    notes: str

    @cached_property
    def manifests(self) -> tuple[Manifest, ...]:
        """All manifests, in the order in which Helm installs them, as Kubernetes reads them.

        Its YAML has words and numbers that Python's has not: to it, `y` is true and 1e3 a number.
        """
        return tuple(filter(None, (helm_python.values_from_yaml(document) for document in self.documents)))

    @property
    def documents(self) -> list[str]:
        """The text of each manifest."""
        return re.split(r"^---\n", self.text, flags=re.MULTILINE)

    def all(self, kind: str) -> list[Manifest]:
        """The manifests of one kind."""
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def one(self, kind: str) -> Manifest:
        """The only manifest of a kind."""
        found = self.all(kind)
        assert len(found) == 1, f"{len(found)} manifests of kind {kind} among {[m['kind'] for m in self.manifests]}"
        return found[0]

    @property
    def kinds(self) -> set[str]:
        """The kinds of the manifests."""
        return {manifest["kind"] for manifest in self.manifests}

    @property
    def pods(self) -> list[Pod]:
        """The pods of the workloads."""
        return list(_pods(self.manifests))

    @property
    def pod(self) -> Pod:
        """The only pod."""
        (found,) = self.pods
        return found


def _pods(manifests: tuple[Manifest, ...]) -> Iterator[Pod]:
    for manifest in manifests:
        template = manifest.get("spec", {}).get("template")
        if isinstance(template, dict) and "containers" in template.get("spec", {}):
            metadata = template["metadata"]
            yield Pod(manifest, metadata.get("labels", {}), metadata.get("annotations", {}), template["spec"])


def render(
    values: Values,
    *,
    chart: helm_python.Chart | None = None,
    release: str = "kv",
    namespace: str = "monitoring",
    kubernetes: str = "1.36",
    operator: bool = True,
) -> Render:
    """Render a chart, that of the repository if none is given; `operator` is whether the cluster has the Prometheus operator.

    The same answer is handed out again to who asks again, so nothing in it may be changed. Raises helm_python.HelmError.
    """
    return _render(chart or the_chart(), json.dumps(values), release, namespace, kubernetes, operator)


@cache
def _render(chart: helm_python.Chart, values: str, release: str, namespace: str, kubernetes: str, operator: bool) -> Render:
    options = {
        "dry_run": "client",
        "namespace": namespace,
        "kube_version": f"v{kubernetes}.0",
        "api_versions": api_versions(kubernetes, operator=operator),
    }
    arguments = (chart._raw(), None, release, values, json.dumps(options))
    answer = json.loads(_native.call_string("helm_install", _no_cluster()._raw(), _native.HANDLE(0), *arguments))
    return Render(answer.get("manifest", ""), answer.get("notes", ""))


def api_versions(kubernetes: str, *, operator: bool) -> list[str]:
    """What a cluster serves beside what Helm takes for granted, which is group versions without the kinds in them."""
    # MutatingAdmissionPolicy left beta with Kubernetes 1.36, which still has v1beta1.
    versions = ["v1beta1"] if kubernetes in ("1.34", "1.35") else ["v1", "v1beta1"]
    apis = ["v1/Pod", *(f"admissionregistration.k8s.io/{version}/MutatingAdmissionPolicy" for version in versions)]
    if operator:
        apis += [OPERATOR_API, *(f"{OPERATOR_API}/{kind}" for kind in OPERATOR_KINDS)]
    return apis


@cache
def _no_cluster() -> helm_python.Config:
    """Where releases would be kept; the address is of nobody, a dry run does not call it."""
    return helm_python.Config(storage_driver="memory", kube_apiserver="http://127.0.0.1:1")


@cache
def the_chart() -> helm_python.Chart:
    """The chart of the repository."""
    return helm_python.Chart.load(CHART)


def chart_files(folder: Path = CHART) -> dict[str, bytes]:
    """The files of a chart by their path in it."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def load(files: Files) -> helm_python.Chart:
    """Load a chart from its files."""
    name = yaml.safe_load(files["Chart.yaml"])["name"]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return helm_python.Chart.load_archive(buffer.getvalue())


def edited(path: str, old: str, new: str) -> helm_python.Chart:
    """The chart of the repository with something else in one of its files."""
    files = chart_files()
    text = files[path].decode()
    assert old in text, f"no {old!r} in {path}"
    return load({**files, path: text.replace(old, new).encode()})


@cache
def example(name: str) -> helm_python.Chart:
    """A chart of `helm/examples` with ours in its folder `charts`, where `helm dependency build` would put it."""
    dependency = {f"charts/{CHART.name}/{path}": content for path, content in chart_files().items()}
    return load({**chart_files(EXAMPLES / name), **dependency})


def values_of(file: Path) -> dict[str, Any]:
    """A values file as Helm reads it."""
    return helm_python.values_from_yaml(file.read_text(encoding="utf-8"))


def variant_values(name: str) -> dict[str, Any]:
    """The values of `ci/<name>-values.yaml`."""
    return values_of(CHART / "ci" / f"{name}-values.yaml")


@cache
def variant(name: str, *, kubernetes: str = "1.36", release: str = "kv") -> Render:
    """The render of `ci/<name>-values.yaml`."""
    return render(variant_values(name), kubernetes=kubernetes, release=release)


# Without another chart a sidecar is in no pod, so variants of that mode are rendered in the examples, too; an injected one is in
# the pods of others.
IN_EXAMPLES = [
    f"{name} in {other}"
    for other in EXAMPLE_CHARTS
    for name in VARIANTS
    if variant_values(name).get("mode") == "sidecar" and "injection" not in variant_values(name).get("sidecar", {})
]
RENDERS = [*VARIANTS, *EXAMPLE_CHARTS, *IN_EXAMPLES]


def rendered(name: str, *, kubernetes: str = "1.36") -> Render:
    """One of RENDERS: a variant, an example chart with its own values, or such with those of a variant."""
    own, _, other = name.rpartition(" in ")
    if other in VARIANTS:
        return variant(other, kubernetes=kubernetes)
    values = {CHART.name: variant_values(own)} if own else {}
    return render(values, chart=example(other), namespace="ml", kubernetes=kubernetes)


each_variant = pytest.mark.parametrize("name", VARIANTS)
each_render = pytest.mark.parametrize("name", RENDERS)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector of Kubernetes takes an object with these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for requirement in selector.get("matchExpressions", ()):
        value, among = labels.get(requirement["key"]), requirement.get("values", ())
        holds = {
            "In": value in among,
            "NotIn": value not in among,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[requirement["operator"]]
        if not holds:
            return False
    return True
