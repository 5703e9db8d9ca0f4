"""The engines of this node as the Kubernetes API lists them -> targets, from tick to tick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from kvcache_exporter.config import KubernetesConfig, TargetConfig
from kvcache_exporter.engine_pod import EnginePod, PodReading, PodSelection, read_pod
from kvcache_exporter.errors import ConfigError, SourceError
from kvcache_exporter.health import HealthBook
from kvcache_exporter.sources.kubernetes import ApiServer, PodsApi, PodsReading, PodWatch, find_api_server
from kvcache_exporter.target_arguments import with_arguments

SOURCE_KUBERNETES = "kubernetes"


class PodSource(Protocol):
    """What keeps the pods of this node up to date."""

    def start(self) -> None:
        """Begin to."""

    def close(self) -> None:
        """Stop asking."""

    def read(self) -> PodsReading:
        """Return what is known now, at once."""


class Discovery:
    """Finds targets in what the sources (one for each namespace, or one for all) know of pods."""

    def __init__(self, sources: Sequence[PodSource], settings: KubernetesConfig) -> None:
        self._sources = tuple(sources)
        self._settings = settings
        self._problems: dict[str, str] = {}

    @property
    def troubled(self) -> frozenset[str]:
        """Names (`namespace/pod`) of pods that want to be watched and whose engine cannot be told."""
        return frozenset(self._problems)

    def start(self) -> None:
        """Begin to look."""
        for source in self._sources:
            source.start()

    def close(self) -> None:
        """Look no longer."""
        for source in self._sources:
            source.close()

    def targets(self, now: float, health: HealthBook) -> tuple[TargetConfig, ...]:
        """The engines of now. While the API does not answer, those of before: they are polled, and tell if they are up."""
        readings = [source.read() for source in self._sources]
        for reading in readings:
            for error in reading.errors:
                health.failure("", SOURCE_KUBERNETES, error, duration_seconds=0.0)
        durations = [reading.listed_in_seconds for reading in readings if reading.listed_in_seconds is not None]
        if all(reading.is_current for reading in readings):
            health.success("", SOURCE_KUBERNETES, at=now, duration_seconds=max(durations, default=0.0))
        pods = [pod for reading in readings for pod in reading.pods]
        self._note_problems(pods, now, health)
        return tuple(target for pod in pods for target in _targets_of(pod, self._settings))

    def _note_problems(self, pods: Sequence[PodReading], now: float, health: HealthBook) -> None:
        """A pod keeps its problem until it changes, and it is counted once."""
        problems = {f"{pod.namespace}/{pod.pod}": pod.problem for pod in pods if pod.problem is not None}
        for name, problem in problems.items():
            if self._problems.get(name) != problem:
                health.failure(name, SOURCE_KUBERNETES, SourceError("not_told", problem), duration_seconds=0.0)
        for name in self._problems.keys() - problems.keys():
            health.success(name, SOURCE_KUBERNETES, at=now, duration_seconds=0.0)
        self._problems = problems


def discover(settings: KubernetesConfig, environment: Mapping[str, str], *, retry_seconds: float = 1.0) -> Discovery:
    """What finds the engines of this node, not begun yet.

    `environment` tells what the file leaves out: NODE_NAME, and where the API server is. `retry_seconds` is PodWatch's. Raises
    ConfigError when neither tells.
    """
    node_name = settings.node_name or environment.get("NODE_NAME")
    server = find_api_server(environment) if settings.api_server is None else ApiServer(settings.api_server)
    problems = []
    if not node_name:
        problems.append(
            "kubernetes.node_name: is not set, nor is NODE_NAME: give the name of the node whose pods are to be watched"
        )
    if server is None:
        problems.append("kubernetes.api_server: is not set, nor is KUBERNETES_SERVICE_HOST, so this is no pod: give the address")
    if server is None or not node_name:
        raise ConfigError(problems)
    read = partial(read_pod, selection=PodSelection(settings.port_names, all_pods=settings.label_selector is not None))
    watches = [
        PodWatch(
            PodsApi(server, node_name=node_name, namespace=namespace, label_selector=settings.label_selector),
            read,
            retry_seconds=retry_seconds,
        )
        for namespace in settings.namespaces or (None,)
    ]
    return Discovery(watches, settings)


def _targets_of(pod: PodReading, settings: KubernetesConfig) -> list[TargetConfig]:
    several = len(pod.engines) > 1
    return [_target(engine, settings, with_container=several) for engine in pod.engines]


def _target(engine: EnginePod, settings: KubernetesConfig, *, with_container: bool) -> TargetConfig:
    name = f"{engine.namespace}/{engine.pod}"
    target = TargetConfig(
        name=f"{name}/{engine.container}" if with_container else name,
        url=engine.url,
        model_config=settings.model_config if engine.model_config is None else Path(engine.model_config),
        model_config_token_file=settings.model_config_token_file,
        bearer_token_file=settings.bearer_token_file,
        ca_file=settings.ca_file,
        pod=f"{name}/{engine.container}",
        container_id=engine.container_id,
    )
    return with_arguments(target, engine.args, gpus=engine.gpus)
