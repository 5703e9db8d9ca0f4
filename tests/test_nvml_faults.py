"""Every way in which NVML is known to fail, from the start or in mid-run, and the way back: what a scrape shows then.

Two GPUs, A and B, and an engine on the real poller, with the scripted NVML library under the real pynvml. A row says, as long as
the fault lasts: whether NVML is up, of which GPUs there is memory, which GPUs are shown as lost (`?` for one that has not said
which it is), and which errors are counted. GPU memory and engine usage differ from poll to poll, so that a value of
a poll before would show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from fake_nvml import FakeNvml, Step
from kvcache_exporter.config import TargetConfig
from kvcache_exporter.sources.nvml import NvmlSource
from lab import Lab, Upstream, wait_until

TOTAL, RESERVED = 85520809984, 577765376
UUIDS = {"A": "GPU-aaaa", "B": "GPU-bbbb", "M": "MIG-bbbb", "?": ""}

Device = Mapping[str, Any]
Break = Callable[[Device, Device], Step]


@dataclass(frozen=True)
class Fault:
    """One row. A fault that was there before the first poll can lose GPUs that have not said who they are (`lost_at_start`).

    In mid-run, what is asked once in a session is known already (`errors_in_mid_run`).
    """

    step: Break
    up: int
    memory: str
    lost: str
    errors: str
    lost_at_start: str | None = None
    errors_in_mid_run: str | None = None

    def is_seen(self, since: str) -> tuple[str, set[str]]:
        """Return the lost GPUs, and the reasons of errors."""
        other_lost, other_errors = (self.lost_at_start, None) if since == "start" else (None, self.errors_in_mid_run)
        lost = self.lost if other_lost is None else other_lost
        errors = self.errors if other_errors is None else other_errors
        return lost, set(filter(None, [errors]))


def driver(error: str) -> Break:
    """The driver fails in whole: the open session ends, and another one does not begin."""
    return lambda a, b: {"init": f"NVML_ERROR_{error}", "count": f"NVML_ERROR_{error}", "devices": [a, b]}


def machine(**changes: object) -> Break:
    return lambda a, b: {"devices": [a, b], **changes}


def gpu_b(**changes: object) -> Break:
    """Only B differs; what is an upper-case word is an NVML error."""
    named = {key: f"NVML_ERROR_{value}" if str(value).isupper() else value for key, value in changes.items()}
    return lambda a, b: {"devices": [a, {**b, **named}]}


def v1_only(a: Device, b: Device) -> Step:
    memory = {key: size for key, size in b["memory_v2"].items() if key != "reserved"}
    return {"devices": [a, {**b, "memory_v1": memory, "memory_v2": "NVML_ERROR_UNKNOWN"}]}


def cut_b(a: Device, b: Device) -> Step:
    instance = {"uuid": UUIDS["M"], "name": "NVIDIA H100 80GB HBM3 MIG 7g.80gb", "memory_v2": b["memory_v2"]}
    return {"devices": [a, {**b, "mig": {"instances": [instance]}}]}


def only_b(_: Device, b: Device) -> Step:
    return {"devices": [{**b, "index": 0}]}


ZEROS = {"total": 0, "free": 0, "used": 0}

FAULTS = {
    "init unknown": Fault(driver("UNKNOWN"), 0, "", "", "unknown"),
    "driver not loaded": Fault(driver("DRIVER_NOT_LOADED"), 0, "", "", "driver_not_loaded"),
    "driver upgraded under us": Fault(driver("LIB_RM_VERSION_MISMATCH"), 0, "", "", "lib_rm_version_mismatch"),
    "no permission": Fault(driver("NO_PERMISSION"), 0, "", "", "no_permission"),
    "init of unknown code": Fault(driver("INSUFFICIENT_RESOURCES"), 0, "", "", "insufficient_resources"),
    "count unknown": Fault(machine(count="NVML_ERROR_UNKNOWN"), 0, "", "", "unknown"),
    "count hangs": Fault(machine(hang_seconds=60, on="nvmlDeviceGetCount"), 0, "", "", "hung"),
    "all calls unknown": Fault(machine(all_device_calls="NVML_ERROR_UNKNOWN"), 0, "", "", "unknown"),
    "session gone": Fault(machine(all_device_calls="NVML_ERROR_UNINITIALIZED"), 0, "", "", "uninitialized"),
    "all calls lost": Fault(machine(all_device_calls="NVML_ERROR_GPU_IS_LOST"), 1, "", "AB", "gpu_is_lost", "??"),
    "all hang": Fault(machine(hang_seconds=60), 0, "", "", "hung"),
    "all hang for their handles": Fault(machine(hang_seconds=60, on="nvmlDeviceGetHandleByIndex"), 0, "", "", "hung"),
    "no GPU is counted": Fault(machine(count=0), 1, "", "AB", "", ""),
    "B is not counted": Fault(machine(count=1), 1, "A", "B", "", ""),
    "A is gone and B moves up": Fault(only_b, 1, "B", "A", "", ""),
    "more are counted than there": Fault(machine(count=3), 1, "AB", "?", "not_supported"),
    "handle of B lost": Fault(gpu_b(handle_error="GPU_IS_LOST"), 1, "A", "B", "gpu_is_lost", "?"),
    "handle of B unknown": Fault(gpu_b(handle_error="UNKNOWN"), 1, "A", "B", "unknown", "?"),
    "handle of B hangs": Fault(gpu_b(hang_on="nvmlDeviceGetHandleByIndex"), 1, "A", "B", "hung", "?"),
    "uuid of B garbage": Fault(gpu_b(uuid=b"GPU-\xf8"), 1, "A", "B", "invalid_answer", "?"),
    "uuid of B unknown": Fault(gpu_b(uuid="UNKNOWN"), 1, "A", "B", "unknown", "?"),
    "uuid of B hangs": Fault(gpu_b(hang_on="nvmlDeviceGetUUID"), 1, "A", "B", "hung", "?"),
    "memory of B lost": Fault(gpu_b(memory_v2="GPU_IS_LOST"), 1, "A", "B", "gpu_is_lost"),
    "B needs a reset": Fault(gpu_b(memory_v2="RESET_REQUIRED"), 1, "A", "B", "reset_required"),
    "B not found": Fault(gpu_b(memory_v2="GPU_NOT_FOUND"), 1, "A", "B", "gpu_not_found"),
    "memory of B hangs": Fault(gpu_b(hang_on="nvmlDeviceGetMemoryInfo"), 1, "A", "B", "hung"),
    "memory of B fails": Fault(gpu_b(memory_v2="TIMEOUT"), 1, "A", "", "timeout"),
    "memory of B unknown": Fault(gpu_b(memory_v2="UNKNOWN", memory_v1="UNKNOWN"), 1, "A", "", "unknown"),
    "memory of B not supported": Fault(gpu_b(memory_v2="NOT_SUPPORTED"), 1, "A", "", "not_supported"),
    "memory of B 0 of 0": Fault(gpu_b(memory_v2="NOT_SUPPORTED", memory_v1=ZEROS), 1, "A", "", "not_supported"),
    "no memory v2 of B": Fault(v1_only, 1, "AB", "", ""),
    "name of B garbage": Fault(gpu_b(name_raises="UnicodeDecodeError"), 1, "AB", "", "invalid_answer", errors_in_mid_run=""),
    "utilization of B unknown": Fault(gpu_b(utilization="UNKNOWN"), 1, "AB", "", "unknown"),
    "throttling of B unknown": Fault(gpu_b(throttle="UNKNOWN"), 1, "AB", "", "unknown"),
    "ECC of B not supported": Fault(gpu_b(ecc_uncorrected="NOT_SUPPORTED"), 1, "AB", "", ""),
    "ECC of B in a bad inforom": Fault(gpu_b(ecc_uncorrected="CORRUPTED_INFOROM"), 1, "AB", "", "corrupted_inforom"),
    "processes of B not permitted": Fault(gpu_b(compute_processes="NO_PERMISSION"), 1, "AB", "", "no_permission"),
    "processes of B hang": Fault(gpu_b(hang_on="nvmlDeviceGetComputeRunningProcesses"), 1, "A", "B", "hung"),
    "MIG mode of B unknown": Fault(gpu_b(mig="UNKNOWN"), 1, "AB", "", "unknown"),
    "B is cut into instances": Fault(cut_b, 1, "AM", "", ""),
    "events not supported": Fault(machine(event_set="NVML_ERROR_NOT_SUPPORTED"), 1, "AB", "", ""),
    "driver of no optional figure": Fault(
        machine(functions_not_found=["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMigMode", "nvmlEventSetCreate"]),
        1,
        "AB",
        "",
        "",
    ),
}


class Scene:
    """A Lab whose GPUs and engine have other figures at each poll."""

    def __init__(self, upstream: Upstream, fake_nvml: FakeNvml) -> None:
        self._upstream = upstream
        self._nvml = fake_nvml
        self._polls = count(1)
        self._lab = Lab(
            TargetConfig(name="t", url=upstream.url), gpus=NvmlSource(device_timeout_seconds=0.2), poll_timeout_seconds=0.6
        )

    def poll(self, step: Break) -> None:
        """Poll a machine made of two sound GPUs."""
        self._poll = next(self._polls)
        self._upstream.page(b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} %f\n' % self._usage)
        self._nvml.show(step(self._gpu("A", 0), self._gpu("B", 1)))
        before = self._lab.errors("nvml")
        self._lab.poll()
        after = self._lab.errors("nvml")
        self.errors = {reason for reason, number in after.items() if number > before.get(reason, 0)}

    def expect(self, up: int, memory: str, lost: str) -> None:
        """Compare with what a scrape gets."""
        lab = self._lab
        assert lab.value("kvcache_usage_ratio") == self._usage
        assert lab.value("kvcache_up", source="vllm") == 1
        assert lab.value("kvcache_up", source="nvml") == up
        used = lab.samples("kvcache_gpu_memory_used_bytes")
        assert {dict(labels)["uuid"]: size for labels, size in used.items()} == {
            UUIDS[gpu]: self._used("B" if gpu == "M" else gpu) for gpu in memory
        }
        flags = lab.samples("kvcache_gpu_up")
        assert sorted(dict(labels)["uuid"] for labels, flag in flags.items() if not flag) == sorted(UUIDS[gpu] for gpu in lost)
        assert {UUIDS[gpu] for gpu in memory} <= {dict(labels)["uuid"] for labels, flag in flags.items() if flag}

    @property
    def _usage(self) -> float:
        return self._poll / 100

    def _used(self, gpu: str) -> int:
        return self._poll * 10**9 + ord(gpu)

    def _gpu(self, gpu: str, index: int) -> Device:
        used = self._used(gpu)
        memory = {"total": TOTAL, "reserved": RESERVED, "free": TOTAL - RESERVED - used, "used": used}
        return {
            "index": index,
            "uuid": UUIDS[gpu],
            "memory_v2": memory,
            "utilization": {"gpu": 50, "memory": 20},
            "throttle": [],
            "ecc_uncorrected": 0,
            "compute_processes": [{"pid": 100 + index, "usedGpuMemory": used}],
            "mig": "disabled",
        }


@pytest.fixture(scope="module")
def engine() -> Iterator[Upstream]:
    """One server for all rows: each says what it answers."""
    with Upstream() as server:
        yield server


@pytest.fixture
def scene(engine: Upstream, fake_nvml: FakeNvml) -> Scene:
    return Scene(engine, fake_nvml)


@pytest.mark.parametrize("since", ["start", "mid-run"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault(scene: Scene, fake_nvml: FakeNvml, name: str, since: str) -> None:
    """While it lasts the row holds, poll after poll; then all is as if it had not been. The engine's figures go on throughout."""
    fault = FAULTS[name]
    lost, errors = fault.is_seen(since)
    if since == "mid-run":
        scene.poll(machine())
        scene.expect(1, "AB", "")
    seen = set()
    for _ in range(2):
        scene.poll(fault.step)
        scene.expect(fault.up, fault.memory, lost)
        seen |= scene.errors
    assert seen == errors
    fake_nvml.show({})
    wait_until(lambda: not fake_nvml.hanging)
    scene.poll(machine())
    scene.expect(1, "AB", "")
    assert scene.errors == set()
