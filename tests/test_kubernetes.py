"""Engines found through the Kubernetes API: from the pods that a real HTTP server lists and watches to the page of a scrape."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcache_exporter.config import KubernetesConfig, TargetConfig
from kvcache_exporter.discovery import Discovery, discover
from kvcache_exporter.engine_pod import PodSelection, read_pod
from kvcache_exporter.errors import ConfigError, SourceError
from kvcache_exporter.families import FAMILIES
from kvcache_exporter.gpu_owners import ContainerGpus, EnginePlace, EngineProcess
from kvcache_exporter.gpu_reading import GpuProcess, GpuReading, NvmlReading
from kvcache_exporter.sources.kubernetes import ApiServer, PodsApi, PodWatch, find_api_server
from lab import TINY_LLAMA, Lab, Upstream, capture, models_answer, wait_until
from pods_api_server import NODE, PodsApiServer, pod

PAGE = capture("0.32.0_moderate")
IN_CLUSTER = {"NODE_NAME": NODE}
GIB = 1024**3


class Cluster:
    """An API server, one engine that every pod of `serve` points at, and a node's exporter."""

    def __init__(self, **api: Any) -> None:
        self.api = PodsApiServer(**api)
        self.engine = Upstream()
        self.engine.page(PAGE, models=models_answer())
        self.port = int(self.engine.url.rpartition(":")[2])
        self._discoveries: list[Discovery] = []

    def close(self) -> None:
        for discovery in self._discoveries:
            discovery.close()
        self.api.close()
        self.engine.close()

    def serve(self, name: str, **more: Any) -> None:
        """Apply a pod whose engine answers."""
        self.api.apply(pod(name, port=self.port, **more))

    def lab(self, *targets: TargetConfig, settings: KubernetesConfig | None = None, **more: Any) -> Lab:
        """An exporter that looks for engines, as `serve` makes it."""
        settings = settings or KubernetesConfig(api_server=self.api.url)
        discovery = discover(settings, IN_CLUSTER, retry_seconds=0.05)
        self._discoveries.append(discovery)
        discovery.start()
        return Lab(*targets, discovery=discovery, **more)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def targets(lab: Lab) -> set[str]:
    """The targets of which the page has any series at all."""
    names = {part.partition('"')[0] for part in lab.text().split('target="')[1:]}
    return names - {""}


def polled_until(lab: Lab, condition: Any) -> None:
    wait_until(lambda: condition(lab.poll()))


def test_engines_come_and_go(cluster: Cluster) -> None:
    """One tick shows an engine, and the tick after its pod is gone shows nothing of it."""
    cluster.serve("vllm-0")
    lab = cluster.lab()
    polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0"})
    assert lab.value("kvcache_usage_ratio", engine="0") is not None
    assert lab.samples("kvcache_up", source="kubernetes") == {(): 1.0}

    cluster.serve("vllm-1", namespace="prod")
    polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0", "prod/vllm-1"})

    cluster.api.delete("vllm-0")
    polled_until(lab, lambda lab: "ml/vllm-0" not in targets(lab))
    assert targets(lab) == {"prod/vllm-1"}


def test_no_series_of_a_gone_pod_survives_two_intervals(cluster: Cluster) -> None:
    """With the real interval: the event is there long before the second tick."""
    cluster.serve("vllm-0")
    lab = cluster.lab()
    polled_until(lab, lambda lab: lab.value("kvcache_up", target="ml/vllm-0", source="vllm") == 1)
    watching = cluster.api.watches
    assert watching == 1
    cluster.api.delete("vllm-0")
    time.sleep(0.5)
    lab.poll().poll()
    assert "vllm-0" not in lab.text()


@pytest.mark.parametrize("change", ["ends", "opts out", "stops"])
def test_pod_that_is_no_longer_an_engine_is_gone(cluster: Cluster, change: str) -> None:
    cluster.serve("vllm-0")
    lab = cluster.lab()
    polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0"})
    changed = pod("vllm-0", port=cluster.port)
    if change == "ends":
        changed["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
    elif change == "opts out":
        changed["metadata"]["labels"]["kvcache-exporter.io/scrape"] = "false"
    else:
        changed["status"]["phase"] = "Failed"
    cluster.api.apply(changed)
    polled_until(lab, lambda lab: targets(lab) == set())


def test_pods_of_other_nodes_are_not_asked_for(cluster: Cluster) -> None:
    cluster.serve("here")
    cluster.serve("there", node="node-2")
    lab = cluster.lab()
    polled_until(lab, lambda lab: targets(lab) == {"ml/here"})
    assert {query["fieldSelector"] for _, query in cluster.api.asked} == {"spec.nodeName=node-1"}
    # What the API server has in memory: at the start of a thousand exporters, no read of its database.
    assert cluster.api.asked[0] == ("/api/v1/pods", {"fieldSelector": "spec.nodeName=node-1", "resourceVersion": "0"})


def test_namespaces_are_asked_for_one_by_one(cluster: Cluster) -> None:
    for namespace in ("ml", "prod", "other"):
        cluster.serve("vllm-0", namespace=namespace)
    settings = KubernetesConfig(api_server=cluster.api.url, namespaces=("ml", "prod"))
    lab = cluster.lab(settings=settings)
    polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0", "prod/vllm-0"})
    assert {path for path, _ in cluster.api.asked} == {"/api/v1/namespaces/ml/pods", "/api/v1/namespaces/prod/pods"}


def test_label_selector(cluster: Cluster) -> None:
    """It opts in, and is the API server's work; a pod that loses the label is gone."""
    cluster.serve("a", labels={"app": "vllm"}, port_name="http")
    cluster.serve("b", labels={"app": "web"}, port_name="vllm")
    lab = cluster.lab(settings=KubernetesConfig(api_server=cluster.api.url, label_selector="app=vllm"))
    polled_until(lab, lambda lab: targets(lab) == {"ml/a"})
    cluster.serve("a", labels={"app": "old"}, port_name="http")
    polled_until(lab, lambda lab: targets(lab) == set())
    cluster.serve("b", labels={"app": "vllm"}, port_name="vllm")
    polled_until(lab, lambda lab: targets(lab) == {"ml/b"})


def test_pod_of_the_same_name_at_another_address_is_another_engine(cluster: Cluster) -> None:
    """A StatefulSet's pod comes back under its name: nothing of the old one is taken for the new one's."""
    cluster.serve("vllm-0")
    lab = cluster.lab()
    polled_until(lab, lambda lab: lab.value("kvcache_up", target="ml/vllm-0", source="vllm") == 1)
    with Upstream() as other:
        other.page(capture("0.31.0_idle"), models=models_answer())
        cluster.api.delete("vllm-0")
        cluster.api.apply(pod("vllm-0", port=int(other.url.rpartition(":")[2]), uid="another"))
        polled_until(lab, lambda lab: f'url="{other.url}"' in lab.text())
        assert cluster.engine.url not in lab.text()


def test_configured_targets_stay_beside_those_found(cluster: Cluster) -> None:
    cluster.serve("vllm-0")
    lab = cluster.lab(TargetConfig("fixed", cluster.engine.url), TargetConfig("ml/vllm-0", "http://127.0.0.1:9"))
    polled_until(lab, lambda lab: lab.value("kvcache_up", source="kubernetes") == 1)
    assert targets(lab.poll()) == {"fixed", "ml/vllm-0"}
    assert 'url="http://127.0.0.1:9"' in lab.text(), "what the operator says of a name counts"
    cluster.api.delete("vllm-0")
    time.sleep(0.3)
    assert targets(lab.poll()) == {"fixed", "ml/vllm-0"}


def test_watch_goes_on_from_bookmarks_and_after_its_end(cluster: Cluster) -> None:
    cluster.serve("vllm-0")
    lab = cluster.lab()
    polled_until(lab, lambda _: cluster.api.watches == 1)
    cluster.api.bookmark()
    time.sleep(0.2)
    version = max(int(query["resourceVersion"]) for _, query in cluster.api.asked) + 1
    # Everything before the bookmark is forgotten: a watch that did not note it would be refused.
    cluster.api.forget_before(version)
    cluster.api.end_watches()
    wait_until(lambda: sum("watch" in query for _, query in cluster.api.asked) >= 2)
    cluster.serve("vllm-1")
    polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0", "ml/vllm-1"})
    assert cluster.api.lists() == 1
    assert lab.errors("kubernetes") == {}


@pytest.mark.parametrize("how", ["in the stream", "as the answer"])
def test_expired_version_lists_again(cluster: Cluster, how: str) -> None:
    """410, as an event or as the status: what went in between is gone, and nothing is down."""
    cluster.serve("vllm-0")
    cluster.serve("vllm-1")
    lab = cluster.lab()
    polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0", "ml/vllm-1"})
    if how == "in the stream":
        cluster.api.expire_watches(without="vllm-1")
    else:
        cluster.api.forget_history(without="vllm-1")
        cluster.api.end_watches()
    polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0"})
    assert lab.value("kvcache_up", source="kubernetes") == 1
    assert "resourceVersion" not in [query for _, query in cluster.api.asked if "watch" not in query][-1], (
        "not from the old cache"
    )


def test_watch_over_a_dead_connection_is_given_up(cluster: Cluster) -> None:
    """Nothing comes, no end either: a little after the time of the watch the pods are listed anew."""
    cluster.api.is_deaf = True
    cluster.serve("vllm-0")
    api = PodsApi(ApiServer(cluster.api.url), node_name=NODE, watch_seconds=1, grace_seconds=0.2)
    watch = PodWatch(api, partial(read_pod, selection=PodSelection(("vllm",))), retry_seconds=0.05)
    watch.start()
    try:
        wait_until(lambda: cluster.api.watches == 1)
        cluster.api.delete("vllm-0")
        time.sleep(0.3)
        assert [pod.pod for pod in watch.read().pods] == ["vllm-0"]
        wait_until(lambda: watch.read().pods == (), seconds=5)
        assert cluster.api.lists() == 2
    finally:
        watch.close()


def test_watch_that_ends_at_once_is_not_asked_in_a_tight_loop(cluster: Cluster) -> None:
    """As behind a proxy that allows no long answer."""
    api = PodsApi(ApiServer(cluster.api.url), node_name=NODE, watch_seconds=0)
    watch = PodWatch(api, partial(read_pod, selection=PodSelection(("vllm",))), retry_seconds=0.2)
    watch.start()
    try:
        time.sleep(1.0)
        assert 2 <= len(cluster.api.asked) <= 8
        assert watch.read().errors == ()
    finally:
        watch.close()


def test_connection_that_breaks_is_made_again(cluster: Cluster) -> None:
    cluster.serve("vllm-0")
    lab = cluster.lab()
    polled_until(lab, lambda _: cluster.api.watches == 1)
    cluster.api.cut_watches()
    wait_until(lambda: cluster.api.lists() == 2)
    cluster.serve("vllm-1")
    polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0", "ml/vllm-1"})
    assert lab.value("kvcache_up", source="kubernetes") == 1


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (403, "unauthorized", "may not list and watch the pods of all namespaces (403): bind its service account to a role"),
        (401, "unauthorized", "does not know this exporter (401): no token is sent to it"),
        (500, "http_status", "answered 500 instead of 200"),
    ],
)
def test_refusal_is_said_and_ends(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, status: int, reason: str, words: str
) -> None:
    """While the API refuses, engines that are known stay; when it answers, all is as if nothing had been."""
    cluster.serve("vllm-0")
    lab = cluster.lab()
    polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0"})
    cluster.api.status = status
    cluster.api.cut_watches()
    polled_until(lab, lambda lab: lab.errors("kubernetes").get(reason, 0) >= 1)
    assert lab.value("kvcache_up", source="kubernetes") == 0
    assert lab.value("kvcache_up", target="ml/vllm-0", source="vllm") == 1
    assert any(words in record.fields["error"] for record in caplog.records if hasattr(record, "fields"))
    cluster.api.status = None
    polled_until(lab, lambda lab: lab.value("kvcache_up", source="kubernetes") == 1)


def test_refused_from_the_start(cluster: Cluster) -> None:
    cluster.api.status = 403
    lab = cluster.lab()
    polled_until(lab, lambda lab: lab.errors("kubernetes") != {})
    assert lab.value("kvcache_up", source="kubernetes") == 0
    assert lab.samples("kvcache_last_success_timestamp_seconds", source="kubernetes") == {}


def test_slow_api_holds_up_no_poll(cluster: Cluster) -> None:
    cluster.api.hold_seconds = 2.0
    cluster.serve("vllm-0")
    lab = cluster.lab(TargetConfig("fixed", cluster.engine.url))
    started = time.monotonic()
    lab.poll()
    assert time.monotonic() - started < 1.5
    assert targets(lab) == {"fixed"}
    assert lab.value("kvcache_up", target="fixed", source="vllm") == 1
    assert lab.samples("kvcache_up", source="kubernetes") == {}, "nothing is known yet, neither good nor bad"
    polled_until(lab, lambda lab: targets(lab) == {"fixed", "ml/vllm-0"})


def test_api_that_is_not_there(cluster: Cluster) -> None:
    lab = cluster.lab(settings=KubernetesConfig(api_server="http://127.0.0.1:9"))
    polled_until(lab, lambda lab: lab.errors("kubernetes").get("connection", 0) >= 2)
    assert lab.value("kvcache_up", source="kubernetes") == 0


def test_service_account_token_and_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod: HTTPS with the cluster's CA, and a token that is replaced while we run."""
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.crt"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kubernetes"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    (tmp_path / "token").write_text("first\n")
    made = Cluster(tls=(certificate, key), token="first")
    try:
        environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(made.api.port)}
        server = find_api_server(environment, tmp_path)
        monkeypatch.setattr("kvcache_exporter.discovery.find_api_server", lambda _: server)
        lab = made.lab(settings=KubernetesConfig())
        made.serve("vllm-0")
        polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0"})
        made.api.token = "second"
        made.api.cut_watches()
        polled_until(lab, lambda lab: lab.errors("kubernetes").get("unauthorized", 0) >= 1)
        (tmp_path / "token").write_text("second\n")
        polled_until(lab, lambda lab: lab.value("kvcache_up", source="kubernetes") == 1)
        assert made.api.asked[0][0] == "/api/v1/pods"
    finally:
        made.close()


def test_arguments_of_the_container_are_the_targets(cluster: Cluster) -> None:
    """Seats and parallel sizes are on no page of the engine; its command line has them."""
    changed = pod("vllm-0", port=cluster.port)
    changed["spec"]["containers"][0]["args"] += ["--max-num-seqs", "3"]
    cluster.api.apply(changed)
    lab = cluster.lab()
    polled_until(lab, lambda lab: lab.value("kvcache_up", target="ml/vllm-0", source="vllm") == 1)
    (labels,) = lab.samples("kvcache_engine_info", target="ml/vllm-0")
    assert (dict(labels)["max_num_seqs"], dict(labels)["max_num_seqs_source"]) == ("3", "configured")


class H100s:
    """A node of two H100s, whose driver can fail."""

    def __init__(self) -> None:
        self.fails = False

    def read(self) -> NvmlReading:
        if self.fails:
            raise SourceError("unknown", "the driver is gone")
        return NvmlReading(tuple(GpuReading(f"GPU-{n}", n, "NVIDIA H100 80GB HBM3", 80 * GIB, 70 * GIB) for n in range(2)), "570")


def test_engine_without_max_num_seqs_has_the_default_of_its_gpu(cluster: Cluster) -> None:
    """Known from the first page on, and while NVML fails; of an engine of the file no arguments are known, so nothing is sure."""
    cluster.serve("vllm-0")
    gpus = H100s()
    lab = cluster.lab(TargetConfig("fixed", cluster.engine.url), gpus=gpus)

    def seats(target: str) -> tuple[str, str] | None:
        infos = [dict(labels) for labels in lab.samples("kvcache_engine_info", target=target)]
        return (infos[0]["max_num_seqs"], infos[0]["max_num_seqs_source"]) if infos else None

    polled_until(lab, lambda _: seats("ml/vllm-0") is not None)
    assert seats("ml/vllm-0") == ("1024", "default")
    assert seats("fixed") == ("", "")
    gpus.fails = True
    lab.poll().poll()
    assert lab.value("kvcache_up", source="nvml") == 0
    assert seats("ml/vllm-0") == ("1024", "default")


def test_model_config_for_all_engines(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "models--org--tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    cluster.engine.page(PAGE, models=models_answer(root="org/tiny"))
    cluster.serve("vllm-0")
    lab = cluster.lab(settings=KubernetesConfig(api_server=cluster.api.url, model_config=tmp_path))
    polled_until(lab, lambda lab: lab.value("kvcache_bytes_per_token", target="ml/vllm-0") is not None)


def test_arguments_that_cannot_be_told_leave_bytes_out(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice the ranks are twice the bytes: none are stated until the pod says how many there are."""
    (tmp_path / "models--org--tiny").mkdir()
    (tmp_path / "models--org--tiny" / "config.json").write_text(json.dumps(TINY_LLAMA))
    cluster.engine.page(PAGE, models=models_answer(root="org/tiny"))
    hidden = pod("vllm-0", port=cluster.port)
    hidden["spec"]["containers"][0]["args"] += ["--tensor-parallel-size", "$(TP)"]
    hidden["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "2"
    cluster.api.apply(hidden)
    lab = cluster.lab(settings=KubernetesConfig(api_server=cluster.api.url, model_config=tmp_path))
    polled_until(lab, lambda lab: lab.value("kvcache_up", target="ml/vllm-0", source="model_config") == 0)
    assert lab.value("kvcache_usage_ratio", target="ml/vllm-0") is not None
    assert lab.value("kvcache_bytes_per_token", target="ml/vllm-0") is None
    (sentence,) = {
        fields["error"] for record in caplog.records if (fields := getattr(record, "fields", {})).get("source") == "model_config"
    }
    assert sentence == (
        "no bytes are known, since not all arguments of the engine can be told (--tensor-parallel-size is $(TP)): state them in "
        "the annotation kvcache-exporter.io/engine-args of its pod, or with --engine-args"
    )
    hidden["metadata"]["annotations"]["kvcache-exporter.io/engine-args"] = "--tensor-parallel-size 2"
    cluster.api.apply(hidden)
    polled_until(lab, lambda lab: lab.value("kvcache_bytes_per_token", target="ml/vllm-0") is not None)
    assert lab.value("kvcache_up", target="ml/vllm-0", source="model_config") == 1


def test_engine_that_cannot_be_told_is_down_until_it_can(cluster: Cluster) -> None:
    odd = pod("vllm-0", port=cluster.port, annotations={"kvcache-exporter.io/container": "engine"})
    cluster.api.apply(odd)
    lab = cluster.lab()
    polled_until(lab, lambda lab: lab.value("kvcache_up", target="ml/vllm-0", source="kubernetes") == 0)
    lab.poll().poll()
    assert lab.samples("kvcache_poll_errors_total", target="ml/vllm-0") == {(("reason", "not_told"), ("source", "kubernetes")): 1}
    cluster.serve("vllm-0")
    polled_until(lab, lambda lab: lab.value("kvcache_up", target="ml/vllm-0", source="vllm") == 1)
    assert lab.value("kvcache_up", target="ml/vllm-0", source="kubernetes") == 1
    cluster.api.delete("vllm-0")
    polled_until(lab, lambda lab: targets(lab) == set())


def test_odd_pod_that_goes_leaves_nothing(cluster: Cluster) -> None:
    cluster.api.apply(pod("vllm-0", annotations={"kvcache-exporter.io/container": "engine"}))
    lab = cluster.lab()
    polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0"})
    cluster.api.delete("vllm-0")
    polled_until(lab, lambda lab: targets(lab) == set())


def test_target_info_names_the_pod_under_names_that_do_not_clash(cluster: Cluster) -> None:
    """Prometheus gives `namespace`, `pod` and so on to the exporter itself, and with honorLabels the other way round."""
    cluster.serve("vllm-0")
    lab = cluster.lab()
    polled_until(lab, lambda lab: targets(lab) == {"ml/vllm-0"})
    (labels,) = lab.samples("kvcache_target_info")
    assert {"vllm_namespace": "ml", "vllm_pod": "vllm-0", "vllm_container": "vllm"}.items() <= dict(labels).items()
    given = {"namespace", "pod", "container", "endpoint", "instance", "job", "node", "service", "cluster"}
    assert not given & {label for family in FAMILIES for label in family.labels}


def test_target_without_a_pod_has_no_pod() -> None:
    with Upstream() as upstream:
        upstream.page(PAGE)
        lab = Lab(TargetConfig("t", upstream.url), TargetConfig("u", upstream.url, pod="ml/qwen-0")).poll()
    (labels,) = lab.samples("kvcache_target_info", target="t")
    assert {dict(labels)[name] for name in ("vllm_namespace", "vllm_pod", "vllm_container")} == {""}
    (labels,) = lab.samples("kvcache_target_info", target="u")
    assert (dict(labels)["vllm_pod"], dict(labels)["vllm_container"]) == ("qwen-0", "")


class OneGpu:
    """A GPU with an engine's process and another one."""

    def read(self) -> NvmlReading:
        processes = (GpuProcess(11, 60 * GIB), GpuProcess(12, GIB))
        return NvmlReading((GpuReading("GPU-a", 0, "H100", 80 * GIB, 62 * GIB, GIB, processes=processes),), "570")


class Containers:
    """What a process table says that knows the container of each process."""

    def engines_of(self, places: dict[str, EnginePlace], pids: set[int]) -> dict[str, tuple[EngineProcess, ...]]:
        pid_of = {"vllm-0-vllm": 11}
        return {name: (EngineProcess(pid_of[str(place.container_id)]),) for name, place in places.items()}


class Kubelet:
    """Says that the engine's container has the GPU."""

    def list(self) -> tuple[ContainerGpus, ...]:
        return (ContainerGpus("ml", "vllm-0", "vllm", ("GPU-a",)),)


@pytest.mark.parametrize(
    ("sources", "method"), [({"processes": Containers()}, "process"), ({"pod_resources": Kubelet()}, "pod_resources")]
)
def test_gpus_of_an_engine_that_was_found(cluster: Cluster, sources: dict[str, Any], method: str) -> None:
    """By its container's id, where the exporter sees the host's processes; else by the kubelet."""
    cluster.serve("vllm-0")
    lab = cluster.lab(gpus=OneGpu(), **sources)
    polled_until(lab, lambda lab: lab.samples("kvcache_engine_gpu_info", method=method, uuid="GPU-a") != {})
    others = lab.value("kvcache_gpu_memory_component_bytes", component="other_processes")
    assert others == (GIB if method == "process" else None)


@pytest.mark.parametrize(
    ("settings", "environment", "problems"),
    [
        (
            KubernetesConfig(),
            {},
            [
                "kubernetes.node_name: is not set, nor is NODE_NAME: give the name of the node whose pods are to be watched",
                "kubernetes.api_server: is not set, nor is KUBERNETES_SERVICE_HOST, so this is no pod: give the address",
            ],
        ),
        (
            KubernetesConfig(api_server="http://127.0.0.1:8001"),
            {},
            ["kubernetes.node_name: is not set, nor is NODE_NAME: give the name of the node whose pods are to be watched"],
        ),
    ],
)
def test_what_is_missing_is_said(settings: KubernetesConfig, environment: dict[str, str], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        discover(settings, environment)
    assert list(error.value.problems) == problems


def test_api_server_of_a_cluster_with_ipv6() -> None:
    server = find_api_server({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"})
    assert server is not None
    assert server.url == "https://[fd00::1]:443"
