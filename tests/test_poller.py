"""GPUs in the tick: through the real pynvml and the scripted library, beside a target that goes on."""

from __future__ import annotations

import threading
import time

import pytest

from fake_nvml import FakeNvml, load_steps
from kvcache_exporter.config import TargetConfig
from kvcache_exporter.gpu_reading import GpuReading, NvmlReading
from kvcache_exporter.sources.nvml import NoNvmlLibraryError, NvmlSource
from lab import CASES, Lab, Upstream, lab_for

PAGE = b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
GPU = {
    "index": 0,
    "uuid": "GPU-aaaa",
    "name": "NVIDIA H100 80GB HBM3",
    "memory_v2": {"total": 85520809984, "reserved": 577765376, "free": 7864320000, "used": 77078724608},
}


def gpu_values(lab: Lab) -> dict[str, float | None]:
    names = ("memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes", "up")
    return {name: lab.value(f"kvcache_gpu_{name}", uuid="GPU-aaaa") for name in names}


def test_gpu_memory_and_identity(upstream: Upstream, fake_nvml: FakeNvml) -> None:
    fake_nvml.show({"driver": "570.86.15", "devices": [GPU]})
    upstream.page(PAGE)
    lab = lab_for(upstream, gpus=NvmlSource()).poll()
    assert gpu_values(lab) == {
        "memory_total_bytes": 85520809984,
        "memory_used_bytes": 77078724608,
        "memory_reserved_bytes": 577765376,
        "up": 1,
    }
    assert lab.samples("kvcache_gpu_info", name="NVIDIA H100 80GB HBM3", driver_version="570.86.15", gpu="0") != {}
    assert lab.value("kvcache_up", source="nvml") == 1


def test_machine_without_nvml_is_no_error(upstream: Upstream) -> None:
    """No library: no GPU series, no health of a source that does not exist, and the engine's figures as ever."""

    class NoLibrary:
        tries = 0

        def read(self) -> NvmlReading:
            self.tries += 1
            raise NoNvmlLibraryError("library_not_found", "NVML is not available on this machine")

    gpus = NoLibrary()
    upstream.page(PAGE)
    lab = lab_for(upstream, gpus=gpus).poll().poll()
    assert lab.value("kvcache_usage_ratio") == 0.5
    assert lab.value("kvcache_up", source="nvml") is None
    assert "kvcache_gpu" not in lab.text()
    assert gpus.tries == 1


def test_51_nvml_fails_and_recovers(upstream: Upstream, fake_nvml: FakeNvml) -> None:
    """While NVML fails no GPU value is shown, not even the last; the engine goes on; it recovers without a restart."""
    upstream.page(PAGE)
    lab = lab_for(upstream, gpus=NvmlSource())
    seen = []
    for step in load_steps(CASES / "51-nvml-unknown-after-daemon-reload" / "nvml.yaml"):
        fake_nvml.show(step)
        lab.poll()
        assert lab.value("kvcache_usage_ratio") == 0.5
        seen.append((lab.value("kvcache_up", source="nvml"), gpu_values(lab)["memory_used_bytes"]))
    assert seen == [(1, 77078724608), *[(0, None)] * 4, (1, 77078724608)]
    assert lab.errors("nvml") == {"unknown": 2, "lib_rm_version_mismatch": 1, "driver_not_loaded": 1}


def test_52_lost_gpu_keeps_its_labels(upstream: Upstream, fake_nvml: FakeNvml) -> None:
    upstream.page(PAGE)
    lab = lab_for(upstream, gpus=NvmlSource())
    lost = []
    for step in load_steps(CASES / "52-one-gpu-lost" / "nvml.yaml"):
        fake_nvml.show(step)
        lab.poll()
        lost.append(lab.samples("kvcache_gpu_up", uuid="GPU-0002"))
        memory = {dict(labels)["uuid"] for labels in lab.samples("kvcache_gpu_memory_used_bytes")}
        assert memory >= {"GPU-0000", "GPU-0001", "GPU-0003"}
    assert lost == [{(("gpu", "2"),): 1.0}, {(("gpu", "2"),): 0.0}, {(("gpu", "2"),): 0.0}]


def threads_of_nvml() -> int:
    return sum(thread.name.startswith("nvml") for thread in threading.enumerate())


def test_59_nvml_call_hangs(upstream: Upstream, fake_nvml: FakeNvml) -> None:
    """A call that never returns takes its own values away and nothing else: no second thread, no late engine figure."""
    steps = load_steps(CASES / "59-nvml-call-hangs" / "nvml.yaml")
    upstream.page(PAGE)
    lab = Lab(TargetConfig(name="t", url=upstream.url), gpus=NvmlSource(), poll_timeout_seconds=0.1)
    fake_nvml.show(steps[0])
    assert gpu_values(lab.poll())["memory_used_bytes"] == 77078724608
    fake_nvml.show(steps[1])
    lab.poll()
    threads = threads_of_nvml()
    assert threads >= 1, "the call hangs"
    for _ in range(3):
        started = time.monotonic()
        lab.poll()
        lab.text()
        assert time.monotonic() - started < 1
        assert gpu_values(lab) == dict.fromkeys(gpu_values(lab))
        assert lab.value("kvcache_usage_ratio") == 0.5
        assert threads_of_nvml() <= threads
    assert lab.value("kvcache_up", source="nvml") == 0
    assert lab.errors("nvml") == {"hung": 1}

    fake_nvml.show(steps[0])
    deadline = time.monotonic() + 10
    while gpu_values(lab.poll())["memory_used_bytes"] is None:
        assert time.monotonic() < deadline


def test_defect_in_one_source_stops_nothing_else(upstream: Upstream) -> None:
    class Defect:
        def read(self) -> NvmlReading:
            raise ZeroDivisionError("oops")

    upstream.page(PAGE)
    lab = lab_for(upstream, gpus=Defect()).poll()
    assert lab.value("kvcache_usage_ratio") == 0.5
    assert lab.errors("nvml") == {"internal": 1}


@pytest.mark.parametrize("reading", [NvmlReading(gpus=()), NvmlReading(gpus=(GpuReading("GPU-x", 0, None),))])
def test_gpu_without_figures_has_no_memory_series(upstream: Upstream, reading: NvmlReading) -> None:
    class Gpus:
        def read(self) -> NvmlReading:
            return reading

    upstream.page(PAGE)
    lab = lab_for(upstream, gpus=Gpus()).poll()
    assert "kvcache_gpu_memory" not in lab.text()
    assert len(lab.samples("kvcache_gpu_up")) == len(reading.gpus)


def test_run_ticks_at_the_interval_and_stops_at_once(upstream: Upstream) -> None:
    """A tick that overruns is followed by the next whole one, not by a burst that makes up for it."""
    upstream.page(PAGE)
    lab = Lab(TargetConfig(name="t", url=upstream.url), poll_interval_seconds=0.3, poll_timeout_seconds=0.2)
    stop = threading.Event()
    thread = threading.Thread(target=lab.poller.run, args=(stop,))
    started = time.monotonic()
    thread.start()
    time.sleep(1.05)
    stop.set()
    thread.join(timeout=1)
    assert not thread.is_alive()
    pages = [path for path, _ in upstream.requests].count("/metrics")
    assert 2 <= pages <= (time.monotonic() - started) / 0.3 + 1


def test_errors_of_single_devices_are_counted(upstream: Upstream) -> None:
    class Gpus:
        def read(self) -> NvmlReading:
            return NvmlReading(gpus=(), device_errors={"gpu_is_lost": 2})

    upstream.page(PAGE)
    assert lab_for(upstream, gpus=Gpus()).poll().poll().errors("nvml") == {"gpu_is_lost": 4}
