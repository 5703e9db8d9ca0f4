"""What the API server makes of a pod that is created under a MutatingAdmissionPolicy with its binding.

After k8s.io/apiserver/pkg/admission/plugin/policy/mutating of Kubernetes 1.36 (dispatcher.go, patch/json_patch.go), as far as it
is about JSON patches. What the API server fills in afterwards, such as hostPort in a pod on the host's network, is not filled in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from cel_expressions import CelError, Expression
from helm_engine import Manifest, Render, selects
from kubernetes_schemas import complaint


class RefusedError(Exception):
    """The pod would not be created."""


class Admission:
    """The policy of a render, for a cluster of one version of Kubernetes. Raises CelError for a policy that it would not take."""

    def __init__(self, render: Render, kubernetes: str = "1.36") -> None:
        policy = render.one("MutatingAdmissionPolicy")
        self._spec = policy["spec"]
        self._binding = render.one("MutatingAdmissionPolicyBinding")["spec"]
        assert self._binding["policyName"] == policy["metadata"]["name"]
        self._kubernetes = kubernetes
        self._conditions = [Expression(condition["expression"], {}) for condition in self._spec["matchConditions"]]
        self._variables: dict[str, Expression] = {}
        for variable in self._spec["variables"]:
            self._variables[variable["name"]] = self._expression(variable["expression"])
        (mutation,) = self._spec["mutations"]
        assert mutation["patchType"] == "JSONPatch"
        self._patch = self._expression(mutation["jsonPatch"]["expression"])
        assert self._patch.type.name() == "LIST<JSONPatch>"

    def _expression(self, text: str) -> Expression:
        return Expression(text, {name: variable.type for name, variable in self._variables.items()})

    def admit(self, pod: Manifest, namespace_labels: Mapping[str, str]) -> Manifest:
        """The pod as it is created in a namespace with these labels. Raises RefusedError."""
        pod = as_read(pod)
        patched = pod
        try:
            if self._matches(pod, namespace_labels):
                patched = _patched(pod, self._evaluated(pod))
        except CelError as error:
            if self._spec["failurePolicy"] == "Fail":
                raise RefusedError(str(error)) from None
        # Not left to failurePolicy: neither a field that is not known, nor what the pod is refused for without any policy.
        named = {**patched, "metadata": {"name": "from-a-prefix", **patched["metadata"]}}
        for problem in (complaint(named, self._kubernetes), *_contradictions(patched["spec"])):
            if problem is not None:
                raise RefusedError(problem)
        return patched

    def _matches(self, pod: Manifest, namespace_labels: Mapping[str, str]) -> bool:
        constraints, labels = self._spec["matchConstraints"], pod["metadata"].get("labels", {})
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        return (
            rule in constraints["resourceRules"]
            and selects(constraints["objectSelector"], labels)
            and selects(self._binding["matchResources"]["namespaceSelector"], namespace_labels)
            and all(condition.value(pod, {}) for condition in self._conditions)
        )

    def _evaluated(self, pod: Manifest) -> list[dict[str, Any]]:
        """The patch. A variable without a value is an error only where it is used: each is evaluated when it is asked for."""
        values: dict[str, Any] = {}
        problems = []
        for name, variable in self._variables.items():
            try:
                values[name] = variable.value(pod, values)
            except CelError as error:
                problems.append(f"variable {name}: {error}")
        try:
            patch: list[dict[str, Any]] = self._patch.value(pod, values)
        except CelError as error:
            raise CelError("; ".join((*problems, str(error)))) from None
        return patch


def as_read(pod: Manifest) -> Manifest:
    """The pod as an expression and a patch see it: the API server drops lists and mappings of names that are empty."""
    pod = deepcopy(pod)
    for part in (pod["metadata"], pod["spec"], *pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
        for key in [key for key, value in part.items() if value in (None, [], {}) and key != "securityContext"]:
            del part[key]
    return pod


def _patched(pod: Manifest, patch: list[dict[str, Any]]) -> Manifest:
    """The pod after a patch of additions (RFC 6902). Raises CelError where it does not fit: failurePolicy decides there, too."""
    pod = deepcopy(pod)
    for operation in patch:
        assert operation.keys() == {"op", "path", "value"}
        assert operation["op"] == "add"
        *parents, last = (key.replace("~1", "/").replace("~0", "~") for key in operation["path"].removeprefix("/").split("/"))
        parent: Any = pod
        for key in parents:
            if key not in parent:
                raise CelError(f"{operation['path']}: there is no {key}")
            parent = parent[key]
        if isinstance(parent, list):
            assert last == "-"
            parent.append(operation["value"])
        else:
            parent[last] = operation["value"]
    return as_read(pod)


def _contradictions(spec: Mapping[str, Any]) -> Iterator[str]:
    """What the API server refuses in a pod though its schema allows it, of what a further container can bring about."""
    volumes = [volume["name"] for volume in spec.get("volumes", ())]
    containers = [*spec.get("initContainers", ()), *spec["containers"]]
    named = {"volumes": volumes, "containers": [container["name"] for container in containers]}
    for container in containers:
        mounts = container.get("volumeMounts", ())
        named[f"mounts of {container['name']}"] = [mount["mountPath"] for mount in mounts]
        yield from (f"{container['name']}: no volume {mount['name']}" for mount in mounts if mount["name"] not in volumes)
    yield from (f"{kind}: {name} is there twice" for kind, names in named.items() for name in names if names.count(name) > 1)
