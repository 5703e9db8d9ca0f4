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
    # Of hybrids and windows vLLM's figure is an equivalent that rests on flags which no page shows: only its own will do.
    if reported is None and layout is not None and layout.tokens_per_block is not None:
        computed = kv_cache_size_tokens(layout, reading.num_gpu_blocks, max_model_len)
    tokens = computed if reported is None else reported
    return Capacity(
        usable_blocks=reading.usable_blocks,
        size_bytes=None if layout is None else reading.usable_blocks * layout.bytes_per_block,
        tokens=tokens,
        tokens_source=None if tokens is None else (COMPUTED if reported is None else REPORTED),
        mismatch_ratio=_mismatch_ratio(reading, layout, max_model_len),
    )


def _mismatch_ratio(reading: EngineReading, layout: KVCacheLayout | None, max_model_len: int | None) -> float | None:
    """Computed over reported tokens, minus 1; both are the pool over the blocks of a max_model_len request, times that length.

    What windows reserve for tokens in flight depends on flags that are on no page: anything from none to all is taken as right.
    """
    if layout is None or max_model_len is None or reading.kv_cache_max_concurrency is None:
        return None
    reported = blocks_per_max_len_request(reading, layout, max_model_len)
    if reported is None:
        return None
    least, most = _reserved_range(layout, max_model_len)
    return reported / min(max(reported, least), most) - 1


def _reserved_range(layout: KVCacheLayout, max_model_len: int) -> tuple[int, int]:
    """Blocks of a max_model_len request with nothing and with everything in flight."""
    return layout.reserved_blocks(max_model_len, in_flight_tokens=1), layout.reserved_blocks(
        max_model_len, in_flight_tokens=max_model_len
    )


def num_gpu_blocks_for(layout: KVCacheLayout, available_bytes_per_rank: int) -> int:
    """Blocks that vLLM cuts from the memory that each rank has for the cache, null block included; the tightest stage decides."""
    return min(available_bytes_per_rank // size for size in layout.bytes_per_block_per_rank if size)


def max_concurrency(layout: KVCacheLayout, num_gpu_blocks: int, max_model_len: int) -> float:
    """Requests of max_model_len that vLLM says fit, null block and in-flight reserve counted."""
    return num_gpu_blocks / layout.reserved_blocks(max_model_len)


def kv_cache_size_tokens(layout: KVCacheLayout, num_gpu_blocks: int, max_model_len: int | None) -> int | None:
    """Tokens that vLLM logs as "GPU KV cache size"; None when it depends on a max_model_len that is not known.

    vLLM 0.22 and later: concurrency at max_model_len times max_model_len. Before: blocks over groups, times the smallest block.
    """
    if layout.engine.vllm_version < (0, 22):
        smallest = min(group.spec.block_size for group in layout.groups)
        return num_gpu_blocks // len(layout.groups) * smallest * layout.engine.decode_context_parallel_size
    if max_model_len is None:
        return None if layout.tokens_per_block is None else num_gpu_blocks * layout.tokens_per_block
    return int(max_concurrency(layout, num_gpu_blocks, max_model_len) * max_model_len)


def requests_that_fit(blocks: int, *, admitted: int, held: int) -> int:
    """Requests that can be started in so many blocks, one after the other, and all go on.

    `admitted` blocks have to be free for one to start, `held` it keeps. The two differ where layers have a window: while its
    prompt is read, a request needs more than its windows.
    """
    return 0 if blocks < admitted else (blocks - admitted) // held + 1


def blocks_per_max_len_request(reading: EngineReading, layout: KVCacheLayout | None, max_model_len: int | None) -> int | None:
    """Blocks that vLLM sets aside for one request of max_model_len tokens.

    The engine's own `kv_cache_max_concurrency` is num_gpu_blocks over exactly this count, so it wins where it is there.
    """
    if reading.kv_cache_max_concurrency and reading.num_gpu_blocks:
        return max(1, round(reading.num_gpu_blocks / reading.kv_cache_max_concurrency))
    if layout is not None and max_model_len is not None:
        return layout.reserved_blocks(max_model_len)
    return None
