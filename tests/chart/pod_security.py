"""The Pod Security Standard `restricted`, control by control, with what `baseline` asks before it.

https://kubernetes.io/docs/concepts/security/pod-security-standards/ as of Kubernetes 1.34, for Linux. The API server applies it
to the pods of a namespace labelled `pod-security.kubernetes.io/enforce: restricted`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Spec = Mapping[str, Any]

VOLUME_TYPES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_syncookies",
}


def violations(spec: Spec) -> list[str]:
    """A sentence for each thing in a pod's spec that the standard does not allow."""
    return [
        *_of_pod(spec),
        *(f"container {name}: {problem}" for name, own in _containers(spec) for problem in _of_container(own, spec)),
    ]


def _containers(spec: Spec) -> Iterator[tuple[str, Spec]]:
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind, ()):
            yield container["name"], container


def _of_pod(spec: Spec) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"host namespaces: {field}"
    for volume in spec.get("volumes", ()):
        for kind in volume.keys() - VOLUME_TYPES - {"name"}:
            yield f"volume types: {volume['name']} is of type {kind}"
    context = spec.get("securityContext", {})
    for sysctl in context.get("sysctls", ()):
        if sysctl["name"] not in SYSCTLS:
            yield f"sysctls: {sysctl['name']}"
    yield from _of_either(context)


def _of_container(container: Spec, pod: Spec) -> Iterator[str]:
    own, pods = container.get("securityContext", {}), pod.get("securityContext", {})
    if own.get("privileged"):
        yield "privileged containers: privileged"
    if own.get("procMount", "Default") != "Default":
        yield f"/proc mount type: {own['procMount']}"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "privilege escalation: allowPrivilegeEscalation is not false"
    if own.get("runAsNonRoot", pods.get("runAsNonRoot")) is not True:
        yield "running as non-root: runAsNonRoot is not true"
    seccomp = own.get("seccompProfile", pods.get("seccompProfile", {})).get("type")
    if seccomp not in ("RuntimeDefault", "Localhost"):
        yield f"seccomp: the profile is {seccomp}"
    yield from _capabilities(own.get("capabilities", {}))
    yield from _network(container)
    yield from _of_either(own)


def _capabilities(capabilities: Spec) -> Iterator[str]:
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities: ALL is not dropped"
    for capability in set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield f"capabilities: {capability} is added"


def _network(container: Spec) -> Iterator[str]:
    for port in container.get("ports", ()):
        if port.get("hostPort"):
            yield f"host ports: {port['hostPort']}"
    handlers = {probe: container.get(probe, {}) for probe in ("livenessProbe", "readinessProbe", "startupProbe")}
    for name, handler in {**handlers, **container.get("lifecycle", {})}.items():
        if any(handler.get(action, {}).get("host") for action in ("httpGet", "tcpSocket")):
            yield f"host probes and lifecycle hooks: {name} has a host"


def _of_either(context: Spec) -> Iterator[str]:
    """What is asked of the security context of a pod and of a container alike."""
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "HostProcess: hostProcess"
    if context.get("runAsUser") == 0:
        yield "running as non-root user: runAsUser is 0"
    for profile, control in (("seccompProfile", "seccomp"), ("appArmorProfile", "AppArmor")):
        if context.get(profile, {}).get("type") == "Unconfined":
            yield f"{control}: Unconfined"
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type", "") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield f"SELinux: {dict(selinux)}"
