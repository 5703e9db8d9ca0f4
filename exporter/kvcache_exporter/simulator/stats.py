"""What the simulated engine counts: the counters and histograms of vLLM's `v1/metrics/stats.py` that its page shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvcache_exporter.simulator.histogram import Histogram, HistogramReading, one_two_five

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True)
class EngineStats:
    """What the engine's metrics tell at one moment; counters and histograms count from its start.

    `kv_cache_usage` is 0-1 of the usable blocks. `histograms` maps the metric name without `vllm:` to its state: seconds where
    the name ends so, counts of tokens or preemptions for the others.
    """

    num_requests_running: int
    num_requests_waiting: int
    used_blocks: int
    kv_cache_usage: float
    num_preemptions: int
    num_requests_finished: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries_tokens: int
    histograms: Mapping[str, HistogramReading]


@dataclass(frozen=True)
class FinishedRequest:
    """The life of one request; times are seconds of the engine's clock, `scheduled` the first of its admissions."""

    prompt_tokens: int
    output_tokens: int
    num_preemptions: int
    arrival: float
    scheduled: float
    first_token: float
    last_token: float


class EngineHistograms:
    """The histograms of one engine, each with vLLM's buckets."""

    def __init__(self, max_model_len: int) -> None:
        token_bounds = one_two_five(max_model_len)
        self._histograms = {
            "request_prompt_tokens": Histogram(token_bounds),
            "request_generation_tokens": Histogram(token_bounds),
            "iteration_tokens_total": Histogram(_STEP_TOKENS),
            "request_max_num_generation_tokens": Histogram(token_bounds),
            "request_params_max_tokens": Histogram(token_bounds),
            "time_to_first_token_seconds": Histogram(_FIRST_TOKEN_SECONDS),
            "inter_token_latency_seconds": Histogram(_TOKEN_SECONDS),
            "request_time_per_output_token_seconds": Histogram(_TOKEN_SECONDS),
            "e2e_request_latency_seconds": Histogram(_REQUEST_SECONDS),
            "request_queue_time_seconds": Histogram(_REQUEST_SECONDS),
            "request_inference_time_seconds": Histogram(_REQUEST_SECONDS),
            "request_prefill_time_seconds": Histogram(_REQUEST_SECONDS),
            "request_decode_time_seconds": Histogram(_REQUEST_SECONDS),
            "request_num_preemptions": Histogram(_PREEMPTIONS),
            "request_prefill_kv_computed_tokens": Histogram(token_bounds),
        }

    def observe_step(self, num_tokens: int) -> None:
        """Count one engine step that computed `num_tokens`."""
        self._histograms["iteration_tokens_total"].observe(num_tokens)

    def observe_first_token(self, seconds: float) -> None:
        """Count a request's first token, `seconds` after its arrival."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def observe_next_token(self, seconds: float) -> None:
        """Count a further token, `seconds` after the one before."""
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def observe_finished(self, request: FinishedRequest) -> None:
        """Count a request that is done; prompts share no prefix here, so all of its prompt was computed."""
        decode_seconds = request.last_token - request.first_token
        observations = {
            "request_prompt_tokens": request.prompt_tokens,
            "request_generation_tokens": request.output_tokens,
            "request_max_num_generation_tokens": request.output_tokens,
            "request_params_max_tokens": request.output_tokens,
            "request_time_per_output_token_seconds": decode_seconds / max(request.output_tokens - 1, 1),
            "e2e_request_latency_seconds": request.last_token - request.arrival,
            "request_queue_time_seconds": request.scheduled - request.arrival,
            "request_inference_time_seconds": request.last_token - request.scheduled,
            "request_prefill_time_seconds": request.first_token - request.scheduled,
            "request_decode_time_seconds": decode_seconds,
            "request_num_preemptions": request.num_preemptions,
            "request_prefill_kv_computed_tokens": request.prompt_tokens,
        }
        for name, value in observations.items():
            self._histograms[name].observe(value)

    def read(self) -> Mapping[str, HistogramReading]:
        """Return the present state of each, by metric name without `vllm:`."""
        return MappingProxyType({name: histogram.read() for name, histogram in self._histograms.items()})
