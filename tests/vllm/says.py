"""The two sides of a comparison: an engine's own page, and the exporter's page about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from flags import MAX_MODEL_LEN, MAX_NUM_SEQS
from page import Page
from tiny_model import TinyModel

REQUEST_LENGTHS = (512, 1024)
_REMAINING = "kvcache_remaining_request_slots"
_FROM_THE_PAST = re.compile(
    r"\{(typical|p95)\}|_headroom_ratio|_binding_limit|_exhaustion_seconds|_offered_load_ratio|_engine_state|_usage_suspect"
    r"|_hit_ratio|_shared_ratio|_time_to_first_token_seconds|_time_per_output_token_seconds|_offered_load_trend_per_second"
)
SOURCES = ("model_config", "vllm", "vllm_models", "vllm_version")

# What the exporter's label `length` stands for, in tokens.
LENGTHS = {"max": MAX_MODEL_LEN, **{str(tokens): tokens for tokens in REQUEST_LENGTHS}}


@dataclass(frozen=True)
class EngineSays:
    """The engine's /metrics, in vLLM's names, and the model that it serves."""

    page: Page
    model: TinyModel

    @property
    def cache_config(self) -> Mapping[str, str]:
        """The labels about the cache."""
        return self.page.all("vllm:cache_config_info")[0].labels

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks of the pool, the null block that is never usable included."""
        return int(self.cache_config["num_gpu_blocks"])

    @property
    def usage(self) -> float:
        """Used over usable blocks, 0-1."""
        return self.page.value("vllm:kv_cache_usage_perc")

    @property
    def used_blocks(self) -> int:
        """Blocks that live requests hold."""
        return round(self.usage * (self.num_gpu_blocks - 1))

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return int(self.page.value("vllm:num_requests_running"))

    def waiting(self, reason: str = "capacity") -> int:
        """Requests that wait for `capacity` (blocks or a seat), or are `deferred`."""
        return int(self.page.value("vllm:num_requests_waiting_by_reason", reason=reason))

    @property
    def preemptions(self) -> int:
        """Requests that have lost their blocks since the engine started."""
        return int(self.page.value("vllm:num_preemptions_total"))

    @property
    def capacity_tokens(self) -> int:
        """The pool over the blocks of a request of full length, times that length, as vLLM has it."""
        return self.num_gpu_blocks * MAX_MODEL_LEN // self.model.admitted_blocks(MAX_MODEL_LEN)

    def tokens_in(self, blocks: int) -> int:
        """Tokens of so many blocks: of one group exactly, of several as a share of the capacity."""
        if len(self.model.group_block_sizes) == 1:
            return blocks * self.model.block_size
        return self.capacity_tokens * blocks // (self.num_gpu_blocks - 1)

    def exporter_should_say(self) -> dict[str, float]:
        """Every series that the exporter has to show of this engine, from the engine's page and the facts of the model."""
        model, usable, used = self.model, self.num_gpu_blocks - 1, self.used_blocks
        free = usable - used
        series = {
            "kvcache_capacity_blocks": usable,
            "kvcache_capacity_bytes": usable * model.block_bytes,
            "kvcache_capacity_tokens": self.capacity_tokens,
            "kvcache_used_blocks": used,
            "kvcache_used_bytes": used * model.block_bytes,
            "kvcache_used_tokens": self.tokens_in(used),
            "kvcache_usage_ratio": self.usage,
            "kvcache_headroom_blocks": free,
            "kvcache_headroom_bytes": free * model.block_bytes,
            "kvcache_headroom_tokens": self.tokens_in(free),
            "kvcache_bytes_per_token": model.block_bytes / model.block_size,
            "kvcache_bytes_per_request": model.held_outside_full_attention(MAX_MODEL_LEN) * model.block_bytes,
            "kvcache_capacity_mismatch_ratio": 0,
            "kvcache_requests_running": self.running,
            "kvcache_requests_waiting{capacity}": self.waiting("capacity"),
            "kvcache_requests_waiting{deferred}": self.waiting("deferred"),
            "kvcache_preemptions_total": self.preemptions,
            "kvcache_prefix_cache_query_tokens_total": self.page.value("vllm:prefix_cache_queries_total"),
            "kvcache_prefix_cache_hit_tokens_total": self.page.value("vllm:prefix_cache_hits_total"),
            "kvcache_reading_ambiguous": 0,
        }
        free_seats = max(0, MAX_NUM_SEQS - self.running - self.waiting())
        for length, tokens in LENGTHS.items():
            series[f"kvcache_request_length_tokens{{{length}}}"] = tokens
            series[f"kvcache_request_slots{{{length}}}"] = min(model.requests_in(usable, tokens), MAX_NUM_SEQS)
            series[f"kvcache_remaining_request_slots{{{length}}}"] = min(model.requests_in(free, tokens), free_seats)
        return series


@dataclass(frozen=True)
class ExporterSays:
    """The exporter's /metrics, with one engine on it or none."""

    page: Page

    @cached_property
    def series(self) -> dict[str, float]:
        """Every series of the engine, but for the one that only carries labels."""
        own = {"target", "engine", "model_name"}
        series = {}
        for sample in self.page.samples:
            if "engine" in sample.labels and sample.name != "kvcache_engine_info":
                more = ",".join(value for label, value in sample.labels.items() if label not in own)
                series[sample.name + (f"{{{more}}}" if more else "")] = sample.value
        return series

    @property
    def read_at(self) -> float:
        """When the exporter began to read the engine's page (Unix seconds); 0 when it never could."""
        return self.page.get("kvcache_last_success_timestamp_seconds", source="vllm") or 0.0

    @property
    def read_for(self) -> float:
        """How long that took (seconds)."""
        return self.page.value("kvcache_poll_duration_seconds", source="vllm")

    @property
    def sources_up(self) -> tuple[str, ...]:
        """Sources of the engine that answered at their last try."""
        up = [sample.labels for sample in self.page.all("kvcache_up") if sample.value == 1]
        return tuple(sorted(labels["source"] for labels in up if labels["target"]))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to find out about the engine."""
        return self.sources_up == SOURCES and bool(self.series)

    @property
    def slots(self) -> tuple[int, ...]:
        """Requests that the empty engine holds, for the longest and each further length."""
        return tuple(int(self.series[f"kvcache_request_slots{{{length}}}"]) for length in LENGTHS)

    @property
    def remaining(self) -> tuple[int, ...]:
        """Requests that still fit, for the longest and each further length."""
        return tuple(int(self.series[f"kvcache_remaining_request_slots{{{length}}}"]) for length in LENGTHS)

    @property
    def waiting(self) -> int:
        """Requests that wait for blocks or a seat."""
        return int(self.series["kvcache_requests_waiting{capacity}"])

    @property
    def as_logged(self) -> tuple[str, int, int]:
        """Usage in percent, running and waiting, as vLLM prints them in its log."""
        waiting = self.waiting + int(self.series["kvcache_requests_waiting{deferred}"])
        return f"{self.series['kvcache_usage_ratio'] * 100:.1f}", int(self.series["kvcache_requests_running"]), waiting


def differences(engine: EngineSays, exporter: ExporterSays) -> list[str]:
    """Every number of the engine that the two sides do not have in common.

    What rests on the past of the engine cannot be had from one page. Slots that remain are no more than fit into what is free.
    """
    expected, shown = engine.exporter_should_say(), exporter.series
    names = sorted(name for name in expected.keys() | shown.keys() if not _FROM_THE_PAST.search(name))
    return [
        f"{name}: {shown.get(name)} instead of {expected.get(name)}"
        for name in names
        if shown.get(name) != expected.get(name)
        and not (name.startswith(_REMAINING) and 0 <= shown.get(name, -1) <= expected.get(name, 0))
    ]
