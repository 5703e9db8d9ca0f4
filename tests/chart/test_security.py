"""What pods may do: as little as they need, and more only where the values ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml
from exporter_container import config_text
from helm_engine import CHART, RENDERS, VARIANTS, Pod, each_render, render, rendered, variant
from pod_security import violations

KUBERNETES_SOURCE = {"mode": "daemonset", "config": {"kubernetes": {}}}
STATIC = {"mode": "daemonset", "config": {"kubernetes": None, "targets": [{"url": "http://vllm:8000"}]}}


def everything() -> Iterator[tuple[str, Pod]]:
    for name in RENDERS:
        for pod in rendered(name).pods:
            yield name, pod


def test_daemonset_is_restricted_by_default() -> None:
    assert violations(render({"mode": "daemonset"}).pod.spec) == []


@each_render
def test_root_file_system_is_read_only(name: str) -> None:
    for pod in rendered(name).pods:
        assert pod.exporter["securityContext"]["readOnlyRootFilesystem"] is True


RESTRICTED: dict[str, Any] = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [{"name": "c", "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}],
    "volumes": [{"name": "v", "emptyDir": {}}],
}


def _own(**context: object) -> Callable[[dict[str, Any]], object]:
    return lambda spec: spec["containers"][0]["securityContext"].update(context)


def _pods(**context: object) -> Callable[[dict[str, Any]], object]:
    return lambda spec: spec["securityContext"].update(context)


def _container(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda spec: spec["containers"][0].update(fields)


@pytest.mark.parametrize(
    ("loosen", "control"),
    [
        (_pods(windowsOptions={"hostProcess": True}), "HostProcess"),
        (lambda spec: spec.update(hostNetwork=True), "host namespaces"),
        (lambda spec: spec.update(hostPID=True), "host namespaces"),
        (lambda spec: spec.update(hostIPC=True), "host namespaces"),
        (_own(privileged=True), "privileged containers"),
        (_own(capabilities={"drop": ["ALL"], "add": ["SYS_PTRACE"]}), "capabilities"),
        (_own(capabilities={"drop": ["NET_RAW"]}), "capabilities"),
        (lambda spec: spec["volumes"].append({"name": "h", "hostPath": {"path": "/"}}), "volume types"),
        (lambda spec: spec["volumes"].append({"name": "n", "nfs": {}}), "volume types"),
        (_container(ports=[{"hostPort": 9948}]), "host ports"),
        (_container(livenessProbe={"httpGet": {"host": "10.0.0.1"}}), "host probes"),
        (_container(lifecycle={"preStop": {"tcpSocket": {"host": "10.0.0.1"}}}), "host probes"),
        (_own(appArmorProfile={"type": "Unconfined"}), "AppArmor"),
        (_own(seLinuxOptions={"type": "spc_t"}), "SELinux"),
        (_pods(seLinuxOptions={"user": "root"}), "SELinux"),
        (_own(procMount="Unmasked"), "/proc mount type"),
        (_pods(sysctls=[{"name": "kernel.msgmax"}]), "sysctls"),
        (_pods(seccompProfile={"type": "Unconfined"}), "seccomp"),
        (lambda spec: spec["securityContext"].pop("seccompProfile"), "seccomp"),
        (_own(allowPrivilegeEscalation=True), "privilege escalation"),
        (lambda spec: spec["containers"][0].pop("securityContext"), "privilege escalation"),
        (lambda spec: spec["securityContext"].pop("runAsNonRoot"), "running as non-root"),
        (_own(runAsNonRoot=False), "running as non-root"),
        (_own(runAsUser=0), "running as non-root user"),
        (lambda spec: spec.update(initContainers=[{"name": "i"}]), "container i"),
    ],
)
def test_each_control_of_the_standard_is_looked_at(loosen: Callable[[dict[str, Any]], object], control: str) -> None:
    spec = deepcopy(RESTRICTED)
    assert violations(spec) == []
    loosen(spec)
    assert any(control in sentence for sentence in violations(spec))


def test_no_exporter_takes_a_gpu() -> None:
    """One that is requested is one that no engine gets."""
    for name, pod in everything():
        resources = pod.exporter.get("resources", {})
        assert not any("gpu" in key for kind in ("requests", "limits") for key in resources.get(kind, ())), name


def test_exporter_is_privileged_only_where_asked_for() -> None:
    privileged = {name for name, pod in everything() if pod.exporter["securityContext"].get("privileged")}
    assert privileged == {name for name in VARIANTS if "privileged: true" in (CHART / "ci" / f"{name}-values.yaml").read_text()}


def test_daemonset_sees_all_gpus_with_the_utility_libraries_only() -> None:
    pod = render({"mode": "daemonset", "runtimeClassName": "nvidia"}).pod
    assert pod.environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert pod.environment["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    assert pod.spec["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in render({"mode": "daemonset"}).pod.spec


def host_paths(pod: Pod) -> dict[str, bool]:
    """Folders of the node that the pod mounts, and whether each is read-only everywhere."""
    volumes = {volume["name"]: volume["hostPath"]["path"] for volume in pod.spec.get("volumes", ()) if "hostPath" in volume}
    mounts = [mount for container in pod.containers for mount in container.get("volumeMounts", ())]
    return {path: all(mount.get("readOnly") for mount in mounts if mount["name"] == name) for name, path in volumes.items()}


def test_folders_of_the_node_are_mounted_only_where_asked_for_and_read_only() -> None:
    base = {"mode": "daemonset"}
    assert host_paths(render(base).pod) == {}
    assert host_paths(render({**base, "models": {"hostPath": "/data/models"}}).pod) == {"/data/models": True}
    assert host_paths(render({**base, "podResources": {"enabled": True}}).pod) == {"/var/lib/kubelet/pod-resources": True}


@each_render
def test_variant_mounts_no_folder_of_the_node_that_it_does_not_ask_for(name: str) -> None:
    values = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text()) if name in VARIANTS else {}
    asked = {values.get("models", {}).get("hostPath")} | {
        volume["hostPath"]["path"] for volume in values.get("extraVolumes", ()) if "hostPath" in volume
    }
    if values.get("podResources", {}).get("enabled"):
        asked.add("/var/lib/kubelet/pod-resources")
    for pod in rendered(name).pods:
        assert host_paths(pod).keys() <= asked


def test_socket_of_the_kubelet_takes_root_and_nothing_more() -> None:
    """It belongs to root; still no capability, and no way to more rights."""
    found = violations(render({"mode": "daemonset", "podResources": {"enabled": True}}).pod.spec)
    assert set(found) == {
        "volume types: pod-resources is of type hostPath",
        "running as non-root user: runAsUser is 0",
        "container kvcache-exporter: running as non-root: runAsNonRoot is not true",
        "container kvcache-exporter: running as non-root user: runAsUser is 0",
    }


# The API


def test_discovery_may_list_and_watch_pods_and_nothing_else() -> None:
    result = render(KUBERNETES_SOURCE)
    rules = [rule for kind in ("ClusterRole", "Role") for role in result.all(kind) for rule in role["rules"]]
    assert [{**rule, "verbs": sorted(rule["verbs"])} for rule in rules] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    ]
    account = result.one("ServiceAccount")["metadata"]["name"]
    bindings = [*result.all("ClusterRoleBinding"), *result.all("RoleBinding")]
    assert [subject for binding in bindings for subject in binding["subjects"]] == [
        {"kind": "ServiceAccount", "name": account, "namespace": "monitoring"}
    ]
    roles = {(role["kind"], role["metadata"]["name"]) for role in (*result.all("ClusterRole"), *result.all("Role"))}
    assert {(binding["roleRef"]["kind"], binding["roleRef"]["name"]) for binding in bindings} == roles
    assert result.pod.spec["serviceAccountName"] == account


@each_render
def test_token_is_mounted_only_for_discovery(name: str) -> None:
    result = rendered(name)
    for pod in result.pods:
        discovers = "kubernetes" in (yaml.safe_load(config_text(result, pod) or "{}"))
        assert pod.spec.get("automountServiceAccountToken", False) is discovers
        for account in result.all("ServiceAccount"):
            assert account["automountServiceAccountToken"] is discovers


def test_without_discovery_there_is_no_role_and_no_token() -> None:
    result = render(STATIC)
    assert not result.kinds & {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
    assert result.pod.spec["automountServiceAccountToken"] is False


def test_namespaces_of_the_configuration_are_all_that_discovery_may_see() -> None:
    result = render({"mode": "daemonset", "config": {"kubernetes": {"namespaces": ["ml", "chat"]}}})
    assert "ClusterRole" not in result.kinds
    assert {role["metadata"]["namespace"] for role in result.all("Role")} == {"ml", "chat"}
    assert {binding["metadata"]["namespace"] for binding in result.all("RoleBinding")} == {"ml", "chat"}


def test_no_variant_reads_secrets_through_the_api() -> None:
    for name in VARIANTS:
        for kind in ("ClusterRole", "Role"):
            for role in variant(name).all(kind):
                assert all(rule["resources"] == ["pods"] for rule in role["rules"]), name
