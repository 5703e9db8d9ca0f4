"""CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES on the GPUs that NVML lists."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvcache_exporter.visible_devices import resolve_devices, visible_devices
from lab import CASES

CASE_58 = yaml.safe_load((CASES / "58-visible-devices-mapping" / "cases.yaml").read_text())
ORDER = tuple(CASE_58["nvml_order"])


@pytest.mark.parametrize("case", CASE_58["cases"], ids=str)
def test_58_visible_devices_mapping(case: dict[str, str | list[str] | None]) -> None:
    """Order counts, prefixes of uuids do, the list ends at its first wrong entry, and what is not told is not known."""
    expected = None if case["expect"] == "unknown" else tuple(case["expect"] or ())
    found = visible_devices(ORDER, case.get("CUDA_VISIBLE_DEVICES"), case.get("NVIDIA_VISIBLE_DEVICES"))  # type: ignore[arg-type]
    assert found == expected


def test_nothing_is_known_without_either_variable() -> None:
    assert visible_devices(ORDER, None) is None


def test_variable_of_the_container_names_gpus_too() -> None:
    assert visible_devices(ORDER, None, "1,GPU-aaaa1111") == (ORDER[1], ORDER[0])


@pytest.mark.parametrize("entry", ["GPU-", "gpu-aaaa1111", "x", "", "-1", "3", "1.0", "²", "GPU-aaaa11112"])
def test_entries_that_name_no_gpu_or_several_end_the_list(entry: str) -> None:
    assert resolve_devices(ORDER, ["0", entry, "1"]) == (ORDER[0],)


def test_gpu_named_twice_leaves_none() -> None:
    assert resolve_devices(ORDER, ["0", "GPU-aaaa"]) == ()


@given(st.lists(st.text(max_size=8)), st.text(max_size=20))
def test_no_value_crashes(uuids: Sequence[str], value: str) -> None:
    found = visible_devices(uuids, value)
    assert found is not None
    assert all(uuid in uuids or uuid.startswith("MIG-") for uuid in found)
