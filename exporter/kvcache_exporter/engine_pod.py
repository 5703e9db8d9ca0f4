"""A pod as the Kubernetes API describes it -> the vLLM engines in it, as far as the pod tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache_exporter.container_words import container_words, words_of_text
from kvcache_exporter.engine_args import EngineArgs, with_further_args

PREFIX = "kvcache-exporter.io/"
SCRAPE = f"{PREFIX}scrape"
SIDECAR = f"{PREFIX}sidecar"
PORT = f"{PREFIX}port"
CONTAINER = f"{PREFIX}container"
MODEL_CONFIG = f"{PREFIX}model-config"
ENGINE_ARGS = f"{PREFIX}engine-args"

# vLLM's own, where no --port is given (vllm/entrypoints/openai/cli_args.py).
_VLLM_PORT = 8000
_GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")


@dataclass(frozen=True)
class PodSelection:
    """Which pods have engines, besides those that opt in.

    `port_names` are names of container ports by which a pod counts; with `all_pods` every pod that is looked at counts, since the
    API was asked for a label.
    """

    port_names: tuple[str, ...] = ()
    all_pods: bool = False


@dataclass(frozen=True)
class EnginePod:
    """A container that runs a vLLM server: its address, and what its command line says.

    `gpus` is how many GPUs or MIG instances its limits ask for, None where they ask for none. `model_config` is a path in the
    exporter. `container_id` is the runtime's, without its scheme, None until it has one.
    """

    namespace: str
    pod: str
    container: str
    url: str
    args: EngineArgs
    gpus: int | None = None
    model_config: str | None = None
    container_id: str | None = None


@dataclass(frozen=True)
class PodReading:
    """What one pod has: `engines`, or a `problem`, the sentence why its engine cannot be told."""

    namespace: str
    pod: str
    engines: tuple[EnginePod, ...] = ()
    problem: str | None = None


def read_pod(pod: Mapping[str, Any], selection: PodSelection) -> PodReading | None:
    """Read a Pod (core/v1, as JSON). None for one that has no engine, does not run, is about to end, or has its own sidecar."""
    metadata, status = pod.get("metadata", {}), pod.get("status", {})
    if metadata.get("deletionTimestamp") or status.get("phase") != "Running" or not status.get("podIP"):
        return None
    namespace, name = metadata["namespace"], metadata["name"]
    annotations = metadata.get("annotations") or {}
    containers = pod.get("spec", {}).get("containers", [])
    if not _is_selected(metadata.get("labels") or {}, annotations, containers, selection):
        return None
    chosen = _engine_containers(containers, annotations, selection)
    if not chosen:
        return PodReading(namespace, name, problem=f"{_which(containers, annotations)}; {CONTAINER} has to name the engine's")
    engines = []
    for container in chosen:
        args = _args(container, annotations)
        port = _port(container, args, annotations, selection)
        if port is None:
            problem = f"the port of container {container['name']} cannot be told; give it in {PORT}"
            return PodReading(namespace, name, problem=problem)
        engines.append(
            EnginePod(
                namespace=namespace,
                pod=name,
                container=container["name"],
                url=_url(status["podIP"], port, args),
                args=args,
                gpus=_gpus(container),
                model_config=annotations.get(MODEL_CONFIG),
                container_id=_container_id(status, container["name"]),
            )
        )
    return PodReading(namespace, name, tuple(engines))


def _is_selected(
    labels: Mapping[str, str], annotations: Mapping[str, str], containers: Sequence[Mapping[str, Any]], selection: PodSelection
) -> bool:
    said = {annotations.get(SCRAPE), labels.get(SCRAPE)}
    if "false" in said:
        return False
    if "true" in said:
        return True
    # Its own exporter shows it already, and a fleet's sums would have it twice.
    if labels.get(SIDECAR) == "true":
        return False
    return selection.all_pods or any(_named_ports(container, selection.port_names) for container in containers)


def _engine_containers(
    containers: Sequence[Mapping[str, Any]], annotations: Mapping[str, str], selection: PodSelection
) -> list[Mapping[str, Any]]:
    """The containers that are engines: the one that is named, else those with such a port, else those whose command is vLLM's."""
    if CONTAINER in annotations:
        return [container for container in containers if container["name"] == annotations[CONTAINER]]
    if len(containers) == 1:
        return list(containers)
    names = (annotations[PORT],) if PORT in annotations else selection.port_names
    by_port = [container for container in containers if _named_ports(container, names)]
    return by_port or [container for container in containers if _args(container, annotations).is_vllm]


def _which(containers: Sequence[Mapping[str, Any]], annotations: Mapping[str, str]) -> str:
    if CONTAINER in annotations:
        return f"it has no container {annotations[CONTAINER]!r}"
    return f"which of its containers ({', '.join(container['name'] for container in containers)}) is the engine cannot be told"


def _args(container: Mapping[str, Any], annotations: Mapping[str, str]) -> EngineArgs:
    """What the command line says, and after it the annotation, which so has the last word."""
    variables = container.get("env") or ()
    env = {variable["name"]: None if "valueFrom" in variable else variable.get("value", "") for variable in variables}
    words = container_words(container.get("command") or (), container.get("args") or (), env)
    return with_further_args(words, words_of_text(annotations.get(ENGINE_ARGS, "")))


def _port(container: Mapping[str, Any], args: EngineArgs, annotations: Mapping[str, str], selection: PodSelection) -> int | None:
    stated = annotations.get(PORT)
    if stated is not None:
        named = _named_ports(container, (stated,))
        return named[0] if named else int(stated) if stated.isdecimal() else None
    if args.port is not None:
        return args.port
    named = _named_ports(container, selection.port_names)
    if named:
        return named[0]
    return None if "port" in args.unknown else _VLLM_PORT


def _named_ports(container: Mapping[str, Any], names: Sequence[str]) -> list[int]:
    return [port["containerPort"] for port in container.get("ports") or () if port.get("name") in names]


def _url(ip: str, port: int, args: EngineArgs) -> str:
    return f"{'https' if args.uses_tls else 'http'}://{f'[{ip}]' if ':' in ip else ip}:{port}"


def _gpus(container: Mapping[str, Any]) -> int | None:
    limits = (container.get("resources") or {}).get("limits") or {}
    asked = [int(quantity) for name, quantity in limits.items() if name.startswith(_GPU_RESOURCES) and quantity.isdecimal()]
    return sum(asked) or None


def _container_id(status: Mapping[str, Any], name: str) -> str | None:
    for one in status.get("containerStatuses") or ():
        if one.get("name") == name and one.get("containerID"):
            return str(one["containerID"]).rpartition("//")[2]
    return None
