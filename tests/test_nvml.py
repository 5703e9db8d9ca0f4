"""The NVML source, through the real pynvml and a scripted libnvidia-ml.so.1."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from fake_nvml import FakeNvml, Step, load_steps
from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_reading import THROTTLE_REASONS, GpuProcess, GpuReading, MigInstance
from kvcache_exporter.sources.nvml import NvmlSource, bindings
from kvcache_exporter.sources.nvml.bindings import describe_bindings
from kvcache_exporter.sources.nvml.reader import DeviceReader
from lab import wait_until

CASES = Path(__file__).with_name("data") / "cases"

TOTAL, RESERVED, FREE, USED = 85520809984, 577765376, 7864320000, 77078724608
MEMORY_V1 = {"total": TOTAL, "free": FREE, "used": USED + RESERVED}
MEMORY_V2 = {"total": TOTAL, "reserved": RESERVED, "free": FREE, "used": USED}


PROCESS = {"pid": 7, "usedGpuMemory": 5}
FIGURES: Mapping[str, Any] = {
    "utilization": {"gpu": 97, "memory": 61},
    "memory_clock_mhz": 2619,
    "bus_width_bits": 5120,
    "throttle": ["SwPowerCap", "GpuIdle"],
    "ecc_uncorrected": 3,
    "compute_processes": [{"pid": 4712, "usedGpuMemory": 500_000_000}, {"pid": 4711, "usedGpuMemory": 76_000_000_000}],
    "graphics_processes": [],
    "mps_processes": [],
}


def steps_of(case: str) -> list[Step]:
    return load_steps(CASES / case / "nvml.yaml")


def gpu(index: int, uuid: str, **changes: object) -> Mapping[str, Any]:
    return {"index": index, "uuid": uuid, "memory_v2": MEMORY_V2, **changes}


def expected(index: int, uuid: str, name: str | None = "NVIDIA H100 80GB HBM3") -> GpuReading:
    return GpuReading(uuid, index, name, TOTAL, USED, RESERVED)


@pytest.fixture
def source(fake_nvml: FakeNvml) -> Iterator[NvmlSource]:
    source = NvmlSource()
    yield source
    source.close()


def test_two_gpus_give_identity_memory_and_driver_version(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"driver": "570.86.15", "devices": [gpu(0, "GPU-aaaa"), gpu(1, "GPU-bbbb", name="NVIDIA L4")]})
    reading = source.read()
    assert reading.gpus == (expected(0, "GPU-aaaa"), expected(1, "GPU-bbbb", "NVIDIA L4"))
    assert reading.driver_version == "570.86.15"
    assert reading.device_errors == {}


def test_machine_without_gpus_is_an_empty_reading(source: NvmlSource) -> None:
    assert source.read().gpus == ()


def test_one_session_serves_all_reads_and_close_ends_it(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    before = fake_nvml.init_calls
    for _ in range(3):
        source.read()
    assert (fake_nvml.init_calls - before, fake_nvml.sessions) == (1, 1)
    source.close()
    source.close()
    assert fake_nvml.sessions == 0


def test_case_51_driver_errors_keep_their_names_and_the_gpus_come_back(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """No stale figures while NVML fails, at most one nvmlInit per read, and the same GPU under the same labels afterwards."""
    outcomes: list[str | tuple[GpuReading, ...]] = []
    for step in steps_of("51-nvml-unknown-after-daemon-reload"):
        fake_nvml.show(step)
        before = fake_nvml.init_calls
        try:
            outcomes.append(source.read().gpus)
        except SourceError as error:
            outcomes.append(error.reason)
        assert fake_nvml.init_calls - before <= 1
    present = (expected(0, "GPU-aaaa"),)
    assert outcomes == [present, "unknown", "unknown", "lib_rm_version_mismatch", "driver_not_loaded", present]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("NVML_ERROR_UNKNOWN", "restarting the container"),
        ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", "restart the exporter"),
        ("NVML_ERROR_DRIVER_NOT_LOADED", "kernel driver is not loaded"),
        ("NVML_ERROR_TIMEOUT", "NVML: nvmlInit failed: timeout"),
    ],
)
def test_failed_init_is_one_sentence_that_says_what_to_do(
    fake_nvml: FakeNvml, source: NvmlSource, error: str, advice: str
) -> None:
    fake_nvml.show({"init": error})
    with pytest.raises(SourceError, match=advice) as caught:
        source.read()
    assert caught.value.reason == error.removeprefix("NVML_ERROR_").lower()
    assert "\n" not in str(caught.value)


def test_failed_device_count_starts_a_new_session_at_the_next_read(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"count": "NVML_ERROR_UNKNOWN"})
    with pytest.raises(SourceError, match="nvmlDeviceGetCount failed") as caught:
        source.read()
    assert caught.value.reason == "unknown"
    assert fake_nvml.sessions == 0
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa")]})
    assert source.read().gpus == (expected(0, "GPU-aaaa"),)


def test_session_ended_by_other_code_of_the_process_is_started_again(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    source.read()
    pynvml.nvmlShutdown()
    with pytest.raises(SourceError) as caught:
        source.read()
    assert caught.value.reason == "uninitialized"
    source.read()
    assert fake_nvml.sessions == 1


def test_failed_shutdown_does_not_pile_up_sessions(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """NVML counts nvmlInit calls: a session that could not be ended must be ended before another is started."""
    source.read()
    fake_nvml.show({"count": "NVML_ERROR_UNKNOWN", "shutdown": "NVML_ERROR_UNKNOWN"})
    for _ in range(3):
        with pytest.raises(SourceError):
            source.read()
    assert fake_nvml.sessions == 1
    fake_nvml.show({"count": "NVML_ERROR_UNKNOWN"})
    with pytest.raises(SourceError):
        source.read()
    assert fake_nvml.sessions == 0


def test_case_52_lost_gpu_is_told_by_uuid_until_it_returns(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """One bad handle hides no other GPU, indexes that move change no identity, and the flag clears when the GPU works again."""
    steps = steps_of("52-one-gpu-lost")
    lost = GpuReading("GPU-0002", 2, "NVIDIA H100 80GB HBM3", lost=True)

    fake_nvml.show(steps[0])
    assert source.read().gpus == tuple(expected(index, f"GPU-000{index}") for index in range(4))

    fake_nvml.show(steps[1])
    reading = source.read()
    assert reading.gpus == (expected(0, "GPU-0000"), expected(1, "GPU-0001"), expected(3, "GPU-0003"), lost)
    assert reading.device_errors == {"gpu_is_lost": 1}

    fake_nvml.show(steps[2])
    for _ in range(2):
        reading = source.read()
        assert reading.gpus == (expected(0, "GPU-0000"), expected(1, "GPU-0001"), expected(2, "GPU-0003"), lost)
        assert reading.device_errors == {}

    fake_nvml.show(steps[0])
    assert source.read().gpus == tuple(expected(index, f"GPU-000{index}") for index in range(4))


def test_gpu_lost_on_a_memory_call_is_lost_and_no_failure_of_nvml(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", memory_v2="NVML_ERROR_GPU_IS_LOST")]})
    reading = source.read()
    assert reading.gpus == (GpuReading("GPU-aaaa", 0, "NVIDIA H100 80GB HBM3", lost=True),)
    assert reading.device_errors == {"gpu_is_lost": 1}


def test_lost_gpus_are_remembered_across_sessions(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa"), gpu(1, "GPU-bbbb")]})
    source.read()
    fake_nvml.show({"count": "NVML_ERROR_UNKNOWN"})
    with pytest.raises(SourceError):
        source.read()
    fake_nvml.show({"devices": [gpu(0, "GPU-bbbb")]})
    assert source.read().gpus == (expected(0, "GPU-bbbb"), GpuReading("GPU-aaaa", 0, "NVIDIA H100 80GB HBM3", lost=True))


def test_unknown_error_of_one_gpu_leaves_the_others(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"devices": [{"index": 0, "handle_error": "NVML_ERROR_UNKNOWN"}, gpu(1, "GPU-bbbb")]})
    reading = source.read()
    assert reading.gpus == (expected(1, "GPU-bbbb"), GpuReading("", 0, lost=True))
    assert reading.device_errors == {"unknown": 1}


def test_case_53_unified_memory_has_no_memory_figures(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """Neither NOT_SUPPORTED nor 0 of 0 bytes is a measurement; the rest of the GPU is there, and the reason is counted."""
    for step in steps_of("53-unified-memory-not-supported"):
        fake_nvml.show(step)
        reading = source.read()
        assert reading.gpus == (GpuReading("GPU-gb10", 0, "NVIDIA GB10", utilization_ratio=0.37, memory_utilization_ratio=0.0),)
        assert reading.device_errors == {"not_supported": 1}


def test_case_55_used_memory_includes_the_reserved_part_only_without_v2(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """Figures of v1 and v2 are never mixed: without v2, reserved is absent and used is the larger figure of v1."""
    with_v2, without_v2 = steps_of("55-memory-v1-v2-reserved")
    fake_nvml.show(with_v2)
    first = source.read()
    fake_nvml.show(without_v2)
    second = source.read()
    assert (first.gpus[0].memory_used_bytes, first.gpus[0].memory_reserved_bytes) == (77078724608, 577765376)
    assert (second.gpus[0].memory_used_bytes, second.gpus[0].memory_reserved_bytes) == (77656489984, None)
    assert first.gpus[0].memory_total_bytes == second.gpus[0].memory_total_bytes == 85520809984
    assert (first.driver_version, second.driver_version) == ("550.90.07", "470.42.01")
    assert second.device_errors == {}


@pytest.mark.parametrize("error", ["NVML_ERROR_UNKNOWN", "NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_ARGUMENT_VERSION_MISMATCH"])
def test_other_ways_of_having_no_memory_v2_fall_back_to_v1(fake_nvml: FakeNvml, source: NvmlSource, error: str) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", memory_v1=MEMORY_V1, memory_v2=error)]})
    reading = source.read()
    assert reading.gpus == (GpuReading("GPU-aaaa", 0, "NVIDIA H100 80GB HBM3", TOTAL, USED + RESERVED),)
    assert reading.device_errors == {}


def test_other_errors_of_memory_v2_are_not_covered_up_with_v1(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", memory_v1=MEMORY_V1, memory_v2="NVML_ERROR_TIMEOUT")]})
    reading = source.read()
    assert reading.gpus == (GpuReading("GPU-aaaa", 0, "NVIDIA H100 80GB HBM3"),)
    assert reading.device_errors == {"timeout": 1}


def test_case_56_names_in_bytes_text_and_garbage(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """The same name however it is stored; one that pynvml cannot decode is absent, and the GPU is reported all the same."""
    as_bytes, as_text, garbage = steps_of("56-name-bytes-str-garbage")
    for step, name, errors in (
        (as_bytes, "NVIDIA H100 80GB HBM3", {}),
        (as_text, "NVIDIA H100 80GB HBM3", {}),
        (garbage, None, {"invalid_answer": 1}),
    ):
        fake_nvml.show({**step, "devices": [{**step["devices"][0], "memory_v2": MEMORY_V2}]})
        reading = source.read()
        assert reading.gpus == (expected(0, "GPU-aaaa", name),)
        assert reading.device_errors == errors
        # The name is asked once in a session.
        source.close()


def test_gpu_whose_uuid_is_not_text_hides_no_other_gpu(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"devices": [{"index": 0, "uuid": b"GPU-\xf8"}, gpu(1, "GPU-bbbb")]})
    reading = source.read()
    assert reading.gpus == (expected(1, "GPU-bbbb"), GpuReading("", 0, lost=True))
    assert reading.device_errors == {"invalid_answer": 1}


def test_every_figure_of_a_gpu(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", **FIGURES)]})
    reading = source.read()
    assert reading.gpus == (
        GpuReading(
            "GPU-aaaa",
            0,
            "NVIDIA H100 80GB HBM3",
            TOTAL,
            USED,
            RESERVED,
            utilization_ratio=0.97,
            memory_utilization_ratio=0.61,
            max_memory_clock_hertz=2_619_000_000,
            memory_bus_width_bits=5120,
            throttle_reasons=frozenset({"power_cap"}),
            ecc_uncorrected_errors=3,
            processes=(GpuProcess(4711, 76_000_000_000), GpuProcess(4712, 500_000_000)),
        ),
    )
    assert reading.device_errors == {}


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        ([], set()),
        (["GpuIdle", "ApplicationsClocksSetting", "SyncBoost", "DisplayClockSetting"], set()),
        (["SwPowerCap"], {"power_cap"}),
        (["SwThermalSlowdown"], {"thermal"}),
        (["HwThermalSlowdown", "HwSlowdown"], {"thermal", "hw_slowdown"}),
        (["HwPowerBrakeSlowdown", "HwSlowdown"], {"power_brake", "hw_slowdown"}),
        (2**64 - 1, set(THROTTLE_REASONS)),
    ],
)
def test_throttle_reasons_are_those_that_tell_of_trouble(
    fake_nvml: FakeNvml, source: NvmlSource, bits: list[str] | int, reasons: set[str]
) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", throttle=bits)]})
    assert source.read().gpus[0].throttle_reasons == frozenset(reasons)


def test_old_driver_has_the_figures_under_their_old_names(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    absent = ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons"]
    absent += [f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "Graphics", "MPSCompute")]
    fake_nvml.show({"functions_not_found": absent, "devices": [gpu(0, "GPU-aaaa", memory_v1=MEMORY_V1, **FIGURES)]})
    reading = source.read()
    assert reading.gpus[0].memory_used_bytes == USED + RESERVED
    assert reading.gpus[0].throttle_reasons == frozenset({"power_cap"})
    assert [process.pid for process in reading.gpus[0].processes or ()] == [4711, 4712]
    assert reading.device_errors == {}


def test_driver_without_any_optional_function_gives_memory_and_no_error(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    absent = [f"nvmlDeviceGet{kind}RunningProcesses_v{v}" for kind in ("Compute", "Graphics", "MPSCompute") for v in (2, 3)]
    absent += ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlEventSetCreate"]
    absent += ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetMigMode"]
    absent += ["nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetMemoryBusWidth"]
    fake_nvml.show({"functions_not_found": absent, "devices": [gpu(0, "GPU-aaaa", **FIGURES)]})
    for _ in range(2):
        reading = source.read()
        assert reading.gpus == (expected(0, "GPU-aaaa"),)
        assert reading.device_errors == {}


@pytest.mark.parametrize("key", ["utilization", "throttle", "ecc_uncorrected", "compute_processes", "mps_processes", "events"])
def test_figure_that_fails_takes_no_other_along_and_is_counted(fake_nvml: FakeNvml, source: NvmlSource, key: str) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", **FIGURES)]})
    whole = source.read().gpus[0]
    fields = {
        "utilization": {"utilization_ratio", "memory_utilization_ratio"},
        "throttle": {"throttle_reasons"},
        "ecc_uncorrected": {"ecc_uncorrected_errors"},
        "compute_processes": {"processes"},
        "mps_processes": {"processes"},
        "events": set[str](),
    }
    source.close()
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", **{**FIGURES, key: "NVML_ERROR_UNKNOWN"})]})
    reading = source.read()
    assert reading.gpus == (replace(whole, **dict.fromkeys(fields[key])),)  # type: ignore[arg-type]  # by name
    assert reading.device_errors == {"unknown": 1}


def test_facts_that_do_not_change_are_asked_once_in_a_session(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", **FIGURES)]})
    calls = []
    for _ in range(3):
        before = fake_nvml.device_calls(0)
        source.read()
        calls.append(fake_nvml.device_calls(0) - before)
    # Name, clock, bus width, minor number, registration of events, and whether there is MIG.
    assert calls == [calls[0], calls[0] - 6, calls[0] - 6]


def test_fact_that_failed_is_asked_again(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    broken = "NVML_ERROR_TIMEOUT"
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", name=broken, memory_clock_mhz=broken, bus_width_bits=broken)]})
    reading = source.read()
    assert reading.gpus == (expected(0, "GPU-aaaa", None),)
    assert reading.device_errors == {"timeout": 3}
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", memory_clock_mhz=2619, bus_width_bits=5120)]})
    (after,) = source.read().gpus
    assert (after.name, after.max_memory_clock_hertz, after.memory_bus_width_bits) == ("NVIDIA H100 80GB HBM3", 2.619e9, 5120)


def test_clock_and_width_of_0_are_no_facts(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", memory_clock_mhz=0, bus_width_bits=0)]})
    assert source.read().gpus == (expected(0, "GPU-aaaa"),)


def test_case_57_process_lists_have_each_process_once_and_no_invented_memory(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    (step,) = steps_of("57-process-list-oddities")
    fake_nvml.show(step)
    reading = source.read()
    assert reading.gpus[0].processes == (GpuProcess(4711, 76_000_000_000), GpuProcess(5000), GpuProcess(5001))
    assert reading.gpus[0].memory_total_bytes == 85520809984
    assert reading.device_errors == {}


@pytest.mark.parametrize(
    ("lists", "processes"),
    [
        ({}, None),
        ({"compute_processes": []}, ()),
        ({"graphics_processes": []}, ()),
        ({"compute_processes": "NVML_ERROR_NOT_SUPPORTED", "mps_processes": [PROCESS]}, (GpuProcess(7, 5),)),
        ({"compute_processes": [{"pid": 7, "usedGpuMemory": None}], "mps_processes": [PROCESS]}, (GpuProcess(7, 5),)),
        ({"compute_processes": [PROCESS, {"pid": 7, "usedGpuMemory": 9}]}, (GpuProcess(7, 9),)),
        ({"compute_processes": [{"pid": 4194304, "usedGpuMemory": 1}]}, (GpuProcess(4194304, 1),)),
        ({"compute_processes": [{"pid": 4194305, "usedGpuMemory": 1}]}, ()),
    ],
)
def test_process_lists_are_one_list(
    fake_nvml: FakeNvml, source: NvmlSource, lists: Mapping[str, object], processes: tuple[GpuProcess, ...] | None
) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", **lists)]})
    reading = source.read()
    assert reading.gpus[0].processes == processes
    assert reading.device_errors == {}


def test_process_list_that_may_not_be_seen_is_none_and_counted(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """One list of three would make the processes of the others look gone."""
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", compute_processes="NVML_ERROR_NO_PERMISSION", graphics_processes=[PROCESS])]})
    reading = source.read()
    assert reading.gpus == (expected(0, "GPU-aaaa"),)
    assert reading.device_errors == {"no_permission": 1}


def test_xids_are_counted_by_gpu_for_as_long_as_the_source_lives(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    def xids() -> list[Mapping[int, int]]:
        return [gpu.xid_errors for gpu in source.read().gpus]

    sets = fake_nvml.event_sets
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa"), gpu(1, "GPU-bbbb")]})
    assert xids() == [{}, {}]
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", xids=[13, 31, 13]), gpu(1, "GPU-bbbb")]})
    assert xids() == xids() == [{13: 2, 31: 1}, {}]
    # A new session has a new set of events; the counts go on.
    source.close()
    assert fake_nvml.event_sets == sets
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa"), gpu(1, "GPU-bbbb")]})
    assert xids() == [{13: 2, 31: 1}, {}]
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa"), gpu(1, "GPU-bbbb", xids=[31])]})
    assert xids() == [{13: 2, 31: 1}, {31: 1}]


def test_lost_gpu_keeps_the_xids_that_say_why(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa"), gpu(1, "GPU-bbbb")]})
    source.read()
    for error in ({"handle_error": "NVML_ERROR_GPU_IS_LOST"}, {"memory_v2": "NVML_ERROR_GPU_IS_LOST"}):
        fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", xids=[79], **error), gpu(1, "GPU-bbbb")]})
        (lost,) = [gpu for gpu in source.read().gpus if gpu.lost]
        assert lost.uuid == "GPU-aaaa"
        assert lost.xid_errors.keys() == {79}


@pytest.mark.parametrize("error", ["NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_FUNCTION_NOT_FOUND"])
def test_machine_without_events_has_no_xids_and_no_error(fake_nvml: FakeNvml, source: NvmlSource, error: str) -> None:
    for step in ({"event_set": error}, {"devices": [gpu(0, "GPU-aaaa", events=error, xids=[79])]}):
        fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", xids=[79])], **step})
        for _ in range(2):
            reading = source.read()
            assert reading.gpus == (expected(0, "GPU-aaaa"),)
            assert reading.device_errors == {}
        source.close()


def test_events_that_cannot_be_waited_for_are_counted_as_an_error(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa")]})
    source.read()
    for error, errors in (("NVML_ERROR_UNKNOWN", {"unknown": 1}), ("NVML_ERROR_GPU_IS_LOST", {}), ("NVML_ERROR_TIMEOUT", {})):
        fake_nvml.show({"event_wait": error, "devices": [gpu(0, "GPU-aaaa")]})
        reading = source.read()
        assert reading.gpus == (expected(0, "GPU-aaaa"),)
        assert reading.device_errors == errors


INSTANCE: Mapping[str, Any] = {"uuid": "MIG-1111", "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "memory_v2": MEMORY_V2}
PARENT = GpuReading("GPU-aaaa", 0, "NVIDIA H100 80GB HBM3", mig_enabled=True)


def cut(*instances: Mapping[str, Any] | None, **changes: object) -> Step:
    """A machine with one GPU that is cut into these instances."""
    return {"devices": [gpu(0, "GPU-aaaa", **{"mig": {"instances": list(instances)}, **changes})]}


def instance(uuid: str = "MIG-1111", name: str = INSTANCE["name"], profile: str | None = "1g.10gb", **more: Any) -> GpuReading:
    return GpuReading(uuid, 0, name, TOTAL, USED, RESERVED, mig=MigInstance("GPU-aaaa", profile), **more)


def test_mig_instances_follow_the_gpu_that_they_are_cut_from(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """The GPU has no memory and no processes of its own, so that sums are right; what is of the board stays with it."""
    second = {**INSTANCE, "uuid": "MIG-2222", "name": "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb+me", "compute_processes": [PROCESS]}
    fake_nvml.show(
        cut(INSTANCE, None, second, compute_processes=[PROCESS], ecc_uncorrected=1, utilization={"gpu": 1, "memory": 1})
    )
    reading = source.read()
    assert reading.gpus == (
        replace(PARENT, ecc_uncorrected_errors=1),
        instance(),
        instance("MIG-2222", str(second["name"]), "1c.3g.40gb+me", processes=(GpuProcess(7, 5),)),
    )
    assert reading.device_errors == {}


def test_mig_instance_without_its_profile_in_its_name_has_none(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show(cut({**INSTANCE, "name": "NVIDIA MIG device"}))
    assert source.read().gpus == (PARENT, instance(name="NVIDIA MIG device", profile=None))


def test_mig_instance_that_is_gone_is_not_lost(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    other = {**INSTANCE, "uuid": "MIG-2222"}
    for step, gpus in (
        (cut(INSTANCE, other), (PARENT, instance(), instance("MIG-2222"))),
        (cut(None, other), (PARENT, instance("MIG-2222"))),
        (cut(), (PARENT,)),
        (cut(mig="disabled"), (expected(0, "GPU-aaaa"),)),
        ({"devices": [{"index": 0, "handle_error": "NVML_ERROR_GPU_IS_LOST"}]}, (replace(PARENT, mig_enabled=False, lost=True),)),
    ):
        fake_nvml.show(step)
        assert source.read().gpus == gpus


def test_mig_instance_that_fails_takes_no_other_along(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    broken = "NVML_ERROR_UNKNOWN"
    for failing, readings in (
        ({**INSTANCE, "handle_error": broken}, ()),
        ({**INSTANCE, "uuid": broken}, ()),
        (
            {**INSTANCE, "memory_v2": "NVML_ERROR_TIMEOUT"},
            (replace(instance(), memory_total_bytes=None, memory_used_bytes=None, memory_reserved_bytes=None),),
        ),
    ):
        fake_nvml.show(cut(failing, {**INSTANCE, "uuid": "MIG-2222"}))
        reading = source.read()
        assert reading.gpus == (PARENT, *readings, instance("MIG-2222"))
        assert sum(reading.device_errors.values()) == 1


def test_gpu_that_does_not_tell_its_mig_mode_is_a_whole_one(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """NVML's memory of a GPU includes that of its instances, so what is shown then is still the sum."""
    fake_nvml.show(cut(INSTANCE, mig="NVML_ERROR_UNKNOWN"))
    reading = source.read()
    assert reading.gpus == (expected(0, "GPU-aaaa"),)
    assert reading.device_errors == {"unknown": 1}


SHORT_SECONDS = 0.2


@pytest.fixture
def hasty(fake_nvml: FakeNvml) -> Iterator[NvmlSource]:
    """A source that waits for a device for a moment only."""
    source = NvmlSource(device_timeout_seconds=SHORT_SECONDS)
    yield source
    fake_nvml.show({})
    wait_until(lambda: not device_threads())
    source.close()


def device_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nvml devices"]


def test_case_59_call_that_hangs_is_an_error_and_makes_no_more_threads(fake_nvml: FakeNvml, hasty: NvmlSource) -> None:
    """The values of before are gone with the call; nothing waits for it again, nothing is called on top of it."""
    first, hanging = steps_of("59-nvml-call-hangs")
    fake_nvml.show(first)
    assert hasty.read().gpus == (expected(0, "GPU-aaaa"),)
    fake_nvml.show(hanging)
    calls = None
    for _ in range(100):
        with pytest.raises(SourceError, match="no GPU answers: its calls do not return") as caught:
            hasty.read()
        assert caught.value.reason == "hung"
        assert len(device_threads()) == 1
        calls = fake_nvml.device_calls(0) if calls is None else calls
        assert fake_nvml.device_calls(0) == calls
    assert fake_nvml.sessions == 1


def test_gpu_that_hangs_is_lost_until_its_call_returns(fake_nvml: FakeNvml, hasty: NvmlSource) -> None:
    """The others are read on, and what the late call says is not shown."""
    whole = [gpu(index, f"GPU-{index}") for index in range(3)]
    hanging = [whole[0], {**whole[1], "hang_on": "nvmlDeviceGetMemoryInfo"}, whole[2]]
    lost = GpuReading("GPU-1", 1, "NVIDIA H100 80GB HBM3", lost=True)
    fake_nvml.show({"devices": whole})
    hasty.read()
    fake_nvml.show({"devices": hanging})
    for _ in range(20):
        reading = hasty.read()
        assert reading.gpus == (expected(0, "GPU-0"), expected(2, "GPU-2"), lost)
        assert reading.device_errors == {"hung": 1}
        assert len(device_threads()) == 1
    others = [fake_nvml.device_calls(index) for index in (0, 2)]
    fake_nvml.show({"devices": whole})
    wait_until(lambda: not device_threads())
    assert [fake_nvml.device_calls(index) for index in (0, 2)] == others
    reading = hasty.read()
    assert reading.gpus == tuple(expected(index, f"GPU-{index}") for index in range(3))
    assert reading.device_errors == {}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("nvmlDeviceGetMemoryInfo", "NVIDIA H100 80GB HBM3"),
        ("nvmlDeviceGetName", None),
        ("nvmlDeviceRegisterEvents", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_gpu_that_hangs_at_start_is_known_by_what_it_said(
    fake_nvml: FakeNvml, hasty: NvmlSource, function: str, name: str | None
) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", hang_on=function), gpu(1, "GPU-bbbb")]})
    assert hasty.read().gpus == (expected(1, "GPU-bbbb"), GpuReading("GPU-aaaa", 0, name, lost=True))


def test_gpu_that_hangs_before_it_says_who_it_is(fake_nvml: FakeNvml, hasty: NvmlSource) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa", hang_on="nvmlDeviceGetHandleByIndex"), gpu(1, "GPU-bbbb")]})
    assert hasty.read().gpus == (expected(1, "GPU-bbbb"), GpuReading("", 0, lost=True))


def test_two_gpus_that_hang_cost_two_threads_and_all_that_hang_the_reading(fake_nvml: FakeNvml, hasty: NvmlSource) -> None:
    whole = [gpu(index, f"GPU-{index}") for index in range(3)]
    stuck = [{**device, "hang_on": "nvmlDeviceGetUtilizationRates"} for device in whole]
    fake_nvml.show({"devices": [*stuck[:2], whole[2]]})
    for _ in range(3):
        assert [gpu.lost for gpu in hasty.read().gpus] == [False, True, True]
        assert len(device_threads()) == 2
    fake_nvml.show({"devices": stuck})
    for _ in range(3):
        with pytest.raises(SourceError) as caught:
            hasty.read()
        assert caught.value.reason == "hung"
        assert len(device_threads()) == 3


def test_session_is_not_ended_under_a_call_that_hangs(fake_nvml: FakeNvml, hasty: NvmlSource) -> None:
    devices = [gpu(0, "GPU-aaaa", hang_on="nvmlDeviceGetMemoryInfo"), gpu(1, "GPU-bbbb")]
    fake_nvml.show({"devices": devices})
    hasty.read()
    fake_nvml.show({"count": "NVML_ERROR_UNKNOWN", "devices": devices})
    with pytest.raises(SourceError):
        hasty.read()
    hasty.close()
    assert fake_nvml.sessions == 1
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa"), gpu(1, "GPU-bbbb")]})
    wait_until(lambda: not device_threads())
    assert hasty.read().gpus == (expected(0, "GPU-aaaa"), expected(1, "GPU-bbbb"))


def test_defect_in_reading_a_device_is_raised_and_not_taken_for_a_hang(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(DeviceReader, "_mig_enabled", defect)
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa")]})
    with pytest.raises(ZeroDivisionError):
        NvmlSource().read()


@pytest.mark.parametrize(
    "step",
    [
        {"device": []},
        {"devices": [{"index": 0, "utilisation": 1}]},
        {"devices": [{"index": 0, "memory_v2": {"total": 1, "used": 1, "free": 1, "reserved": 0, "size": 1}}]},
        {"devices": [{"index": 0, "compute_processes": [{"pid": 1, "memory": 1}]}]},
        {"devices": [{"index": 0, "mig": {"places": []}}]},
        {"devices": [{"index": 0, "mig": {"instances": [{"uid": "MIG-1"}]}}]},
    ],
)
def test_scripted_library_refuses_what_it_does_not_know(fake_nvml: FakeNvml, step: Step) -> None:
    with pytest.raises(KeyError, match="does not know"):
        fake_nvml.show(step)


@pytest.mark.parametrize("step", [{"functions_not_found": ["nvmlDeviceGetMemory"]}, {"hang_seconds": 1, "on": "nvmlDeviceGet"}])
def test_scripted_library_refuses_functions_that_it_does_not_have(fake_nvml: FakeNvml, step: Step) -> None:
    with pytest.raises(ValueError, match="has no function"):
        fake_nvml.show(step)


READ_IN_NEW_PROCESS = """
from kvcache_exporter.sources.nvml import NoNvmlLibraryError, NvmlSource, bindings
from kvcache_exporter.sources.nvml.bindings import describe_bindings

source = NvmlSource()
for _ in range(2):
    try:
        print([gpu.uuid for gpu in source.read().gpus])
    except NoNvmlLibraryError as error:
        print(error.reason, "|", error)
source.close()
"""


def read_in_new_process(environment: Mapping[str, str]) -> list[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", READ_IN_NEW_PROCESS],
        env={**environment, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.splitlines()


def test_machine_without_the_library_is_told_from_other_failures() -> None:
    if ctypes.util.find_library("nvidia-ml"):
        pytest.skip("this machine has an NVML library")
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    first, second = read_in_new_process(environment)
    assert first.startswith("library_not_found | NVML is not available on this machine: libnvidia-ml.so.1: cannot open")
    assert second == first


def test_library_that_cannot_be_loaded_is_named_with_the_words_of_the_loader(tmp_path: Path) -> None:
    """Containers started without the NVIDIA runtime can hold empty files in place of the driver's libraries."""
    (tmp_path / "libnvidia-ml.so.1").touch()
    first, _ = read_in_new_process({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert first.startswith("library_not_found |")
    assert "file too short" in first


def test_scripted_library_serves_other_processes(fake_nvml: FakeNvml) -> None:
    fake_nvml.show({"devices": [gpu(0, "GPU-aaaa")]})
    assert read_in_new_process(fake_nvml.environment()) == ["['GPU-aaaa']"] * 2


def test_package_behind_the_bindings_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 56: the old package `pynvml` installs a module of the same name."""
    installed = metadata.version("nvidia-ml-py")
    assert describe_bindings() == f"nvidia-ml-py {installed}"
    monkeypatch.setattr(bindings, "packages_distributions", lambda: {"pynvml": ["pynvml", "nvidia-ml-py"]})
    assert describe_bindings() == f"nvidia-ml-py {installed}; uninstall pynvml, which has a module of the same name"
