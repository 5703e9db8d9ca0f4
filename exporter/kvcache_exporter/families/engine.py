"""What is published of one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvcache_exporter.capacity import REPORTED
from kvcache_exporter.engine_state import STATES
from kvcache_exporter.families.family import Family, Labelled
from kvcache_exporter.limits import LIMITS
from kvcache_exporter.recent_latency import LatencyQuantiles
from kvcache_exporter.snapshot import EngineSnapshot, TargetSnapshot

_ENGINE_LABELS = ("target", "engine", "model_name")
_ABSENT_BLOCKS = "Absent when the engine does not report its blocks."
_NEEDS_LAYOUT = "Absent when config.json is not known or its architecture is not."


def _engine(
    name: str,
    documentation: str,
    read: Callable[[EngineSnapshot], float | None],
    *,
    is_counter: bool = False,
) -> Family:
    def one(engine: EngineSnapshot) -> Iterable[Labelled]:
        return [((), read(engine))]

    return Family(name, documentation, _ENGINE_LABELS, one, is_counter)


def _slots(name: str, documentation: str, read: Callable[..., float | None]) -> Family:
    def each(engine: EngineSnapshot) -> Iterator[Labelled]:
        for slots in () if engine.headroom is None else engine.headroom.slots:
            yield (slots.length,), read(slots)

    return Family(name, documentation, (*_ENGINE_LABELS, "length"), each)


def _one_of(
    name: str, documentation: str, label: str, values: Sequence[str], read: Callable[[EngineSnapshot], str | None]
) -> Family:
    """1 for the value that holds, 0 for the others, none of them when it is not known."""

    def each(engine: EngineSnapshot) -> Iterator[Labelled]:
        holds = read(engine)
        for value in () if holds is None else values:
            yield (value,), float(value == holds)

    return Family(name, documentation, (*_ENGINE_LABELS, label), each)


def _use(part: str, unit: str) -> Callable[[EngineSnapshot], float | None]:
    def read(engine: EngineSnapshot) -> float | None:
        use = None if engine.headroom is None else getattr(engine.headroom, part)
        return None if use is None else getattr(use, unit)

    return read


def _pool(attribute: str) -> Callable[[EngineSnapshot], float | None]:
    return lambda engine: None if engine.capacity is None else getattr(engine.capacity, attribute)


def _waiting(engine: EngineSnapshot) -> Iterator[Labelled]:
    by_reason = engine.reading.num_requests_waiting_by_reason
    if by_reason:
        for reason, number in by_reason.items():
            yield (reason,), number
    else:
        yield ("unknown",), engine.reading.num_requests_waiting


def _latency(name: str, documentation: str, read: Callable[[EngineSnapshot], LatencyQuantiles | None]) -> Family:
    def each(engine: EngineSnapshot) -> Iterator[Labelled]:
        quantiles = read(engine)
        if quantiles is not None:
            yield ("0.5",), quantiles.median
            yield ("0.95",), quantiles.p95

    return Family(name, documentation, (*_ENGINE_LABELS, "quantile"), each)


def _bandwidth(engine: EngineSnapshot) -> Iterator[Labelled]:
    if engine.decode_reads is not None:
        yield (engine.decode_reads.source,), engine.memory_bandwidth_utilization_ratio


ENGINE_FAMILIES = (
    _engine(
        "kvcache_capacity_blocks",
        "Blocks of the KV-cache pool that requests can hold: the engine's num_gpu_blocks without the null block (reported). "
        + _ABSENT_BLOCKS,
        _pool("usable_blocks"),
    ),
    _engine(
        "kvcache_capacity_bytes",
        "Bytes of the usable blocks over all ranks (computed from config.json). " + _NEEDS_LAYOUT,
        _pool("size_bytes"),
    ),
    _engine(
        "kvcache_capacity_tokens",
        "Tokens that the pool holds, as vLLM logs it, null block included (reported from vLLM 0.24 on, else computed "
        "from config.json; the label tokens_source of kvcache_engine_info tells). On a hybrid model an equivalent at "
        "max_model_len. Absent when neither is known.",
        _pool("tokens"),
    ),
    _engine(
        "kvcache_used_blocks",
        "Blocks held by live requests (from the engine's usage, which counts blocks, not tokens). Absent when usage is,"
        " or when the engine sleeps.",
        _use("used", "blocks"),
    ),
    _engine(
        "kvcache_used_bytes",
        "Bytes of the blocks held by live requests, over all ranks (computed from config.json). " + _NEEDS_LAYOUT,
        _use("used", "size_bytes"),
    ),
    _engine(
        "kvcache_used_tokens",
        "Token space of the blocks held by live requests, part-filled blocks counted whole. On a hybrid model an equivalent at "
        "max_model_len.",
        _use("used", "tokens"),
    ),
    _engine(
        "kvcache_usage_ratio",
        "Blocks held by live requests over usable blocks, 0-1 (reported). Absent before the first step of the engine, "
        "and when the engine says something that cannot be.",
        lambda engine: engine.reading.usage_ratio,
    ),
    _engine(
        "kvcache_headroom_blocks",
        "Blocks that no live request holds; cached prefixes that nobody uses count as free, as in vLLM. Absent when "
        "usage is, when the engine sleeps or is frozen, and when its usage cannot be true.",
        _use("free", "blocks"),
    ),
    _engine(
        "kvcache_headroom_bytes",
        "Bytes of the free blocks over all ranks (computed from config.json). " + _NEEDS_LAYOUT,
        _use("free", "size_bytes"),
    ),
    _engine(
        "kvcache_headroom_tokens",
        "Token space of the free blocks. On a hybrid model an equivalent at max_model_len.",
        _use("free", "tokens"),
    ),
    _slots(
        "kvcache_request_slots",
        "Requests of this length that the empty engine holds at once: usable blocks over blocks a request, rounded "
        "down, and at most max_num_seqs where that is known.",
        lambda slots: slots.slots,
    ),
    _slots(
        "kvcache_remaining_request_slots",
        "Further requests of this length that fit now without waiting and without preempting, rounded down: what running "
        "requests will still grow and what waits is served first, and seats count where max_num_seqs is known. typical is "
        "predicted from the requests of late; until the first has finished it is max, running requests are not taken to grow and "
        "each waiting one counts as one of max_model_len. Absent when usage is, and when the engine sleeps or is frozen.",
        lambda slots: slots.remaining,
    ),
    _slots(
        "kvcache_request_length_tokens",
        "Tokens (prompt and output) that the label length stands for: max is max_model_len (from /v1/models, else configured), "
        "typical the mean and p95 the 95th percentile of the requests of late (computed from the engine's histograms).",
        lambda slots: slots.tokens,
    ),
    _engine(
        "kvcache_headroom_ratio",
        "Remaining over all slots for typical requests, 0-1: how much more of this traffic fits. Absent when either is.",
        lambda engine: None if engine.headroom is None else engine.headroom.ratio,
    ),
    _one_of(
        "kvcache_binding_limit",
        "1 for what a growing load of typical requests meets first, else 0: kv_blocks, max_num_seqs (seats), state_slots "
        "(blocks, most of them states of a hybrid model), deferred (requests that wait for a transfer or an adapter hold the "
        "seats), compute (a queue stays although blocks and seats are free). Absent when it cannot be told.",
        "limit",
        LIMITS,
        lambda engine: None if engine.headroom is None else engine.headroom.binding_limit,
    ),
    _engine(
        "kvcache_exhaustion_seconds",
        "Predicted time until no typical request fits into the KV cache, at the present trend of traffic; +Inf when it never "
        "fills, 0 when it is full. Absent until traffic has been seen for some time.",
        lambda engine: engine.exhaustion_seconds,
    ),
    _engine(
        "kvcache_offered_load_ratio",
        "KV blocks that present arrivals, lengths and residence times need (Little's law) over usable blocks; above 1 the queue "
        "grows. Absent until traffic has been seen for some time.",
        lambda engine: engine.offered_load_ratio,
    ),
    _engine(
        "kvcache_offered_load_trend_per_second",
        "Change of kvcache_offered_load_ratio a second, where the requests of late show a trend (a rank test); 0 where they show "
        "none. Absent until traffic has been seen for some time.",
        lambda engine: engine.offered_load_trend_per_second,
    ),
    _one_of(
        "kvcache_engine_state",
        "1 for the state that the engine is in, else 0: serving, idle, starting (no usage reported yet), asleep (its cache is "
        "given back), frozen (requests are there and nothing has moved for a while: dead, stuck or its figures are stale).",
        "state",
        STATES,
        lambda engine: engine.state,
    ),
    _engine(
        "kvcache_usage_suspect",
        "1 when the engine reports a usage that cannot be true of the requests that it runs, else 0; no slots are then shown.",
        lambda engine: float(engine.usage_suspect),
    ),
    _engine(
        "kvcache_bytes_per_token",
        "Bytes that one more token of context takes, over all ranks (computed from config.json). " + _NEEDS_LAYOUT,
        lambda engine: None if engine.layout is None else engine.layout.bytes_per_token,
    ),
    _engine(
        "kvcache_bytes_per_request",
        "Bytes that a long running request holds whatever its length, over all ranks: windows, states and encoder output "
        "(computed from config.json); 0 for plain full attention. " + _NEEDS_LAYOUT,
        lambda engine: (
            None if engine.layout is None else engine.layout.fixed_blocks_of_live_request * engine.layout.bytes_per_block
        ),
    ),
    _engine(
        "kvcache_capacity_mismatch_ratio",
        "Capacity in tokens computed from config.json over the one that the engine reports, minus 1. Other than 0: "
        "config.json or a setting of this target is not the engine's. Absent when one of the two is not known.",
        _pool("mismatch_ratio"),
    ),
    _engine(
        "kvcache_requests_running",
        "Requests in the running batch (reported).",
        lambda engine: engine.reading.num_requests_running,
    ),
    Family(
        "kvcache_requests_waiting",
        "Requests in the queue, preempted ones included (reported): capacity waits for blocks or a seat, deferred for "
        "something else. vLLM before 0.20 does not tell the reason (unknown).",
        (*_ENGINE_LABELS, "reason"),
        _waiting,
    ),
    _engine(
        "kvcache_preemptions_total",
        "Requests that lost their blocks to others since the engine started (reported).",
        lambda engine: engine.reading.num_preemptions,
        is_counter=True,
    ),
    _engine(
        "kvcache_prefix_cache_query_tokens_total",
        "Prompt tokens looked up in the prefix cache (reported in tokens from vLLM 0.9 on; absent before).",
        lambda engine: engine.reading.prefix_cache_queries_tokens,
        is_counter=True,
    ),
    _engine(
        "kvcache_prefix_cache_hit_tokens_total",
        "Prompt tokens found in the prefix cache (reported in tokens from vLLM 0.9 on; absent before).",
        lambda engine: engine.reading.prefix_cache_hits_tokens,
        is_counter=True,
    ),
    _engine(
        "kvcache_prefix_cache_hit_ratio",
        "Share of the prompt tokens of late that was found in the prefix cache and not computed, 0-1 (reported counters). Absent "
        "before the first prompt, and where the engine does not tell.",
        lambda engine: None if engine.prefix is None else engine.prefix.hit_ratio,
    ),
    _engine(
        "kvcache_prefix_cache_shared_ratio",
        "Share of the prompt tokens of late that needed no block, since a running request held it, 0-1 (estimated from what "
        "running requests hold). Hits on blocks that nobody holds take them off the free ones, and save none. 0 on models whose "
        "requests need blocks of several groups.",
        lambda engine: None if engine.prefix is None else engine.prefix.shared_ratio,
    ),
    _latency(
        "kvcache_time_to_first_token_seconds",
        "Time from the arrival of a request to its first token, of late (from the engine's histogram, interpolated within a "
        "bucket). Absent when no request has started within window_seconds.",
        lambda engine: engine.time_to_first_token,
    ),
    _latency(
        "kvcache_time_per_output_token_seconds",
        "Time between two output tokens of a request, of late (from the engine's histogram, interpolated within a bucket). "
        "Absent when none was made within window_seconds.",
        lambda engine: engine.time_per_output_token,
    ),
    Family(
        "kvcache_memory_bandwidth_utilization_ratio",
        "Share, 0-1, of the peak memory bandwidth of the engine's GPUs that went into what decoding has to read, since the page "
        "before. source: reported (the engine's estimated_read_bytes_per_gpu) or computed (steps a second, each reading the "
        "weights and the held blocks once). What prompts read on top is not in it, so it is low while prefill is the work. "
        "Absent for mixtures of experts unless reported, on MIG instances, and where GPUs, weights or layout are not known.",
        (*_ENGINE_LABELS, "source"),
        _bandwidth,
    ),
    _engine(
        "kvcache_reading_ambiguous",
        "1 when the page held several samples of one gauge for this engine (API-server processes, Ray replicas) and the"
        " largest was taken: an upper bound, not the truth.",
        lambda engine: float(engine.reading.ambiguous),
    ),
)

ENGINE_GPU_INFO = Family(
    "kvcache_engine_gpu_info",
    "1 for each GPU of this machine that the engine runs on; method: configured, pod_resources (the kubelet gave it to the "
    "engine's container) or process (the engine's process holds memory there). Absent when none of these tells.",
    (*_ENGINE_LABELS, "gpu", "uuid", "method"),
    lambda engine, index_of: [
        ((index_of(uuid), uuid, engine.gpus.method), 1) for uuid in (() if engine.gpus is None else engine.gpus.uuids)
    ],
)

ENGINE_INFO = Family(
    "kvcache_engine_info",
    "1; what the numbers of this engine rest on. source: where the block count comes from; tokens_source and "
    "max_model_len_source likewise; max_num_seqs_source is configured, or default: vLLM's for this GPU. layout_source: "
    "computed by the rules of a known architecture, configured (bytes a token), or assumed for an unknown one that reads "
    "like a plain decoder, and where no dtype is stated. weights_source: configured, computed from config.json, or an even "
    "share of the checkpoint. An empty label is not known.",
    (
        *_ENGINE_LABELS,
        "source",
        "tokens_source",
        "max_model_len_source",
        "vllm_version",
        "attention",
        "layout_source",
        "weights_source",
        "cache_dtype",
        "block_size",
        "tensor_parallel_size",
        "max_num_seqs",
        "max_num_seqs_source",
        "prefix_caching",
        "simulated",
    ),
    lambda engine, target, simulated: [(_engine_info(engine, target, simulated), 1)],
)


def _engine_info(engine: EngineSnapshot, target: TargetSnapshot, simulated: str) -> tuple[str, ...]:
    reading, capacity, layout = engine.reading, engine.capacity, engine.layout
    values = (
        None if capacity is None else REPORTED,
        None if capacity is None else capacity.tokens_source,
        target.max_model_len_source,
        target.vllm_version,
        None if layout is None else ",".join(sorted({group.spec.kind for group in layout.groups})),
        engine.layout_source,
        engine.weights_source,
        reading.cache_dtype,
        reading.block_size,
        target.tensor_parallel_size,
        target.max_num_seqs,
        target.max_num_seqs_source,
        None if reading.enable_prefix_caching is None else str(reading.enable_prefix_caching).lower(),
        simulated,
    )
    return tuple("" if value is None else str(value) for value in values)
