"""The NVML source, through the real pynvml and a scripted libnvidia-ml.so.1."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from fake_nvml import FakeNvml, Step, load_steps
from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_reading import GpuReading
from kvcache_exporter.sources.nvml import NvmlSource

CASES = Path(__file__).with_name("data") / "cases"

TOTAL, RESERVED, FREE, USED = 85520809984, 577765376, 7864320000, 77078724608
MEMORY_V1 = {"total": TOTAL, "free": FREE, "used": USED + RESERVED}
MEMORY_V2 = {"total": TOTAL, "reserved": RESERVED, "free": FREE, "used": USED}


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
    assert reading.gpus == (expected(1, "GPU-bbbb"),)
    assert reading.device_errors == {"unknown": 1}


def test_case_53_unified_memory_has_no_memory_figures(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """Neither NOT_SUPPORTED nor 0 of 0 bytes is a measurement; the GPU is there, and the reason is counted once per read."""
    for step in steps_of("53-unified-memory-not-supported"):
        fake_nvml.show(step)
        reading = source.read()
        assert reading.gpus == (GpuReading("GPU-gb10", 0, "NVIDIA GB10"),)
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
    for step in (as_bytes, as_text):
        fake_nvml.show({**step, "devices": [{**step["devices"][0], "memory_v2": MEMORY_V2}]})
        assert source.read().gpus == (expected(0, "GPU-aaaa"),)
    fake_nvml.show({**garbage, "devices": [{**garbage["devices"][0], "memory_v2": MEMORY_V2}]})
    reading = source.read()
    assert reading.gpus == (expected(0, "GPU-aaaa", name=None),)
    assert reading.device_errors == {"invalid_answer": 1}


def test_gpu_whose_uuid_is_not_text_hides_no_other_gpu(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.show({"devices": [{"index": 0, "uuid": b"GPU-\xf8"}, gpu(1, "GPU-bbbb")]})
    reading = source.read()
    assert reading.gpus == (expected(1, "GPU-bbbb"),)
    assert reading.device_errors == {"invalid_answer": 1}


def test_hanging_memory_call_stops_only_its_own_thread(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """The call waits outside the interpreter lock, so that a caller with a deadline keeps working (case 59)."""
    first, hanging = steps_of("59-nvml-call-hangs")
    fake_nvml.show(hanging)
    thread = threading.Thread(target=source.read, daemon=True)
    thread.start()
    thread.join(timeout=0.3)
    assert thread.is_alive()
    fake_nvml.show(first)
    thread.join(timeout=10)
    assert not thread.is_alive()


READ_IN_NEW_PROCESS = """
from kvcache_exporter.sources.nvml import NoNvmlLibraryError, NvmlSource

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
