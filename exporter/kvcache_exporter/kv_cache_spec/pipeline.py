"""Which decoder layers a pipeline stage holds (`vllm/distributed/utils.py`, `get_pp_indices`)."""

from __future__ import annotations


def stage_of_layers(num_layers: int, pipeline_parallel_size: int) -> tuple[int, ...]:
    """The stage of each layer. What does not divide goes to the stages before the last, from the second-last backwards."""
    counts = [num_layers // pipeline_parallel_size] * pipeline_parallel_size
    for extra in range(num_layers % pipeline_parallel_size):
        counts[-(extra + 2)] += 1
    return tuple(stage for stage, count in enumerate(counts) for _ in range(count))
