"""What an engine's KV-cache pool holds, from what the engine reports and, where it is silent, from the layout.

Where a figure came from is kept beside it: REPORTED by the engine, or COMPUTED from config.json and engine flags.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_exporter.kv_cache_spec import KVCacheLayout
from kvcache_exporter.readings import EngineReading

REPORTED = "reported"
COMPUTED = "computed"


@dataclass(frozen=True)
class Capacity:
    """The pool of one engine.

    `usable_blocks` leaves the null block out. `size_bytes` is their size over all ranks. `tokens` is the figure that vLLM logs
    as "GPU KV cache size", null block included; on a hybrid model it is an equivalent (concurrency at max_model_len times
    max_model_len). `mismatch_ratio` is computed over reported tokens, minus 1: other than 0 means that config.json or a flag
    given to the exporter is not the one that the engine runs.
    """

    usable_blocks: int
    size_bytes: int | None = None
    tokens: int | None = None
    tokens_source: str | None = None
    mismatch_ratio: float | None = None


def capacity_of(reading: EngineReading, layout: KVCacheLayout | None, max_model_len: int | None) -> Capacity | None:
    """Capacity of one engine; None when the engine does not report its block count."""
    if reading.usable_blocks is None or reading.num_gpu_blocks is None:
        return None
    reported = reading.kv_cache_size_tokens
    computed = None
    if layout is not None and layout.tokens_per_block is not None:
        computed = reading.num_gpu_blocks * layout.tokens_per_block
    tokens = reported if reported is not None else computed
    source = None if tokens is None else (REPORTED if reported is not None else COMPUTED)
    return Capacity(
        usable_blocks=reading.usable_blocks,
        size_bytes=None if layout is None else reading.usable_blocks * layout.bytes_per_block,
        tokens=tokens,
        tokens_source=source,
        mismatch_ratio=_mismatch_ratio(reading, layout, max_model_len),
    )


def num_gpu_blocks_for(layout: KVCacheLayout, available_bytes_per_rank: int) -> int:
    """Blocks that vLLM cuts from the memory that it has for the cache on each rank, null block included."""
    return available_bytes_per_rank // layout.bytes_per_block_per_rank


def kv_cache_size_tokens(layout: KVCacheLayout, num_gpu_blocks: int, max_model_len: int) -> int:
    """Tokens that vLLM 0.22 and later log as "GPU KV cache size": concurrency at max_model_len times max_model_len."""
    return int(num_gpu_blocks / layout.blocks_for_request(max_model_len) * max_model_len)


def blocks_per_max_len_request(reading: EngineReading, layout: KVCacheLayout | None, max_model_len: int | None) -> int | None:
    """Blocks that one request of max_model_len tokens takes.

    The engine's own `kv_cache_max_concurrency` is num_gpu_blocks over exactly this count, so it wins where it is there.
    """
    if reading.kv_cache_max_concurrency and reading.num_gpu_blocks:
        return max(1, round(reading.num_gpu_blocks / reading.kv_cache_max_concurrency))
    if layout is not None and max_model_len is not None:
        return layout.blocks_for_request(max_model_len)
    return None


def _mismatch_ratio(reading: EngineReading, layout: KVCacheLayout | None, max_model_len: int | None) -> float | None:
    if layout is None or max_model_len is None or not reading.kv_cache_size_tokens or reading.num_gpu_blocks is None:
        return None
    return kv_cache_size_tokens(layout, reading.num_gpu_blocks, max_model_len) / reading.kv_cache_size_tokens - 1
