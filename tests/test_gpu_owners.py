"""Which GPUs an engine runs on: configured, given by the kubelet, or held by its processes."""

from __future__ import annotations

from kvcache_exporter.gpu_owners import (
    ContainerGpus,
    EngineGpus,
    EngineProcess,
    Parallelism,
    configured_gpus,
    find_container,
    pod_gpus,
    process_gpus,
    uuid_of_device,
)
from kvcache_exporter.gpu_reading import GpuProcess, GpuReading

A, B, C, D = (f"GPU-{letter}" for letter in "abcd")
ONE = Parallelism(("0",))
TP2 = Parallelism(("0",), tensor_parallel_size=2)
TP2_PP2 = Parallelism(("0",), 2, 2)
DP2 = Parallelism(("0", "1"))


def gpu(uuid: str, **memory_by_pid: int | None) -> GpuReading:
    processes = tuple(GpuProcess(int(pid.removeprefix("p")), memory) for pid, memory in memory_by_pid.items())
    return GpuReading(uuid, 0, processes=processes)


def test_configured_gpus_go_to_ranks_in_their_order() -> None:
    assert configured_gpus([C, A], TP2) == (EngineGpus("0", (C, A), "configured", (0, 0)),)
    assert configured_gpus([A, B, C, D], TP2_PP2) == (EngineGpus("0", (A, B, C, D), "configured", (0, 0, 1, 1)),)


def test_configured_gpus_go_to_data_parallel_engines_one_after_the_other() -> None:
    engines = configured_gpus([A, B, C, D], Parallelism(("0", "1"), tensor_parallel_size=2))
    assert [(one.engine, one.uuids) for one in engines] == [("0", (A, B)), ("1", (C, D))]
    assert configured_gpus([A], DP2) == ()


def test_gpus_beyond_the_ranks_are_idle() -> None:
    assert configured_gpus([A, B, C], TP2)[0].uuids == (A, B)


def test_part_of_an_engine_on_this_machine() -> None:
    """The rest of its ranks are elsewhere: with one stage all are alike, with several it is not known which these are."""
    assert configured_gpus([A], TP2) == (EngineGpus("0", (A,), "configured", (0,)),)
    assert configured_gpus([A, B], TP2_PP2) == (EngineGpus("0", (A, B), "configured", None),)
    assert configured_gpus([], TP2) == ()


def test_gpus_of_a_pod_are_those_of_its_one_engine() -> None:
    assert pod_gpus([B, A], TP2) == (EngineGpus("0", (B, A), "pod_resources", (0, 0)),)
    assert pod_gpus([A, B, C, D], TP2_PP2)[0].stages is None
    assert pod_gpus([A, B], ONE) == ()
    assert pod_gpus([A, B], DP2) == ()
    assert pod_gpus([], ONE) == ()


def test_devices_of_the_kubelet_are_uuids_or_device_files() -> None:
    """GKE counts minor numbers, which are not NVML's indexes."""
    gpus = [GpuReading(A, 0, minor_number=1), GpuReading(B, 1, minor_number=0), GpuReading("MIG-a", 1)]
    named = {
        device: uuid_of_device(device, gpus) for device in (A, "MIG-a", "nvidia0", "nvidia2", "nvidia0/gi1", "0", "nvidiaNone")
    }
    assert named == {A: A, "MIG-a": "MIG-a", "nvidia0": B, "nvidia2": None, "nvidia0/gi1": None, "0": None, "nvidiaNone": None}


def test_pod_is_found_by_name_and_container() -> None:
    engine = ContainerGpus("ml", "llama-0", "vllm", (A,))
    helper = ContainerGpus("ml", "llama-0", "embedder", (B,))
    assert find_container([engine], "ml/llama-0") == engine
    assert find_container([engine, helper], "ml/llama-0/vllm") == engine
    assert find_container([engine, helper], "ml/llama-0") is None
    assert find_container([engine], "other/llama-0") is None
    assert find_container([engine], "ml/llama-0/helper") is None


def test_processes_are_where_they_hold_the_most() -> None:
    """A worker leaves a context of some hundred MB on GPU 0."""
    gpus = [gpu(A, p1=70_000, p2=500), gpu(B, p2=70_000)]
    processes = [EngineProcess(2, tensor_parallel_rank=1), EngineProcess(1, tensor_parallel_rank=0)]
    assert process_gpus(processes, gpus, TP2) == (EngineGpus("0", (A, B), "process", (0, 0)),)


def test_processes_tell_data_parallel_ranks_by_their_title() -> None:
    gpus = [gpu(A, p1=1), gpu(B, p2=1)]
    titled = [EngineProcess(1, data_parallel_rank=1), EngineProcess(2, data_parallel_rank=0)]
    assert [(one.engine, one.uuids) for one in process_gpus(titled, gpus, DP2)] == [("0", (B,)), ("1", (A,))]
    assert process_gpus([EngineProcess(1), titled[1]], gpus, DP2) == ()


def test_stages_of_processes_without_titles_are_not_known() -> None:
    gpus = [gpu(A, p1=1), gpu(B, p2=1)]
    pipeline = Parallelism(("0",), pipeline_parallel_size=2)
    titled = [EngineProcess(1, pipeline_parallel_rank=1), EngineProcess(2, pipeline_parallel_rank=0)]
    assert process_gpus(titled, gpus, pipeline) == (EngineGpus("0", (B, A), "process", (0, 1)),)
    assert process_gpus([EngineProcess(1), EngineProcess(2)], gpus, pipeline)[0].stages is None


def test_process_that_holds_nothing_places_nobody() -> None:
    assert process_gpus([EngineProcess(1)], [gpu(A, p2=5), GpuReading(B)], ONE) == ()
