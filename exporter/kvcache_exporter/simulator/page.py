"""The /metrics page of the simulated engine, in the form in which vLLM 0.32 shows the same figures.

Families, labels and their order follow that version's `v1/metrics/loggers.py` with a single API server, so with the `_created`
gauges that the Prometheus client adds there. Families that tell nothing of the KV cache or the requests are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvcache_exporter.simulator.histogram import HistogramReading
from kvcache_exporter.simulator.parameters import EngineParameters
from kvcache_exporter.simulator.stats import EngineStats

_Sample = tuple[str, Mapping[str, str], float]

_NOTICE = "# SIMULATED: no model and no GPU is behind these numbers; they come from the simulated engine of kvcache-exporter.\n"

_HISTOGRAM_HELP = {
    "request_prompt_tokens": "Prompt length of finished requests.",
    "request_generation_tokens": "Output length of finished requests.",
    "iteration_tokens_total": "Tokens computed in one engine step.",
    "request_max_num_generation_tokens": "Longest output that a finished request asked for.",
    "request_params_max_tokens": "The max_tokens parameter of finished requests.",
    "time_to_first_token_seconds": "Time from arrival to the first token.",
    "inter_token_latency_seconds": "Time between two tokens of a request.",
    "request_time_per_output_token_seconds": "Mean time between tokens of a finished request.",
    "e2e_request_latency_seconds": "Time from arrival to the end of a request.",
    "request_queue_time_seconds": "Time that a request waited before it was first scheduled.",
    "request_inference_time_seconds": "Time from first scheduling to the last token.",
    "request_prefill_time_seconds": "Time from first scheduling to the first token.",
    "request_decode_time_seconds": "Time from the first to the last token.",
    "request_num_preemptions": "How often a finished request was preempted.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of a finished request whose KV was computed, not cached.",
}

# Labels of cache_config_info that say the same on every page of this engine.
_FIXED_CACHE_CONFIG = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "True",
    "engine": "0",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_memory_bytes": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "auto",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "False",
}


def render_page(stats: EngineStats, parameters: EngineParameters, *, model_name: str, created: float) -> str:
    """Return the body of /metrics; `created` is the Unix time at which the engine started.

    The first line is a comment that says that the engine is simulated.
    """
    return _NOTICE + "".join(_families(stats, parameters, model_name, created))


def _families(stats: EngineStats, parameters: EngineParameters, model_name: str, created: float) -> Iterator[str]:
    page = _Page({"engine": "0", "model_name": model_name}, created)
    waiting = stats.num_requests_waiting
    prompt_tokens = stats.prompt_tokens
    yield page.gauge("num_requests_running", "Requests in the running batch.", stats.num_requests_running)
    yield page.gauge("num_requests_waiting", "Requests in the waiting queue, preempted ones included.", waiting)
    yield page.gauge_by(
        "num_requests_waiting_by_reason",
        "Waiting requests by what they wait for.",
        "reason",
        {"capacity": waiting, "deferred": 0},
    )
    yield page.gauge_by(
        "engine_sleep_state",
        "1 for the sleep state that the engine is in, else 0.",
        "sleep_state",
        {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
    )
    yield page.gauge("kv_cache_usage_perc", "Share of the usable blocks that requests hold, 0 to 1.", stats.kv_cache_usage)
    yield page.counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_queries_tokens)
    yield page.counter("prefix_cache_hits", "Tokens found in the prefix cache.", 0)
    yield page.counter("external_prefix_cache_queries", "Tokens looked up through a KV connector.", 0)
    yield page.counter("external_prefix_cache_hits", "Tokens found through a KV connector.", 0)
    yield page.counter("num_preemptions", "Preemptions.", stats.num_preemptions)
    yield page.counter("prompt_tokens", "Prompt tokens of the requests that have their first token.", prompt_tokens)
    yield page.counter_by(
        "prompt_tokens_by_source",
        "Prompt tokens by where their KV came from.",
        "source",
        {"local_compute": prompt_tokens, "local_cache_hit": 0, "external_kv_transfer": 0},
    )
    yield page.counter("prompt_tokens_cached", "Prompt tokens whose KV was found in a cache.", 0)
    yield page.counter_by(
        "prompt_tokens_cached_by_source",
        "Cached prompt tokens by the tier that held them.",
        "source",
        dict.fromkeys(("device", "host", "p2p", "disk", "external_unspecified"), 0),
    )
    yield page.counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
    yield page.counter_by(
        "request_success",
        "Finished requests by what ended them.",
        "finished_reason",
        {"stop": 0, "length": stats.num_requests_finished, "abort": 0, "error": 0, "repetition": 0},
    )
    for name, help_text in _HISTOGRAM_HELP.items():
        yield page.histogram(name, help_text, stats.histograms[name])
    yield _family("cache_config_info", "gauge", "Settings of the KV cache.", [("", _cache_config(parameters), 1)])


def _cache_config(parameters: EngineParameters) -> dict[str, str]:
    # As in vLLM, both figures count the null block: `v1/core/kv_cache_utils.py`.
    max_concurrency = parameters.num_gpu_blocks / parameters.blocks_per_max_request
    return {
        **_FIXED_CACHE_CONFIG,
        "block_size": str(parameters.block_size),
        "effective_attention_block_size": str(parameters.block_size),
        "kv_cache_max_concurrency": str(max_concurrency),
        "kv_cache_size_tokens": str(int(max_concurrency * parameters.max_model_len)),
        "num_gpu_blocks": str(parameters.num_gpu_blocks),
    }


class _Page:
    """Writes families whose samples carry the engine's labels."""

    def __init__(self, labels: Mapping[str, str], created: float) -> None:
        self._labels = labels
        self._created = created

    def gauge(self, name: str, help_text: str, value: float) -> str:
        return _family(name, "gauge", help_text, [("", self._labels, value)])

    def gauge_by(self, name: str, help_text: str, label: str, values: Mapping[str, float]) -> str:
        return _family(name, "gauge", help_text, [("", {**self._labels, label: key}, value) for key, value in values.items()])

    def counter(self, name: str, help_text: str, value: int) -> str:
        total = _family(f"{name}_total", "counter", help_text, [("", self._labels, value)])
        return total + self._created_family(name, help_text, [self._labels])

    def counter_by(self, name: str, help_text: str, label: str, values: Mapping[str, int]) -> str:
        labels = [{**self._labels, label: key} for key in values]
        samples = [("", labels, value) for labels, value in zip(labels, values.values(), strict=True)]
        return _family(f"{name}_total", "counter", help_text, samples) + self._created_family(name, help_text, labels)

    def histogram(self, name: str, help_text: str, reading: HistogramReading) -> str:
        bounds = [*map(_number, reading.bounds), "+Inf"]
        samples: list[_Sample] = [
            ("_bucket", {**self._labels, "le": bound}, count)
            for bound, count in zip(bounds, reading.cumulative_counts, strict=True)
        ]
        samples += [("_count", self._labels, reading.count), ("_sum", self._labels, reading.sum)]
        return _family(name, "histogram", help_text, samples) + self._created_family(name, help_text, [self._labels])

    def _created_family(self, name: str, help_text: str, label_sets: Sequence[Mapping[str, str]]) -> str:
        return _family(f"{name}_created", "gauge", help_text, [("", labels, self._created) for labels in label_sets])


def _family(name: str, kind: str, help_text: str, samples: Sequence[_Sample]) -> str:
    lines = [f"# HELP vllm:{name} {help_text}", f"# TYPE vllm:{name} {kind}"]
    lines += [f"vllm:{name}{suffix}{{{_labels(labels)}}} {_number(value)}" for suffix, labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(labels.items()))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    """Write a number >= 0 as the Prometheus client does: `3.0`, and from a million on with an exponent, `1.25e+06`."""
    text = repr(float(value))
    whole, _, fraction = text.partition(".")
    if len(whole) <= 6 or "e" in text:
        return text
    mantissa = f"{whole[0]}.{whole[1:]}{fraction}".rstrip("0").rstrip(".")
    return f"{mantissa}e+{len(whole) - 1:02d}"
