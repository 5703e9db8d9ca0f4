"""What the poller publishes: one immutable Snapshot of engines, GPUs and the health of every source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcache_exporter.capacity import Capacity
from kvcache_exporter.gpu_memory import MemorySplit
from kvcache_exporter.gpu_owners import EngineGpus
from kvcache_exporter.gpu_reading import GpuReading, NvmlReading
from kvcache_exporter.headroom import Headroom
from kvcache_exporter.kv_cache_spec import KVCacheLayout
from kvcache_exporter.memory_bandwidth import DecodeReads
from kvcache_exporter.prefix_sharing import PrefixSavings
from kvcache_exporter.readings import EngineReading
from kvcache_exporter.recent_latency import LatencyQuantiles
from kvcache_exporter.weights import Weights


@dataclass(frozen=True)
class EngineSnapshot:
    """One engine: what it reported and what follows from it. `model_name` is "" when nothing tells it.

    `layout_source` is `computed`, or `assumed` for an unknown architecture that was taken for a plain decoder; `weights_source`
    tells where `weights` come from. `state` is one of engine_state.STATES. `usage_suspect`: the engine reports a usage that
    cannot be true of the requests that it runs. `exhaustion_seconds` is when no typical request will fit at the present trend
    (inf: never), `offered_load_ratio` the share of the pool that present traffic needs, `offered_load_trend_per_second` how that
    changes. `gpus` are those that it is known to run on.
    """

    reading: EngineReading
    model_name: str
    layout: KVCacheLayout | None = None
    layout_source: str | None = None
    capacity: Capacity | None = None
    headroom: Headroom | None = None
    state: str | None = None
    usage_suspect: bool = False
    exhaustion_seconds: float | None = None
    offered_load_ratio: float | None = None
    offered_load_trend_per_second: float | None = None
    prefix: PrefixSavings | None = None
    weights: Weights | None = None
    weights_source: str | None = None
    decode_reads: DecodeReads | None = None
    time_to_first_token: LatencyQuantiles | None = None
    time_per_output_token: LatencyQuantiles | None = None
    gpus: EngineGpus | None = None
    memory_bandwidth_utilization_ratio: float | None = None


@dataclass(frozen=True)
class TargetSnapshot:
    """One target. `read_at` is when its page was read (Unix seconds); None means that the last poll gave no page.

    `pod` is where it runs in Kubernetes, as `namespace/pod` or `namespace/pod/container`; None where that is not told.
    """

    name: str
    url: str
    pod: str | None = None
    read_at: float | None = None
    engines: tuple[EngineSnapshot, ...] = ()
    vllm_version: str | None = None
    max_model_len: int | None = None
    max_model_len_source: str | None = None
    tensor_parallel_size: int | None = None
    max_num_seqs: int | None = None
    max_num_seqs_source: str | None = None


@dataclass(frozen=True)
class GpuSnapshot:
    """One GPU or MIG instance; `memory` is None where NVML has no figures of it."""

    reading: GpuReading
    memory: MemorySplit | None = None


@dataclass(frozen=True)
class SourceHealth:
    """Health of one source of one target; `target` is "" for a source of the whole machine (NVML).

    `errors` counts failures by reason since start. `message` is the sentence for the last failure, None when up.
    """

    target: str
    source: str
    up: bool
    last_success_at: float | None
    duration_seconds: float | None
    errors: Mapping[str, int]
    message: str | None


@dataclass(frozen=True)
class Snapshot:
    """Everything that one scrape shows. Times are Unix seconds."""

    at: float
    targets: tuple[TargetSnapshot, ...]
    health: tuple[SourceHealth, ...]
    nvml: NvmlReading | None = None
    gpus: tuple[GpuSnapshot, ...] = ()
    nvml_read_at: float | None = None
