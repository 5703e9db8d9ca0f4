"""How much of a GPU's memory bandwidth decoding needs: what every step has to read, over what the memory can deliver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_exporter.gpu_reading import GpuReading
from kvcache_exporter.readings import EngineReading

REPORTED = "reported"
COMPUTED = "computed"

# Memory of all kinds that these GPUs have (HBM, GDDR) is named by the clock at which it moves data at both edges.
_TRANSFERS_PER_CLOCK = 2
_BITS_PER_BYTE = 8


def peak_bandwidth(gpu: GpuReading) -> float | None:
    """Bytes a second that the memory of a GPU moves at its highest clock; None where NVML does not tell its clock and width.

    An H100 SXM (2,619 MHz, 5,120 bits) has 3.35e12, as its data sheet says. A MIG instance has a part that NVML does not tell.
    """
    if gpu.max_memory_clock_hertz is None or gpu.memory_bus_width_bits is None or gpu.mig is not None:
        return None
    return gpu.max_memory_clock_hertz * _TRANSFERS_PER_CLOCK * gpu.memory_bus_width_bits / _BITS_PER_BYTE


@dataclass(frozen=True)
class DecodeReads:
    """Bytes that one GPU of an engine, in the mean over its GPUs, reads a second; `source` is `reported` or `computed`."""

    bytes_per_second: float
    source: str


@dataclass(frozen=True)
class StepReads:
    """What one step reads on one GPU of an engine, in the mean over its GPUs: weights, and for each block that requests hold."""

    weight_bytes: float
    bytes_per_block: float


@dataclass(frozen=True)
class StepsDone:
    """What an engine did between two pages `seconds` apart, for its reads to be reckoned from."""

    seconds: float
    reported_bytes: float | None
    steps: int | None
    held_blocks: float | None


def steps_between(seconds: float, before: EngineReading, after: EngineReading) -> StepsDone:
    """What two pages of one run of an engine say; its held blocks are the mean of both."""
    held = None
    if before.used_blocks is not None and after.used_blocks is not None:
        held = (before.used_blocks + after.used_blocks) / 2
    steps = None
    if before.engine_steps is not None and after.engine_steps is not None:
        steps = after.engine_steps - before.engine_steps
    reported = None
    if before.estimated_read_bytes_per_gpu is not None and after.estimated_read_bytes_per_gpu is not None:
        reported = after.estimated_read_bytes_per_gpu - before.estimated_read_bytes_per_gpu
    return StepsDone(seconds, reported, steps, held)


def decode_reads(done: StepsDone, step: StepReads | None) -> DecodeReads | None:
    """Bytes a second on one GPU; None where it cannot be told.

    The engine's own counter counts where it moves (`--enable-mfu-metrics`; it stays at 0 for models that it cannot reckon). Else
    each step, an observation of `iteration_tokens_total`, reads the weights once and once the blocks that requests hold. What
    prompts read besides is not in it.
    """
    if done.seconds <= 0:
        return None
    if done.reported_bytes is not None and done.reported_bytes > 0:
        return DecodeReads(done.reported_bytes / done.seconds, REPORTED)
    if done.steps is None or done.held_blocks is None or step is None or done.steps < 0:
        return None
    per_step = step.weight_bytes + done.held_blocks * step.bytes_per_block
    return DecodeReads(done.steps / done.seconds * per_step, COMPUTED)


def bandwidth_utilization(reads: DecodeReads, gpus: Sequence[GpuReading]) -> float | None:
    """Share, 0-1, of the bandwidth of an engine's GPUs that its reads take; None where the peak of one is not known."""
    peaks = [peak_bandwidth(gpu) for gpu in gpus]
    known = [peak for peak in peaks if peak is not None]
    if not known or len(known) != len(peaks):
        return None
    return reads.bytes_per_second * len(known) / sum(known)
