"""The named templates put a native sidecar into the pods of other charts, as the example does with them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from exporter_container import mounted_text, serve_options
from helm_engine import EXAMPLES, VALUES, Pod, Render, chart_files, example, load, render, selects, values_of
from pod_security import violations

from kvcache_exporter import __version__

EXAMPLE = "vllm-with-sidecar"


def with_sidecar(release: str = "kv", **values: Any) -> Render:
    """The example, with these values for our chart."""
    return render({"kvcache-exporter": values}, chart=example(EXAMPLE), release=release, namespace="ml")


def engine(pod: Pod) -> dict[str, Any]:
    """The engine's container."""
    found: dict[str, Any]
    (found,) = pod.spec["containers"]
    return found


def test_sidecar_starts_before_the_engine_and_ends_after_it() -> None:
    pod = with_sidecar().pod
    assert pod.spec["initContainers"] == [pod.exporter]
    assert pod.exporter["restartPolicy"] == "Always"
    assert engine(pod)["name"] != "kvcache-exporter"


def test_engine_neither_waits_for_the_sidecar_nor_loses_traffic_with_it() -> None:
    exporter = with_sidecar().pod.exporter
    assert not exporter.keys() & {"startupProbe", "readinessProbe"}
    assert exporter["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert exporter["resources"]["limits"].keys() == {"memory"}


def test_sidecar_watches_the_engine_of_its_own_pod() -> None:
    pod = with_sidecar(sidecar={"vllmPort": 8123}).pod
    options = serve_options(pod)
    assert options["vllm_url"] == "http://127.0.0.1:8123"
    assert options["target_name"] == "from-the-cluster/from-the-cluster"
    assert pod.environment["POD_NAMESPACE"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
    assert pod.environment["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert "--target-name=$(POD_NAMESPACE)/$(POD_NAME)" in pod.exporter["args"]


def test_sidecar_knows_the_arguments_of_the_engine() -> None:
    pod = with_sidecar().pod
    lines = serve_options(pod)["engine_args"].splitlines()
    assert lines
    assert set(lines) < set(engine(pod)["args"])


def test_engine_arguments_are_not_taken_for_variables() -> None:
    """Kubernetes would put something in the place of $(A)."""
    argument = '--override-generation-config={"a": "$(A) $B"}'
    pod = with_sidecar(sidecar={"engineArgs": [argument]}).pod
    assert pod.environment["KVCACHE_EXPORTER_SERVE_ENGINE_ARGS"].replace("$$", "$") == argument
    assert "$$(A)" in pod.environment["KVCACHE_EXPORTER_SERVE_ENGINE_ARGS"]


def test_sidecar_sees_no_gpu_unless_it_is_told_which() -> None:
    """It would see those of other engines, and each of them would be counted once for each pod of the node."""
    pod = with_sidecar().pod
    assert pod.environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert serve_options(pod)["no_nvml"] is True

    told = {key: value for key, value in values_of(VALUES / "one-gpu.yaml").items() if key != "mode"}
    pod = with_sidecar(**told).pod
    assert pod.environment["NVIDIA_VISIBLE_DEVICES"] == "GPU-bbbb"
    assert pod.environment["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    options = serve_options(pod)
    assert (options["gpus"], options["no_nvml"]) == ("GPU-bbbb", False)
    assert not any("gpu" in key for kind in pod.exporter["resources"].values() for key in kind)


def test_sidecar_reads_the_models_files_where_the_engine_does() -> None:
    pod = with_sidecar().pod
    (mount,) = (mount for mount in pod.exporter["volumeMounts"] if mount["name"] == "models")
    assert mount in [{**each, "readOnly": True} for each in engine(pod)["volumeMounts"]]
    assert Path(serve_options(pod)["model_config"]).is_relative_to(mount["mountPath"])


def test_configuration_of_the_sidecar_is_in_the_pods_volumes() -> None:
    result = with_sidecar(config={"poll_interval_seconds": 7.0})
    path = serve_options(result.pod)["config_path"]
    assert yaml.safe_load(mounted_text(result, result.pod, path)) == {"poll_interval_seconds": 7}


def test_changed_configuration_rolls_the_engines_pods() -> None:
    first, second = (with_sidecar(config={"poll_interval_seconds": seconds}).pod.annotations for seconds in (5, 7))
    assert first.keys() == second.keys()
    assert {key for key in first if first[key] != second[key]} == {"checksum/kvcache-exporter-config"}


def test_sidecar_fits_into_a_restricted_namespace() -> None:
    """Beside an engine that does; vLLM's own image does not without further ado."""
    for values in ({}, {"config": {"window_seconds": 60}}, {"gpu": {"uuids": ["GPU-a"]}}, {"bearerTokenSecret": {"name": "key"}}):
        pod = with_sidecar(**values).pod
        spec = deepcopy(dict(pod.spec))
        engine(Pod(pod.owner, {}, {}, spec))["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert violations(spec) == []
        assert [sentence for sentence in violations(pod.spec) if sentence.startswith("container kvcache-exporter")] == []


def test_sidecar_has_no_token_and_the_release_no_rights() -> None:
    result = with_sidecar()
    assert not result.kinds & {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "DaemonSet"}
    assert not any("token" in str(mount) for mount in result.pod.exporter["volumeMounts"])


def test_selector_of_the_engine_knows_nothing_of_the_sidecar() -> None:
    """It could never be changed, and the sidecar would have to stay for ever."""
    pod = with_sidecar().pod
    selector = pod.owner["spec"]["selector"]["matchLabels"]
    assert not any(key.startswith("kvcache-exporter") for key in selector)
    assert selector.items() <= pod.labels.items()


def test_each_release_scrapes_its_own_sidecars() -> None:
    """Two engines in one namespace would else be scraped twice."""
    one, two = (with_sidecar(release=name, podMonitor={"enabled": True}) for name in ("one", "two"))
    selector = one.one("PodMonitor")["spec"]["selector"]
    assert selects(selector, one.pod.labels)
    assert not selects(selector, two.pod.labels)


def test_example_asks_for_a_version_that_this_chart_is_of() -> None:
    (dependency,) = yaml.safe_load((EXAMPLES / EXAMPLE / "Chart.yaml").read_text())["dependencies"]
    assert dependency["version"] == f"{__version__.rpartition('.')[0]}.x"


def test_example_without_its_dependency_is_refused() -> None:
    with pytest.raises(helm_python.HelmError, match="kvcache-exporter"):
        render({}, chart=load(chart_files(EXAMPLES / EXAMPLE)))
