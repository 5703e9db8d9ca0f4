"""max_num_seqs of an engine that was started without it, by version and GPU."""

from __future__ import annotations

import pytest

from kvcache_exporter.default_seats import default_max_num_seqs
from kvcache_exporter.gpu_reading import GpuReading, MigInstance

GIB = 1024**3
H100 = GpuReading("GPU-h", 0, "NVIDIA H100 80GB HBM3", int(79.6 * GIB))
A100 = GpuReading("GPU-a", 0, "NVIDIA A100-SXM4-80GB", 80 * GIB)
L40S = GpuReading("GPU-l", 0, "NVIDIA L40S", 45 * GIB)
CUT_H100 = GpuReading("GPU-m", 0, "NVIDIA H100 80GB HBM3", mig_enabled=True)
SLICE = GpuReading("MIG-1", 0, "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40 * GIB, mig=MigInstance("GPU-m", "3g.40gb"))


@pytest.mark.parametrize(
    ("gpus", "seats"),
    [
        ([H100], 1024),
        ([H100, H100], 1024),
        ([A100], 256),
        ([L40S], 256),
        ([A100, L40S], 256),
        ([GpuReading("GPU-b", 0, "NVIDIA B200", 179 * GIB)], 1024),
        ([CUT_H100, SLICE], 256),
        # It may run on either.
        ([H100, L40S], None),
        ([H100, CUT_H100, SLICE], None),
        ([H100, GpuReading("GPU-x", lost=True)], 1024),
        ([], None),
        ([GpuReading("GPU-x", lost=True)], None),
        # Unified memory, or a size so near the bound that CUDA's own figure decides.
        ([GpuReading("GPU-g", 0, "NVIDIA GB10")], None),
        ([GpuReading("MIG-2", 0, "NVIDIA H200 MIG 3g.71gb", 69 * GIB, mig=MigInstance("GPU-m"))], None),
        ([GpuReading("GPU-n", 0, None, 80 * GIB)], None),
    ],
)
def test_default_by_gpu(gpus: list[GpuReading], seats: int | None) -> None:
    assert default_max_num_seqs((0, 32), gpus, None) == seats


@pytest.mark.parametrize(("version", "seats"), [((0, 8), None), ((0, 10), None), ((0, 11), 1024), ((0, 33), 1024), (None, None)])
def test_default_by_version(version: tuple[int, int] | None, seats: int | None) -> None:
    """0.8 and 0.9 had other rules or another engine, and a build from source may have."""
    assert default_max_num_seqs(version, [H100], None) == seats


def test_no_more_seats_than_tokens_in_a_batch() -> None:
    assert default_max_num_seqs((0, 32), [H100], 512) == 512
    assert default_max_num_seqs((0, 32), [L40S], 512) == 256
