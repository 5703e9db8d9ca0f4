"""Which pods have engines, at which address, and what their command line says."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_exporter.engine_pod import EnginePod, PodSelection, read_pod
from pods_api_server import pod

BY_PORT = PodSelection(port_names=("vllm",))


def engine(one: dict[str, Any], selection: PodSelection = BY_PORT) -> EnginePod:
    reading = read_pod(one, selection)
    assert reading is not None
    assert reading.problem is None
    (found,) = reading.engines
    return found


def container(name: str, *args: str, port: int | None = None, port_name: str = "http", **more: Any) -> dict[str, Any]:
    ports = [] if port is None else [{"name": port_name, "containerPort": port}]
    return {"name": name, "args": list(args), "ports": ports, **more}


SCRAPE = {"kvcache-exporter.io/scrape": "true"}


@pytest.mark.parametrize(
    ("selection", "labels", "annotations", "port_name", "counts"),
    [
        (BY_PORT, {}, {}, "vllm", True),
        (BY_PORT, {}, {}, "http", False),
        (BY_PORT, SCRAPE, {}, "http", True),
        (BY_PORT, {}, SCRAPE, "http", True),
        (BY_PORT, {"kvcache-exporter.io/scrape": "false"}, {}, "vllm", False),
        (BY_PORT, SCRAPE, {"kvcache-exporter.io/scrape": "false"}, "vllm", False),
        (PodSelection(all_pods=True), {}, {}, "http", True),
        (PodSelection(all_pods=True), {}, {"kvcache-exporter.io/scrape": "false"}, "http", False),
        (PodSelection(("metrics",)), {}, {}, "vllm", False),
        (PodSelection(("metrics", "vllm")), {}, {}, "vllm", True),
        # Its own sidecar shows it: it would be there twice.
        (BY_PORT, {"kvcache-exporter.io/sidecar": "true"}, {}, "vllm", False),
        (BY_PORT, {"kvcache-exporter.io/sidecar": "true", **SCRAPE}, {}, "vllm", True),
    ],
)
def test_pods_opt_in(
    selection: PodSelection, labels: dict[str, str], annotations: dict[str, str], port_name: str, counts: bool
) -> None:
    one = pod("vllm-0", port_name=port_name, labels=labels, annotations=annotations)
    assert (read_pod(one, selection) is not None) == counts


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed", "Unknown"])
def test_pods_that_do_not_run_have_no_engine(phase: str) -> None:
    assert read_pod(pod("vllm-0", phase=phase), BY_PORT) is None


def test_pod_without_address_has_no_engine_yet() -> None:
    one = pod("vllm-0")
    del one["status"]["podIP"]
    assert read_pod(one, BY_PORT) is None


def test_pod_that_is_about_to_end_is_left_alone() -> None:
    """It takes no further requests, and an engine that stops on purpose is no outage."""
    one = pod("vllm-0")
    one["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
    assert read_pod(one, BY_PORT) is None


def test_what_one_pod_tells() -> None:
    one = pod("vllm-0", ip="10.1.2.3", port=8080)
    one["spec"]["containers"][0]["args"] += ["--max-num-seqs=64", "-tp", "2"]
    one["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "2", "cpu": "8"}
    found = engine(one)
    assert (found.namespace, found.pod, found.container) == ("ml", "vllm-0", "vllm")
    assert found.url == "http://10.1.2.3:8080"
    assert (found.args.max_num_seqs, found.args.tensor_parallel_size) == (64, 2)
    assert found.gpus == 2
    assert found.container_id == "vllm-0-vllm"


@pytest.mark.parametrize(
    ("limits", "gpus"),
    [({"nvidia.com/gpu": "8"}, 8), ({"nvidia.com/mig-1g.10gb": "1"}, 1), ({"cpu": "8"}, None), ({}, None), (None, None)],
)
def test_gpus_of_the_limits(limits: dict[str, str] | None, gpus: int | None) -> None:
    one = pod("vllm-0", containers=[container("vllm", port=8000, port_name="vllm", resources={"limits": limits})])
    assert engine(one).gpus == gpus


@pytest.mark.parametrize(
    ("args", "ports", "annotations", "url"),
    [
        ((), (), {}, "http://10.0.0.1:8000"),
        ((), (("vllm", 9000),), {}, "http://10.0.0.1:9000"),
        ((), (("http", 9000),), {}, "http://10.0.0.1:8000"),
        (("--port", "9100"), (("vllm", 9000),), {}, "http://10.0.0.1:9100"),
        (("--port", "9100"), (), {"kvcache-exporter.io/port": "9200"}, "http://10.0.0.1:9200"),
        (("--port", "9100"), (("api", 9300),), {"kvcache-exporter.io/port": "api"}, "http://10.0.0.1:9300"),
        (("--port", "$(PORT)"), (("vllm", 9000),), {}, "http://10.0.0.1:9000"),
        (("--ssl-keyfile", "k", "--ssl-certfile", "c"), (), {}, "https://10.0.0.1:8000"),
    ],
)
def test_address(args: tuple[str, ...], ports: tuple[tuple[str, int], ...], annotations: dict[str, str], url: str) -> None:
    one = pod(
        "vllm-0",
        ip="10.0.0.1",
        annotations={**SCRAPE, **annotations},
        containers=[
            {"name": "vllm", "args": list(args), "ports": [{"name": name, "containerPort": port} for name, port in ports]}
        ],
    )
    assert engine(one).url == url


def test_address_of_a_pod_with_ipv6() -> None:
    assert engine(pod("vllm-0", ip="fd00::7")).url == "http://[fd00::7]:8000"


@pytest.mark.parametrize(
    ("containers", "annotations", "chosen"),
    [
        ([container("proxy", port=80), container("vllm", port=8000, port_name="vllm")], {}, ["vllm"]),
        ([container("proxy"), container("engine", "--model", "m")], {}, ["engine"]),
        ([container("proxy", "vllm", "serve", "m"), container("b")], {"kvcache-exporter.io/container": "b"}, ["b"]),
        ([container("a", port=8000), container("b", port=8001, port_name="api")], {"kvcache-exporter.io/port": "api"}, ["b"]),
        # Prefill and decode beside each other: each is an engine.
        (
            [container("prefill", port=8000, port_name="vllm"), container("decode", port=8001, port_name="vllm")],
            {},
            ["prefill", "decode"],
        ),
    ],
)
def test_containers_that_are_engines(containers: list[dict[str, Any]], annotations: dict[str, str], chosen: list[str]) -> None:
    reading = read_pod(pod("p", annotations={**SCRAPE, **annotations}, containers=containers), BY_PORT)
    assert reading is not None
    assert [one.container for one in reading.engines] == chosen


@pytest.mark.parametrize(
    ("containers", "annotations", "problem"),
    [
        (
            [container("a"), container("b")],
            {},
            "which of its containers (a, b) is the engine cannot be told; kvcache-exporter.io/container has to name the engine's",
        ),
        (
            [container("a"), container("b")],
            {"kvcache-exporter.io/container": "vllm"},
            "it has no container 'vllm'; kvcache-exporter.io/container has to name the engine's",
        ),
        (
            [container("a")],
            {"kvcache-exporter.io/port": "api"},
            "the port of container a cannot be told; give it in kvcache-exporter.io/port",
        ),
        (
            [container("a", "--port", "$(PORT)")],
            {},
            "the port of container a cannot be told; give it in kvcache-exporter.io/port",
        ),
    ],
)
def test_engine_that_cannot_be_told(containers: list[dict[str, Any]], annotations: dict[str, str], problem: str) -> None:
    reading = read_pod(pod("p", annotations={**SCRAPE, **annotations}, containers=containers), BY_PORT)
    assert reading is not None
    assert (reading.engines, reading.problem) == ((), problem)


def test_annotation_has_the_last_word_on_arguments() -> None:
    one = pod("vllm-0", annotations={"kvcache-exporter.io/engine-args": "--max-num-seqs 32 --dtype half"})
    one["spec"]["containers"][0]["args"] += ["--max-num-seqs", "64", "-tp=2"]
    args = engine(one).args
    assert (args.max_num_seqs, args.dtype, args.tensor_parallel_size) == (32, "half", 2)


def test_annotation_does_not_show_what_the_image_starts() -> None:
    """A container without a command in sight is not vLLM's for what is said beside it, and no engine among several."""
    said = {**SCRAPE, "kvcache-exporter.io/engine-args": "--max-num-seqs 32"}
    args = engine(pod("vllm-0", annotations=said, containers=[container("vllm", port=8000)])).args
    assert (args.max_num_seqs, args.is_vllm) == (32, False)
    reading = read_pod(pod("p", annotations=said, containers=[container("proxy"), container("vllm", "--model", "m")]), BY_PORT)
    assert reading is not None
    assert [one.container for one in reading.engines] == ["vllm"]


def test_variables_of_the_container() -> None:
    one = pod("vllm-0")
    one["spec"]["containers"][0]["args"] += ["--max-num-seqs", "$(SEATS)", "--dtype=$(KIND)"]
    one["spec"]["containers"][0]["env"] = [
        {"name": "SEATS", "value": "48"},
        {"name": "KIND", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
    ]
    args = engine(one).args
    assert args.max_num_seqs == 48
    assert args.unknown == {"dtype": "$(KIND)"}


def test_model_config_of_the_annotation() -> None:
    assert engine(pod("p", annotations={"kvcache-exporter.io/model-config": "/models/m"})).model_config == "/models/m"
