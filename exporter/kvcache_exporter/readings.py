"""What the sources read: immutable values that cross from `sources/` into the core.

Every field that is not known is None. Ratios are 0-1, sizes are bytes, block counts are whole blocks of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NO_COUNTS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Histogram:
    """Observations by size, in the unit of the field that holds them (tokens or seconds), since the engine started.

    `bounds` are the finite upper bounds, rising, in that unit. `counts` has the observations at or below each bound, and all of
    them last (+Inf), so it is one longer. `sum` is all observations added up, in that unit.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """All observations."""
        return self.counts[-1]


@dataclass(frozen=True)
class EngineReading:
    """One vLLM engine (one data-parallel rank) as its /metrics page describes it.

    `num_gpu_blocks` is vLLM's own count for this engine, null block included; `usable_blocks` is what requests can hold, and
    `used_blocks` what they hold now. `kv_cache_size_tokens` and `kv_cache_max_concurrency` are the engine's own figures
    (vLLM 0.24 and later). `ambiguous` is set when the page held several different samples for this engine and the largest was
    taken. `awake` is None when the page does not tell (vLLM before 0.11).

    Both histograms of tokens have one observation for each finished request; `request_success` counts these requests, however
    they finished. `external_prefix_cache_*` is of the KV connector. `process_start_time_seconds` (Unix time) is of the API
    server, so the same for all engines of a page, and unknown where it is several processes. The LoRA figures are known on
    pages of one engine: `max_lora` adapters can run at once, `running_lora_adapters` do.

    `engine_steps` counts the iterations of the scheduler, `estimated_read_bytes_per_gpu` the bytes that the engine reckons each
    of its GPUs to have read (vLLM with `--enable-mfu-metrics`; 0 where it cannot).
    """

    engine: str
    model_name: str | None = None
    usage_ratio: float | None = None
    num_gpu_blocks: int | None = None
    usable_blocks: int | None = None
    used_blocks: int | None = None
    block_size: int | None = None
    cache_dtype: str | None = None
    enable_prefix_caching: bool | None = None
    mamba_cache_mode: str | None = None
    mamba_page_size_padded: int | None = None
    mamba_cache_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    num_requests_running: int | None = None
    num_requests_waiting: int | None = None
    num_requests_waiting_by_reason: Mapping[str, int] = field(default_factory=lambda: _NO_COUNTS)
    num_preemptions: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    prefix_cache_queries_tokens: int | None = None
    prefix_cache_hits_tokens: int | None = None
    external_prefix_cache_queries_tokens: int | None = None
    external_prefix_cache_hits_tokens: int | None = None
    request_success: int | None = None
    request_prompt_tokens: Histogram | None = None
    request_generation_tokens: Histogram | None = None
    time_to_first_token_seconds: Histogram | None = None
    inter_token_latency_seconds: Histogram | None = None
    process_start_time_seconds: float | None = None
    engine_steps: int | None = None
    estimated_read_bytes_per_gpu: float | None = None
    max_lora: int | None = None
    running_lora_adapters: int | None = None
    awake: bool | None = None
    ambiguous: bool = False


@dataclass(frozen=True)
class PageReading:
    """One /metrics page: its engines in order, and how many samples were dropped because their value cannot be true.

    A histogram that cannot be true counts as one sample.
    """

    engines: tuple[EngineReading, ...]
    invalid_samples: int = 0


@dataclass(frozen=True)
class ServedModel:
    """What /v1/models says of the base model: its first served name, `max_model_len` (tokens), `root` (a path or hub name)."""

    model_name: str | None = None
    max_model_len: int | None = None
    root: str | None = None
