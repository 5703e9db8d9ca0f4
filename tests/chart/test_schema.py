"""Values that mean nothing are refused by a sentence that names them, and the schema knows exactly the values that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import pytest
from helm_engine import CHART, KUBERNETES, render, values_of
from kubernetes_schemas import complaint

from kvcache_exporter.config import parse_config
from kvcache_exporter.errors import ConfigError

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = values_of(CHART / "values.yaml")
ENGINE = {"url": "http://vllm:8000"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mode": "deployment"}, ["mode", "daemonset", "sidecar"]),
        ({"mod": "sidecar"}, ["mod"]),
        ({"port": "9948"}, ["port"]),
        ({"port": 0}, ["port"]),
        ({"port": 70000}, ["port"]),
        ({"logLevel": "trace"}, ["logLevel", "debug"]),
        ({"image": {"tag": 0.1}}, ["image", "tag"]),
        ({"image": {"digest": "0a1b"}}, ["image", "digest"]),
        ({"image": {"pullPolicy": "Sometimes"}}, ["pullPolicy"]),
        ({"imagePullSecrets": ["registry"]}, ["imagePullSecrets"]),
        ({"config": {"poll_interval": 5}}, ["config", "poll_interval"]),
        ({"config": {"nvml": "yes"}}, ["config", "nvml"]),
        ({"config": {"targets": [{"address": "x", **ENGINE}]}}, ["targets", "address"]),
        ({"config": {"targets": [{"name": "a"}]}}, ["targets", "url"]),
        ({"config": {"kubernetes": {"namespace": "ml"}}}, ["kubernetes", "namespace"]),
        ({"config": {"kubernetes": {"namespaces": "ml"}}}, ["kubernetes", "namespaces"]),
        ({"modelConfigs": [{"name": "org/a", "config": {}}]}, ["modelConfigs", "name"]),
        ({"modelConfigs": [{"model": "org/a"}]}, ["modelConfigs", "config"]),
        ({"gpu": {"uuids": "GPU-a"}}, ["gpu", "uuids"]),
        ({"bearerTokenSecret": "token"}, ["bearerTokenSecret"]),
        ({"serviceAccount": {"create": "false"}}, ["serviceAccount", "create"]),
        ({"podMonitor": {"enable": True}}, ["podMonitor", "enable"]),
        ({"podMonitor": {"interval": 15}}, ["podMonitor", "interval"]),
        ({"podMonitor": {"interval": "15 seconds"}}, ["podMonitor", "interval"]),
        ({"podMonitor": {"honorLabels": "yes"}}, ["podMonitor", "honorLabels"]),
        ({"prometheusRule": {"labels": ["release"]}}, ["prometheusRule", "labels"]),
        ({"podLabels": {"team": {"name": "ml"}}}, ["podLabels", "team"]),
        ({"tolerations": {"key": "nvidia.com/gpu"}}, ["tolerations"]),
        ({"nodeSelector": ["gpu"]}, ["nodeSelector"]),
        ({"extraEnv": {"A": "b"}}, ["extraEnv"]),
        ({"extraArgs": "--record x"}, ["extraArgs"]),
        ({"updateStrategy": {"type": "Recreate"}}, ["updateStrategy", "type"]),
        ({"sidecar": {"vllmPort": "http"}}, ["sidecar", "vllmPort"]),
        ({"sidecar": {"injection": {"failurePolicy": "Maybe"}}}, ["failurePolicy", "Ignore"]),
    ],
    ids=str,
)
def test_value_is_refused_by_name(values: Mapping[str, Any], words: list[str]) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert "schema" in str(refused.value)
    assert [word for word in words if word not in str(refused.value)] == []


SIDECAR = {"mode": "sidecar"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"config": {"listen_address": ":1"}}, ["listen_address", "port"]),
        ({"config": {"kubernetes": None}}, ["config.targets"]),
        ({"commonLabels": {"app.kubernetes.io/name": "x"}}, ["commonLabels", "nameOverride"]),
        ({"podLabels": {"app.kubernetes.io/instance": "x"}}, ["podLabels"]),
        ({"gpu": {"uuids": ["GPU-a"]}}, ["gpu.uuids", "sidecar"]),
        ({**SIDECAR, "gpu": {"uuids": ["GPU-a"], "enabled": False}}, ["gpu.uuids", "gpu.enabled"]),
        ({"sidecar": {"injection": {"enabled": True}}}, ["sidecar.injection", "sidecar"]),
        ({"models": {"hostPath": "/models", "existingClaim": "models"}}, ["models.hostPath", "models.existingClaim"]),
        ({**SIDECAR, "models": {"hostPath": "/models"}}, ["models", "sidecar.modelVolume"]),
        ({**SIDECAR, "sidecar": {"modelVolume": {"name": "models"}}}, ["sidecar.modelVolume", "mountPath"]),
        ({**SIDECAR, "config": {"kubernetes": {"namespaces": ["ml"]}}}, ["config.kubernetes", "sidecar"]),
        ({**SIDECAR, "serviceMonitor": {"enabled": True}}, ["serviceMonitor", "podMonitor"]),
        ({**SIDECAR, "podResources": {"enabled": True}}, ["podResources", "gpu.uuids"]),
        ({**SIDECAR, "runtimeClassName": "nvidia"}, ["runtimeClassName"]),
        ({**SIDECAR, "networkPolicy": {"enabled": True}}, ["networkPolicy", "extraIngress"]),
        ({"modelConfigs": [{"model": "org/a", "config": {}}] * 2}, ["modelConfigs", "org/a"]),
    ],
    ids=str,
)
def test_combination_that_would_be_half_obeyed_is_refused(values: Mapping[str, Any], words: list[str]) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert [word for word in words if word not in str(refused.value)] == []


def test_values_of_every_mode_are_taken_as_they_are() -> None:
    """None of the refusals above is one of the values beside what it is about."""
    for values in ({}, SIDECAR, {"config": {"kubernetes": None, "targets": [ENGINE]}}):
        render(values)


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the one that it refers to."""
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: Any = SCHEMA
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return resolved(found)


def unlike(schema: Mapping[str, Any], values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """A sentence for each key that the schema or values.yaml has alone."""
    known = resolved(schema).get("properties", {})
    for key in values.keys() - known.keys():
        yield f"{path}{key} is not in the schema"
    for key in known.keys() - values.keys():
        yield f"{path}{key} is not in values.yaml"
    for key in values.keys() & known.keys():
        if isinstance(values[key], dict) and values[key] and resolved(known[key]).get("properties"):
            yield from unlike(known[key], values[key], f"{path}{key}.")


# Mappings of the exporter or of Kubernetes, of which values.yaml gives the part that is not the default of those.
PARTIAL = (
    "config.",
    "podSecurityContext.",
    "securityContext.",
    "resources.",
    "livenessProbe.",
    "readinessProbe.",
    "updateStrategy.",
)


def test_schema_has_the_values_that_there_are() -> None:
    found = [sentence for sentence in unlike(SCHEMA, VALUES) if not sentence.startswith(PARTIAL)]
    # What a chart that has this one as a dependency may give it: its global values, and the condition of the dependency.
    assert set(found) == {"global is not in values.yaml", "enabled is not in values.yaml"}


def test_key_that_only_one_of_them_has_is_told() -> None:
    extra = {**VALUES, "gpu": {**VALUES["gpu"], "indexes": []}}
    assert "gpu.indexes is not in the schema" in list(unlike(SCHEMA, extra))
    fewer = {key: value for key, value in VALUES.items() if key != "port"}
    assert "port is not in values.yaml" in list(unlike(SCHEMA, fewer))


def paths(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key."""
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
def test_key_without_a_value_is_refused_by_name_or_changes_nothing_for_the_worse(mode: str) -> None:
    """As when all lines below it are commented out; Helm then takes the default away too."""
    problems = []
    for path in paths({key: value for key, value in VALUES.items() if key != "mode"}):
        if ".".join(path).startswith(PARTIAL):
            continue
        emptied: Any = None
        for key in reversed(path):
            emptied = {key: emptied}
        try:
            result = render({"mode": mode, **emptied})
        except helm_python.HelmError as error:
            if "schema" not in str(error) and "execution error at" not in str(error):
                problems.append(f"{'.'.join(path)}: {error}")
        else:
            wrong = [complaint(manifest, KUBERNETES[-1]) for manifest in result.manifests]
            problems += [f"{'.'.join(path)}: {sentence}" for sentence in wrong if sentence]
    assert problems == []


def open_objects(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Where the schema lists keys without refusing others."""
    if "properties" in schema and schema.get("additionalProperties") is not False:
        yield path
    for key, part in schema.items():
        for name, child in part.items() if key in ("properties", "$defs", "definitions") else [(key, part)]:
            if isinstance(child, dict):
                yield from open_objects(child, f"{path}/{name}")


def test_schema_is_closed() -> None:
    assert list(open_objects(SCHEMA)) == []


def settings_of_the_exporter(text: str) -> set[str]:
    """What the exporter knows in the part of its configuration where `stranger` stands in this text, by what it says of that."""
    with pytest.raises(ConfigError) as refused:
        parse_config(text, Path("config.yaml"))
    (known,) = re.findall(r"stranger: is not a setting; known here: (.*)", str(refused.value))
    return set(known.split(", "))


def test_schema_of_the_configuration_has_the_settings_of_the_exporter() -> None:
    config = resolved(SCHEMA["properties"]["config"])["properties"]
    target = resolved(resolved(config["targets"])["items"])["properties"]
    kubernetes = resolved(config["kubernetes"])["properties"]
    assert config.keys() == settings_of_the_exporter("stranger: 1")
    assert target.keys() == settings_of_the_exporter("targets: [{stranger: 1}]")
    assert kubernetes.keys() == settings_of_the_exporter("kubernetes: {stranger: 1}")
