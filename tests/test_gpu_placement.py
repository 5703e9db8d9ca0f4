"""Engines on GPUs, from the real NVML bindings, the kubelet's real protocol and real processes to the exposition text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fake_nvml import FakeNvml, load_steps
from kvcache_exporter.config import TargetConfig
from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_owners import ContainerGpus
from kvcache_exporter.sources.nvml import NvmlSource
from kvcache_exporter.sources.pod_resources import PodResources
from kvcache_exporter.sources.processes import ProcessTable
from lab import CASES, LLAMA_8B, Lab, Upstream, models_answer
from pod_resources_server import KubeletServer, Pod

GIB = 1024**3
MIB = 1024**2
TOTAL, RESERVED = 85_520_809_984, 577_765_376
# Llama-3.1-8B in 16 bits: its parameters, and 2 MiB a block of 16 tokens.
WEIGHTS = 16_060_522_496
BLOCKS = 20_000
POOL = BLOCKS * 2 * MIB
USED = WEIGHTS + POOL + 3 * GIB
FREE = TOTAL - RESERVED - USED
OURS = os.getpid()
"""The scripted engine is in this very process, so this is the engine's pid to whoever looks up its port."""


def device(index: int, *, used: int = USED, pids: Mapping[int, int] | None = None, **more: object) -> dict[str, Any]:
    memory = {"total": TOTAL, "reserved": RESERVED, "free": TOTAL - RESERVED - used, "used": used}
    processes = [{"pid": pid, "usedGpuMemory": size} for pid, size in (pids or {}).items()]
    return {"index": index, "uuid": f"GPU-{index}", "memory_v2": memory, "compute_processes": processes, **more}


def page(*engines: str, steps: int = 0, usage: float = 0.0, awake: int = 1) -> bytes:
    """A page of some data-parallel engines; the label num_gpu_blocks is the sum over them, as vLLM writes it."""
    lines = []
    for engine in engines or ("0",):
        labels = f'engine="{engine}",model_name="m"'
        lines += [
            f"vllm:kv_cache_usage_perc{{{labels}}} {usage}",
            f"vllm:iteration_tokens_total_count{{{labels}}} {steps}",
            f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}} {awake}',
            f'vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="{engine}",kv_cache_memory_bytes="None",'
            f'num_gpu_blocks="{BLOCKS * max(1, len(engines))}"}} 1.0',
        ]
    return "\n".join(lines).encode() + b"\n"


class Labs:
    """Makes labs whose NVML is closed at the end."""

    def __init__(self, stack: ExitStack, upstream: Upstream) -> None:
        self._stack = stack
        self.upstream = upstream

    def lab(self, *targets: TargetConfig, processes: bool = False, **settings: Any) -> Lab:
        nvml = NvmlSource()
        self._stack.callback(nvml.close)
        return Lab(*targets, gpus=nvml, processes=ProcessTable() if processes else None, **settings)

    def target(self, name: str = "t", **settings: Any) -> TargetConfig:
        return TargetConfig(name=name, url=self.upstream.url, **{"model_config": LLAMA_8B, **settings})


@pytest.fixture
def labs(upstream: Upstream, fake_nvml: FakeNvml) -> Iterator[Labs]:
    upstream.page(page(), models=models_answer(8192, name="m"))
    with ExitStack() as stack:
        yield Labs(stack, upstream)


def split(lab: Lab, uuid: str = "GPU-0") -> dict[str, float]:
    """The components of one GPU; they add up to the total that is shown beside them."""
    samples = lab.samples("kvcache_gpu_memory_component_bytes", uuid=uuid)
    components = {dict(labels)["component"]: size for labels, size in samples.items()}
    assert sum(components.values()) == lab.samples("kvcache_gpu_memory_total_bytes", uuid=uuid).popitem()[1]
    return components


def split_of(lab: Lab, uuid: str = "GPU-0") -> dict[str, float]:
    """As `split`, without the frame that NVML gives."""
    return {name: size for name, size in split(lab, uuid).items() if name not in ("reserved", "free")}


def owners(lab: Lab) -> list[tuple[str, str, str]]:
    """(engine, GPU, method) of each join."""
    samples = [dict(labels) for labels in lab.samples("kvcache_engine_gpu_info")]
    return sorted((labels["engine"], labels["uuid"], labels["method"]) for labels in samples)


def test_configured_engine_shows_its_parts_and_what_cannot_be_told(labs: Labs, fake_nvml: FakeNvml) -> None:
    fake_nvml.show({"devices": [device(0), device(1, used=0)]})
    lab = labs.lab(labs.target(gpus=("GPU-0",))).poll()
    assert owners(lab) == [("0", "GPU-0", "configured")]
    assert split(lab) == {"weights": WEIGHTS, "kv_cache": POOL, "unknown": 3 * GIB, "reserved": RESERVED, "free": FREE}
    assert split_of(lab, "GPU-1") == {"unknown": 0}
    assert lab.samples("kvcache_engine_info", weights_source="computed") != {}


def test_process_that_holds_the_memory_names_the_gpu_and_splits_it_whole(labs: Labs, fake_nvml: FakeNvml) -> None:
    """The first poll tells the pids, the second has looked them up."""
    engine = WEIGHTS + POOL + 2 * GIB
    fake_nvml.show({"devices": [device(0, used=0), device(1, pids={OURS: engine, 1: GIB // 2})]})
    lab = labs.lab(labs.target(), processes=True).poll()
    assert split_of(lab, "GPU-1") == {"unknown": USED}
    lab.poll()
    assert owners(lab) == [("0", "GPU-1", "process")]
    assert split_of(lab, "GPU-1") == {"weights": WEIGHTS, "kv_cache": POOL, "other_processes": GIB // 2, "overhead": 2.5 * GIB}
    assert split_of(lab, "GPU-0") == {"other_processes": 0}
    assert lab.value("kvcache_up", source="processes") == 1


def test_engine_that_leaves_its_gpu_leaves_nothing_behind(labs: Labs, fake_nvml: FakeNvml) -> None:
    fake_nvml.show({"devices": [device(0, pids={OURS: USED})]})
    lab = labs.lab(labs.target(), processes=True).poll().poll()
    assert owners(lab) == [("0", "GPU-0", "process")]
    fake_nvml.show({"devices": [device(0, used=MIB)]})
    for _ in range(2):
        lab.poll()
        assert owners(lab) == []
        assert split_of(lab) == {"unknown": MIB}


def test_eight_gpus_of_one_engine(labs: Labs, fake_nvml: FakeNvml) -> None:
    """Tensor parallel over 8: each holds an eighth of the pool, and the weights that vLLM keeps on each rank."""
    fake_nvml.show({"devices": [device(index, used=20 * GIB) for index in range(8)]})
    lab = labs.lab(labs.target(gpus=tuple("01234567"), tensor_parallel_size=8)).poll()
    assert owners(lab) == [("0", f"GPU-{index}", "configured") for index in range(8)]
    for index in range(8):
        parts = split_of(lab, f"GPU-{index}")
        assert parts["kv_cache"] == POOL // 8
        assert WEIGHTS / 8 <= parts["weights"] < 1.001 * WEIGHTS / 8


def test_pipeline_stages_hold_what_is_theirs(labs: Labs, fake_nvml: FakeNvml) -> None:
    fake_nvml.show({"devices": [device(0), device(1)]})
    lab = labs.lab(labs.target(gpus=("1", "0"), pipeline_parallel_size=2)).poll()
    first, last = split_of(lab, "GPU-1"), split_of(lab, "GPU-0")
    assert first["kv_cache"] == last["kv_cache"] == POOL // 2
    # Embedding table and head are of one size here; the last stage has the final norm.
    assert last["weights"] - first["weights"] == 4096 * 2
    assert first["weights"] + last["weights"] == WEIGHTS


def test_data_parallel_engines_take_their_gpus_in_order(labs: Labs, fake_nvml: FakeNvml) -> None:
    labs.upstream.page(page("0", "1"), models=models_answer(8192, name="m"))
    fake_nvml.show({"devices": [device(0), device(1)]})
    lab = labs.lab(labs.target(gpus=("1", "0"))).poll()
    assert owners(lab) == [("0", "GPU-1", "configured"), ("1", "GPU-0", "configured")]
    assert split_of(lab, "GPU-0")["kv_cache"] == split_of(lab, "GPU-1")["kv_cache"] == POOL


def test_two_engines_on_one_gpu_add_up(labs: Labs, fake_nvml: FakeNvml) -> None:
    fake_nvml.show({"devices": [device(0, used=79 * GIB)]})
    small = {"model_config": {**LLAMA_8B, "num_hidden_layers": 2}, "gpus": ("0",)}
    lab = labs.lab(labs.target("a", **small), labs.target("b", **small)).poll()
    assert split_of(lab)["kv_cache"] == 2 * POOL // 16
    for name in ("a", "b"):
        assert len(lab.samples("kvcache_engine_gpu_info", target=name, uuid="GPU-0")) == 1


def test_engine_in_a_mig_instance(labs: Labs, fake_nvml: FakeNvml) -> None:
    """The instance has the memory, its parent none: a sum over GPUs counts nothing twice."""
    memory = {"total": 40 * GIB, "reserved": 0, "free": 40 * GIB - 38 * GIB, "used": 38 * GIB}
    instance = {"uuid": "MIG-a", "name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "memory_v2": memory}
    fake_nvml.show({"devices": [device(0, mig={"instances": [instance]})]})
    small = {**LLAMA_8B, "num_hidden_layers": 2}
    lab = labs.lab(labs.target(gpus=("MIG-a",), model_config=small)).poll()
    assert owners(lab) == [("0", "MIG-a", "configured")]
    assert split_of(lab, "MIG-a")["kv_cache"] == POOL // 16
    assert sum(lab.samples("kvcache_gpu_memory_total_bytes").values()) == 40 * GIB
    assert lab.samples("kvcache_gpu_info", mig_profile="3g.40gb", parent_uuid="GPU-0", uuid="MIG-a") != {}
    assert lab.value("kvcache_gpus") == 1


def test_sleeping_engine_has_given_back_what_its_page_does_not_tell(labs: Labs, fake_nvml: FakeNvml) -> None:
    labs.upstream.page(page(awake=0), models=models_answer(8192, name="m"))
    fake_nvml.show({"devices": [device(0, used=3 * GIB)]})
    assert split_of(labs.lab(labs.target(gpus=("0",))).poll()) == {"unknown": 3 * GIB}


def test_parts_that_cannot_be_are_withdrawn_and_counted(labs: Labs, fake_nvml: FakeNvml) -> None:
    """An engine that quantized its weights while loading holds less than config.json says."""
    fake_nvml.show({"devices": [device(0, used=POOL + 9 * GIB)]})
    lab = labs.lab(labs.target(gpus=("0",))).poll()
    assert split_of(lab) == {"unknown": POOL + 9 * GIB}
    assert lab.errors("nvml") == {"split_exceeds_used": 1}

    lab = labs.lab(labs.target(gpus=("0",), weight_bytes_per_gpu=9 * GIB)).poll()
    assert split_of(lab) == {"weights": 9 * GIB, "kv_cache": POOL, "unknown": 0}
    assert lab.samples("kvcache_engine_info", weights_source="configured") != {}


def test_index_names_the_gpu_that_it_named_at_first(labs: Labs, fake_nvml: FakeNvml) -> None:
    """Case 52: when a GPU falls off the bus, those behind it move up."""
    fake_nvml.show({"devices": [device(0), device(1)]})
    lab = labs.lab(labs.target(gpus=("1",))).poll()
    moved = {**device(0), "uuid": "GPU-1"}
    fake_nvml.show({"devices": [moved]})
    lab.poll()
    assert owners(lab) == [("0", "GPU-1", "configured")]
    assert split_of(lab, "GPU-1")["kv_cache"] == POOL


def test_engine_whose_page_fails_has_no_gpu(labs: Labs, fake_nvml: FakeNvml) -> None:
    """Its memory is there, and nothing says any more what it is."""
    fake_nvml.show({"devices": [device(0)]})
    lab = labs.lab(labs.target(gpus=("0",))).poll()
    labs.upstream.replies = {}
    lab.poll()
    assert owners(lab) == []
    assert split_of(lab) == {"unknown": USED}


def test_bandwidth_is_that_of_the_steps_between_two_pages(labs: Labs, fake_nvml: FakeNvml) -> None:
    fake_nvml.show({"devices": [device(0, memory_clock_mhz=2619, bus_width_bits=5120)]})
    lab = labs.lab(labs.target(gpus=("0",))).poll()
    assert lab.samples("kvcache_memory_bandwidth_utilization_ratio") == {}
    assert lab.value("kvcache_gpu_memory_bandwidth_peak_bytes_per_second") == pytest.approx(3.352e12, rel=1e-3)
    labs.upstream.page(page(steps=500, usage=0.5), models=models_answer(8192, name="m"))
    lab.poll()
    # 100 steps a second, each with all weights but the embedding table, and a quarter of the pool: the mean of 0 and a half.
    per_step = WEIGHTS - 128_256 * 4096 * 2 + 5000 * 2 * MIB
    expected = 100 * per_step / (2.619e9 * 2 * 5120 / 8)
    assert lab.value("kvcache_memory_bandwidth_utilization_ratio", source="computed") == pytest.approx(expected, rel=1e-3)


# --- which GPUs are shown


def test_77_sidecar_shows_only_the_gpus_of_its_engine(labs: Labs, fake_nvml: FakeNvml) -> None:
    (step,) = load_steps(CASES / "77-sidecar-sees-all-gpus" / "nvml.yaml")
    fake_nvml.show(step)
    lab = labs.lab(labs.target(), show_gpus=("GPU-bbbb",)).poll()
    assert {dict(labels)["uuid"] for labels in lab.samples("kvcache_gpu_up")} == {"GPU-bbbb"}
    assert {dict(labels)["uuid"] for labels in lab.samples("kvcache_gpu_memory_used_bytes")} == {"GPU-bbbb"}
    assert lab.value("kvcache_gpus") == 1


def test_77_machine_that_shows_no_gpu_says_so(labs: Labs, fake_nvml: FakeNvml) -> None:
    """NVML works in a container that was given no GPU; that is a state to see, not silence."""
    lab = labs.lab(labs.target()).poll()
    assert (lab.value("kvcache_up", source="nvml"), lab.value("kvcache_gpus")) == (1, 0)
    lab = labs.lab(labs.target(), show_gpus=("GPU-bbbb", "3")).poll()
    assert {dict(labels)["uuid"]: up for labels, up in lab.samples("kvcache_gpu_up").items()} == {"GPU-bbbb": 0, "": 0}
    assert lab.value("kvcache_gpus") == 0


def test_shown_gpu_that_is_chosen_by_index_keeps_its_identity(labs: Labs, fake_nvml: FakeNvml) -> None:
    fake_nvml.show({"devices": [device(0), device(1)]})
    lab = labs.lab(labs.target(), show_gpus=("1",)).poll()
    fake_nvml.show({"devices": [{**device(0), "uuid": "GPU-1"}]})
    lab.poll()
    assert {dict(labels)["uuid"]: up for labels, up in lab.samples("kvcache_gpu_up").items()} == {"GPU-1": 1}


# --- the kubelet


POD = Pod("ml", "llama-0", {"vllm": [("nvidia.com/gpu", ["GPU-1"])], "sidecar": []})


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletServer]:
    with KubeletServer(tmp_path) as server:
        server.pods = [POD]
        yield server


def kubelet_lab(labs: Labs, socket_path: Path) -> Lab:
    target = labs.target(pod="ml/llama-0")
    return labs.lab(target, pod_resources=PodResources(socket_path, timeout_seconds=0.5), poll_timeout_seconds=0.5)


def test_kubelet_joins_pods_and_gpus_and_follows_them(labs: Labs, fake_nvml: FakeNvml, kubelet: KubeletServer) -> None:
    fake_nvml.show({"devices": [device(0), device(1, minor_number=5)]})
    lab = kubelet_lab(labs, kubelet.socket).poll()
    assert owners(lab) == [("0", "GPU-1", "pod_resources")]
    assert split_of(lab, "GPU-1")["kv_cache"] == POOL
    assert lab.value("kvcache_up", source="pod_resources") == 1
    kubelet.pods = [Pod("ml", "llama-0", {"vllm": [("nvidia.com/gpu", ["GPU-0::1"])]})]
    assert owners(lab.poll()) == [("0", "GPU-0", "pod_resources")]
    kubelet.pods = [Pod("ml", "llama-0", {"vllm": [("nvidia.com/gpu", ["nvidia5"])]})]
    assert owners(lab.poll()) == [("0", "GPU-1", "pod_resources")]
    kubelet.pods = []
    assert owners(lab.poll()) == []


def engine_and_gpu_series_go_on(lab: Lab) -> None:
    assert lab.value("kvcache_up", source="vllm") == 1
    assert lab.value("kvcache_capacity_blocks") == BLOCKS - 1
    assert lab.value("kvcache_gpu_memory_used_bytes") == USED
    assert split_of(lab) == {"unknown": USED}
    assert owners(lab) == []


class DeniedKubelet:
    """What `PodResources` does where the socket may not be opened (tests/test_pod_resources.py); root may open every socket."""

    def list(self) -> tuple[ContainerGpus, ...]:
        raise SourceError("no_permission", "the kubelet's socket may not be opened")


def test_kubelet_that_may_not_be_asked_stops_nothing_else(labs: Labs, fake_nvml: FakeNvml) -> None:
    fake_nvml.show({"devices": [device(0)]})
    lab = labs.lab(labs.target(pod="ml/llama-0"), pod_resources=DeniedKubelet()).poll()
    engine_and_gpu_series_go_on(lab)
    assert lab.errors("pod_resources") == {"no_permission": 1}


def test_missing_kubelet_stops_nothing_else(labs: Labs, fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.show({"devices": [device(0)]})
    lab = kubelet_lab(labs, tmp_path / "kubelet.sock").poll()
    engine_and_gpu_series_go_on(lab)
    assert lab.errors("pod_resources") == {"missing": 1}


def test_silent_kubelet_stops_nothing_else(labs: Labs, fake_nvml: FakeNvml, kubelet: KubeletServer) -> None:
    fake_nvml.show({"devices": [device(0)]})
    kubelet.delay_seconds = 60.0
    lab = kubelet_lab(labs, kubelet.socket)
    for _ in range(2):
        lab.poll()
        engine_and_gpu_series_go_on(lab)
    assert lab.errors("pod_resources") == {"timeout": 2}


def test_kubelet_that_comes_back_is_read_again(labs: Labs, fake_nvml: FakeNvml, kubelet: KubeletServer) -> None:
    fake_nvml.show({"devices": [device(0), device(1)]})
    lab = kubelet_lab(labs, kubelet.socket).poll()
    kubelet.stop()
    assert owners(lab.poll()) == []
    kubelet.start()
    assert owners(lab.poll()) == [("0", "GPU-1", "pod_resources")]
