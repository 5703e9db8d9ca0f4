"""The parts of a GPU's memory: they add up to its total whatever is known, and what is not known is not there."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvcache_exporter.gpu_memory import (
    FREE,
    KV_CACHE,
    OTHER_PROCESSES,
    OVERHEAD,
    RESERVED,
    UNKNOWN,
    WEIGHTS,
    Tenant,
    split_memory,
)
from kvcache_exporter.gpu_reading import GpuProcess, GpuReading

GIB = 1024**3
ENGINE, OTHER = 4711, 4712


def gpu(
    processes: dict[int, int | None] | None,
    *,
    total: int | None = 80 * GIB,
    used: int | None = 72 * GIB,
    reserved: int | None = GIB,
) -> GpuReading:
    listed = None if processes is None else tuple(GpuProcess(pid, memory) for pid, memory in processes.items())
    return GpuReading("GPU-a", 0, None, total, used, reserved, processes=listed)


def engine(
    kv_cache: int | None = 50 * GIB, weights: int | None = 16 * GIB, pids: frozenset[int] | None = frozenset({ENGINE})
) -> Tenant:
    return Tenant(kv_cache, weights, pids)


def components(reading: GpuReading, *tenants: Tenant, tenants_known: bool = True) -> dict[str, int]:
    split = split_memory(reading, tenants, tenants_known=tenants_known)
    assert split is not None
    assert not split.contradiction
    assert sum(split.components.values()) == reading.memory_total_bytes
    return {name: size // GIB for name, size in split.components.items()}


FRAME = {RESERVED: 1, FREE: 7}


def test_all_known() -> None:
    reading = gpu(processes={ENGINE: 68 * GIB, OTHER: 3 * GIB})
    assert components(reading, engine()) == {**FRAME, WEIGHTS: 16, KV_CACHE: 50, OTHER_PROCESSES: 3, OVERHEAD: 3}


def test_engine_alone_says_so_with_a_zero() -> None:
    assert components(gpu(processes={ENGINE: 70 * GIB}), engine())[OTHER_PROCESSES] == 0


def test_two_engines_on_one_gpu_add_up() -> None:
    tenants = (engine(20 * GIB, 8 * GIB), engine(30 * GIB, 9 * GIB, frozenset({OTHER})))
    found = components(gpu(processes={ENGINE: 30 * GIB, OTHER: 40 * GIB}), *tenants)
    assert found == {**FRAME, WEIGHTS: 17, KV_CACHE: 50, OTHER_PROCESSES: 0, OVERHEAD: 5}


def test_without_a_list_of_processes_the_rest_is_unknown() -> None:
    rest = {**FRAME, WEIGHTS: 16, KV_CACHE: 50, UNKNOWN: 6}
    assert components(gpu(processes=None), engine()) == rest
    assert components(gpu(processes={ENGINE: GIB}), engine(pids=None)) == rest
    assert components(gpu(processes={ENGINE: 68 * GIB, OTHER: None}), engine()) == rest


def test_list_without_the_engine_is_cut_short_and_proves_nothing() -> None:
    """Containers: NVML shows no process, or those of others."""
    rest = {**FRAME, WEIGHTS: 16, KV_CACHE: 50, UNKNOWN: 6}
    assert components(gpu(processes={}), engine()) == rest
    assert components(gpu(processes={OTHER: GIB}), engine()) == rest


def test_unknown_weights_leave_the_rest_unknown() -> None:
    found = components(gpu(processes={ENGINE: 70 * GIB}), engine(weights=None))
    assert found == {**FRAME, KV_CACHE: 50, OTHER_PROCESSES: 0, UNKNOWN: 22}


def test_gpu_of_no_engine_belongs_to_others_only_when_all_engines_are_placed() -> None:
    reading = gpu(processes={OTHER: 70 * GIB})
    assert components(reading) == {**FRAME, OTHER_PROCESSES: 72}
    assert components(reading, tenants_known=False) == {**FRAME, UNKNOWN: 72}


def test_without_memory_v2_the_reserved_part_is_in_the_overhead() -> None:
    reading = gpu(used=73 * GIB, reserved=None, processes={ENGINE: 70 * GIB})
    assert components(reading, engine()) == {FREE: 7, WEIGHTS: 16, KV_CACHE: 50, OTHER_PROCESSES: 0, OVERHEAD: 7}


def test_parts_beyond_what_is_used_are_withdrawn_and_reported() -> None:
    """Such as 16-bit weights computed for an engine that quantized them while loading."""
    split = split_memory(gpu(used=60 * GIB, processes={ENGINE: 60 * GIB}), [engine()], tenants_known=True)
    assert split is not None
    assert split.contradiction
    assert split.components == {FREE: 19 * GIB, RESERVED: GIB, UNKNOWN: 60 * GIB}


def test_gpu_without_figures_has_no_parts() -> None:
    assert split_memory(gpu(total=None, used=None, processes={}), [engine()], tenants_known=True) is None


sizes = st.none() | st.integers(0, 90 * GIB)
pid_sets = st.none() | st.frozensets(st.sampled_from((ENGINE, OTHER, 9)))


@given(
    used=st.integers(0, 79 * GIB),
    reserved=st.none() | st.integers(0, GIB),
    tenants=st.lists(st.builds(Tenant, sizes, sizes, pid_sets), max_size=3),
    processes=st.none() | st.dictionaries(st.sampled_from((ENGINE, OTHER, 5)), sizes),
    tenants_known=st.booleans(),
)
def test_parts_are_not_negative_and_add_up(
    used: int, reserved: int | None, tenants: Sequence[Tenant], processes: dict[int, int | None] | None, tenants_known: bool
) -> None:
    reading = gpu(used=used, reserved=reserved, processes=processes)
    split = split_memory(reading, tenants, tenants_known=tenants_known)
    assert split is not None
    assert sum(split.components.values()) == 80 * GIB
    assert min(split.components.values()) >= 0
    # Never both: overhead is what is left when everything else is known.
    assert not {OVERHEAD, UNKNOWN} <= split.components.keys()
