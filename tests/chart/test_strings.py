"""Whatever text a user gives comes out as that very text, never as a number, a boolean or a part of the manifest's structure."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from exporter_container import config_text
from helm_engine import KUBERNETES, render
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_schemas import complaint

from kvcache_exporter.config import parse_config

# What YAML takes for something else if it is not quoted, or ends a scalar, or is a template's.
SCALARS = st.sampled_from(
    ["", "1", "0x1f", "1e3", "1_000", "true", "on", "y", "null", "~", "=", "<<", "2026-01-01", " a ", "a\nb", "\n", "\t", "🦙"]
)
STRUCTURE = st.sampled_from(
    ["a: b", "a #b", "- a", "{a}", "[a]", "*a", "&a", "!a", "%a", "@a", "`a", "'", '"', "''", '"\\', "{{.}}", "$(A)"]
)
TEXT = SCALARS | STRUCTURE | st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)
# The exporter reads YAML as Python does, to which a bare = or << is no text.
NAMES = TEXT.filter(lambda text: text.strip() not in ("", "=", "<<"))


@settings(max_examples=150, deadline=None)
@given(value=TEXT, key=st.from_regex(r"[A-Za-z]([-A-Za-z0-9_.]{0,20}[A-Za-z0-9])?", fullmatch=True))
def test_text_stays_what_it_is(value: str, key: str) -> None:
    result = render(
        {
            "podLabels": {"a.example/l": value},
            "commonLabels": {"b.example/l": value},
            "podAnnotations": {f"c.example/{key}": value},
            "commonAnnotations": {"d.example/a": value},
            "extraEnv": [{"name": "TEXT", "value": value}],
            "nodeSelector": {f"e.example/{key}": value},
            "podMonitor": {"enabled": True, "labels": {"release": value}, "annotations": {"f.example/a": value}},
        }
    )
    pod = result.pod
    assert pod.labels["a.example/l"] == value
    assert pod.labels["b.example/l"] == value
    assert pod.annotations[f"c.example/{key}"] == value
    assert pod.environment["TEXT"] == value
    assert pod.spec["nodeSelector"] == {f"e.example/{key}": value}
    for manifest in result.manifests:
        assert manifest["metadata"]["labels"]["b.example/l"] == value
        assert manifest["metadata"]["annotations"]["d.example/a"] == value
    monitor = result.one("PodMonitor")["metadata"]
    assert (monitor["labels"]["release"], monitor["annotations"]["f.example/a"]) == (value, value)


@settings(max_examples=100, deadline=None)
@given(name=NAMES, argument=TEXT)
def test_configuration_and_arguments_stay_what_they_are(name: str, argument: str) -> None:
    """A target's name in the exporter's file, which is YAML inside of YAML, and arguments of the command line."""
    config = {"kubernetes": None, "targets": [{"name": name, "url": "http://vllm:8000"}]}
    result = render({"config": config, "extraArgs": [argument]})
    (config_map,) = result.all("ConfigMap")
    (target,) = parse_config(config_map["data"]["config.yaml"], Path("config.yaml")).targets
    assert target.name == name.strip()
    assert argument in result.pod.exporter["args"]


@settings(max_examples=100, deadline=None)
@given(value=st.integers(-(10**15), 10**15) | st.booleans())
def test_numbers_and_booleans_given_as_labels_become_text(value: int) -> None:
    """Kubernetes takes nothing else, and a million is no 1e+06."""
    labels = render({"podLabels": {"a": value}, "commonLabels": {"b": value}}).pod.labels
    assert (labels["a"], labels["b"]) == (str(value).lower(), str(value).lower())


@pytest.mark.parametrize("name", ["2026", "1e3", "true", "null"])
def test_names_of_objects_stay_text(name: str) -> None:
    """All of these are good names in Kubernetes."""
    result = render(
        {
            "fullnameOverride": name,
            "serviceAccount": {"name": name},
            "priorityClassName": name,
            "runtimeClassName": name,
            "imagePullSecrets": [{"name": name}],
            "bearerTokenSecret": {"name": name, "key": name},
            "webConfigSecret": {"name": name, "key": name},
            "models": {"existingClaim": name},
            "config": {"kubernetes": {"namespaces": [name]}},
            "podMonitor": {"enabled": True, "namespace": name},
            "prometheusRule": {"enabled": True, "namespace": name},
            "dashboards": {"enabled": True, "namespace": name},
        }
    )
    assert [complaint(manifest, KUBERNETES[-1]) for manifest in result.manifests if complaint(manifest, KUBERNETES[-1])] == []
    assert result.one("DaemonSet")["metadata"]["name"] == name
    assert result.one("Role")["metadata"]["namespace"] == name
    assert yaml.safe_load(str(config_text(result, result.pod)))["kubernetes"]["namespaces"] == [name]
