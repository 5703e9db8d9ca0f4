"""`max_num_seqs` of an engine that was started without it: vLLM chooses by the GPU."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache_exporter.gpu_reading import GpuReading
from kvcache_exporter.kv_cache_spec.engine_config import GIB, LARGE_GPU_BYTES, is_a100, is_large_gpu

# What CUDA calls a GPU's memory, by which vLLM decides, is a little less than what NVML does.
_UNSURE_BYTES = 3 * GIB
_SEATS_OF_LARGE_GPUS = 1024
_SEATS = 256
# The rule is the same since the A100 was taken out of it. Before, and where the engine may be the old one (V0), it is another.
_FIRST_VERSION = (0, 11)


def default_max_num_seqs(
    vllm_version: tuple[int, int] | None, gpus: Sequence[GpuReading], max_num_batched_tokens: int | None
) -> int | None:
    """What `vllm serve` takes for `--max-num-seqs` (vLLM `engine/arg_utils.py`, `get_batch_defaults`, 0.11 to 0.33).

    1024 on GPUs of 70 GiB or more but for the A100, else 256; at most `--max-num-batched-tokens`, where that is given. `gpus` are
    those that the engine may run on: None where they would make a difference, where one does not tell its size, where there are
    none, and for other versions.
    """
    if vllm_version is None or vllm_version < _FIRST_VERSION:
        return None
    # One that is cut into instances has no memory of its own; the engine is on one of these.
    choices = {_seats_on(gpu) for gpu in gpus if not gpu.lost and not gpu.mig_enabled}
    if len(choices) != 1 or None in choices:
        return None
    (seats,) = choices
    return seats if seats is None or max_num_batched_tokens is None else min(seats, max_num_batched_tokens)


def _seats_on(gpu: GpuReading) -> int | None:
    if gpu.memory_total_bytes is None or gpu.name is None:
        return None
    if abs(gpu.memory_total_bytes - LARGE_GPU_BYTES) < _UNSURE_BYTES and not is_a100(gpu.name):
        return None
    return _SEATS_OF_LARGE_GPUS if is_large_gpu(gpu.name, gpu.memory_total_bytes) else _SEATS
