"""Peak memory bandwidth, and the share of it that decoding takes."""

from __future__ import annotations

import math

import pytest

from kvcache_exporter.gpu_reading import GpuReading, MigInstance
from kvcache_exporter.memory_bandwidth import (
    DecodeReads,
    StepReads,
    bandwidth_utilization,
    decode_reads,
    peak_bandwidth,
    steps_between,
)
from kvcache_exporter.readings import EngineReading

H100 = GpuReading("GPU-a", max_memory_clock_hertz=2.619e9, memory_bus_width_bits=5120)
# An H100 SXM reads Llama-3.1-8B in 4.8 ms.
LLAMA = StepReads(weight_bytes=15_009_849_344, bytes_per_block=2_097_152)


@pytest.mark.parametrize(
    ("megahertz", "bits", "data_sheet"),
    [
        pytest.param(2619, 5120, 3.35e12, id="H100 SXM"),
        pytest.param(3201, 6144, 4.8e12, id="H200"),
        pytest.param(1593, 5120, 2.039e12, id="A100 80GB"),
        pytest.param(1215, 5120, 1.555e12, id="A100 40GB"),
        pytest.param(6251, 192, 300e9, id="L4"),
        pytest.param(9001, 384, 864e9, id="L40S"),
    ],
)
def test_peak_is_that_of_the_data_sheet(megahertz: float, bits: int, data_sheet: float) -> None:
    """To 3 %: vendors round, and state the H200 a little below what its clock makes."""
    gpu = GpuReading("GPU-a", max_memory_clock_hertz=megahertz * 1e6, memory_bus_width_bits=bits)
    assert peak_bandwidth(gpu) == pytest.approx(data_sheet, rel=0.03)


def test_peak_is_not_known_without_clock_or_width_or_for_a_part_of_a_gpu() -> None:
    assert peak_bandwidth(GpuReading("GPU-a", memory_bus_width_bits=5120)) is None
    assert peak_bandwidth(GpuReading("GPU-a", max_memory_clock_hertz=1e9)) is None
    part = GpuReading("MIG-a", max_memory_clock_hertz=1e9, memory_bus_width_bits=5120, mig=MigInstance("GPU-a"))
    assert peak_bandwidth(part) is None


def reading(*, steps: int | None = None, used: int | None = None, read: float | None = None) -> EngineReading:
    return EngineReading("0", engine_steps=steps, used_blocks=used, estimated_read_bytes_per_gpu=read)


def test_each_step_reads_the_weights_and_the_held_blocks_once() -> None:
    done = steps_between(5.0, reading(steps=100, used=1000), reading(steps=600, used=3000))
    reads = decode_reads(done, LLAMA)
    assert reads == DecodeReads(100 * (15_009_849_344 + 2000 * 2_097_152), "computed")
    assert reads is not None
    assert bandwidth_utilization(reads, [H100]) == pytest.approx(0.573, abs=0.001)


def test_engine_at_its_own_counter_needs_no_layout() -> None:
    done = steps_between(5.0, reading(read=1e12), reading(read=6e12))
    assert decode_reads(done, None) == DecodeReads(1e12, "reported")


def test_counter_that_stands_still_is_not_an_engine_that_reads_nothing() -> None:
    """VLLM has the counter, at 0, for models that it cannot reckon."""
    done = steps_between(5.0, reading(steps=0, used=0, read=0.0), reading(steps=10, used=0, read=0.0))
    reads = decode_reads(done, LLAMA)
    assert reads is not None
    assert (reads.source, reads.bytes_per_second) == ("computed", 2 * 15_009_849_344)


def test_idle_engine_reads_nothing() -> None:
    done = steps_between(5.0, reading(steps=7, used=0), reading(steps=7, used=0))
    assert decode_reads(done, LLAMA) == DecodeReads(0.0, "computed")


@pytest.mark.parametrize(
    ("before", "after", "step"),
    [
        (reading(steps=5, used=1), reading(steps=9, used=1), None),
        (reading(used=1), reading(steps=9, used=1), LLAMA),
        (reading(steps=5, used=1), reading(steps=9), LLAMA),
        (reading(steps=9, used=1), reading(steps=5, used=1), LLAMA),
    ],
)
def test_what_cannot_be_told_is_absent(before: EngineReading, after: EngineReading, step: StepReads | None) -> None:
    assert decode_reads(steps_between(5.0, before, after), step) is None


def test_two_pages_of_one_moment_tell_no_rate() -> None:
    assert decode_reads(steps_between(0.0, reading(steps=5, used=1), reading(steps=9, used=1)), LLAMA) is None


def test_share_is_of_all_gpus_together_and_needs_each_peak() -> None:
    reads = DecodeReads(1e12, "computed")
    one = bandwidth_utilization(reads, [H100])
    assert one is not None
    assert math.isclose(bandwidth_utilization(reads, [H100, H100]) or 0, one)
    assert bandwidth_utilization(reads, [H100, GpuReading("GPU-b")]) is None
    assert bandwidth_utilization(reads, []) is None
