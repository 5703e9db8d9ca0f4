"""Both pages at a moment at which the engine stood still, so that every number can be compared exactly."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine import BLOCK_SIZE, MAX_NUM_SEQS, Engine, LoggedStats
from exporter import Exporter
from page import Page
from tiny_model import BYTES_PER_TOKEN, MAX_MODEL_LEN

# The engine logs once a second; a moment more for the line to come through.
_LOG_SECONDS = 1.3


@dataclass(frozen=True)
class EngineSays:
    """The engine's own /metrics, in its own names."""

    page: Page

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks of the pool, the one that is never usable included."""
        return int(self.page.all("vllm:cache_config_info")[0].labels["num_gpu_blocks"])

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

    def waiting(self, reason: str) -> int:
        """Requests that wait for `capacity` or are `deferred`."""
        return int(self.page.value("vllm:num_requests_waiting_by_reason", reason=reason))

    @property
    def preemptions(self) -> int:
        """Requests that have lost their blocks since the engine started."""
        return int(self.page.value("vllm:num_preemptions_total"))

    def exporter_should_say(self, request_lengths: Sequence[int]) -> dict[str, float]:
        """Every series of this engine that the exporter shows, worked out from the engine's page and the facts of the model."""
        usable, used = self.num_gpu_blocks - 1, self.used_blocks
        block_bytes = BLOCK_SIZE * BYTES_PER_TOKEN
        counts = {
            "kvcache_capacity_blocks": usable,
            "kvcache_capacity_bytes": usable * block_bytes,
            "kvcache_capacity_tokens": self.num_gpu_blocks * BLOCK_SIZE,
            "kvcache_used_blocks": used,
            "kvcache_used_bytes": used * block_bytes,
            "kvcache_used_tokens": used * BLOCK_SIZE,
            "kvcache_usage_ratio": self.usage,
            "kvcache_headroom_blocks": usable - used,
            "kvcache_headroom_bytes": (usable - used) * block_bytes,
            "kvcache_headroom_tokens": (usable - used) * BLOCK_SIZE,
            "kvcache_bytes_per_token": BYTES_PER_TOKEN,
            "kvcache_capacity_mismatch_ratio": 0,
            "kvcache_requests_running": self.running,
            "kvcache_requests_waiting{capacity}": self.waiting("capacity"),
            "kvcache_requests_waiting{deferred}": self.waiting("deferred"),
            "kvcache_preemptions_total": self.preemptions,
            "kvcache_prefix_cache_query_tokens_total": self.page.value("vllm:prefix_cache_queries_total"),
            "kvcache_prefix_cache_hit_tokens_total": self.page.value("vllm:prefix_cache_hits_total"),
            "kvcache_reading_ambiguous": 0,
        }
        for length, tokens in {"max": MAX_MODEL_LEN, **{str(tokens): tokens for tokens in request_lengths}}.items():
            blocks = -(-tokens // BLOCK_SIZE)
            room = min((usable - used) // blocks, MAX_NUM_SEQS - self.running)
            counts[f"kvcache_request_length_tokens{{{length}}}"] = tokens
            counts[f"kvcache_request_slots{{{length}}}"] = min(usable // blocks, MAX_NUM_SEQS)
            counts[f"kvcache_remaining_request_slots{{{length}}}"] = 0 if self.waiting("capacity") else room
        return counts


def engine_series(page: Page) -> dict[str, float]:
    """Every series of an engine on a page of the exporter, but for the one that only carries labels."""
    own = {"target", "engine", "model_name"}
    series = {}
    for sample in page.samples:
        if "engine" in sample.labels and sample.name != "kvcache_engine_info":
            more = [value for label, value in sample.labels.items() if label not in own]
            series[sample.name + (f"{{{','.join(more)}}}" if more else "")] = sample.value
    return series


@dataclass(frozen=True)
class Frame:
    """One moment: the engine's page, the exporter's series, and the lines that the engine logged meanwhile."""

    engine: EngineSays
    exporter: Mapping[str, float]
    logged: Sequence[LoggedStats]

    def problems(self, request_lengths: Sequence[int]) -> list[str]:
        """Every number that is not the same on both sides."""
        expected = self.engine.exporter_should_say(request_lengths)
        names = sorted(expected.keys() | self.exporter.keys())
        problems = [
            f"{name}: {self.exporter.get(name)} instead of {expected.get(name)}"
            for name in names
            if self.exporter.get(name) != expected.get(name)
        ]
        for line in self.logged:
            if (line.usage_percent, line.running, line.waiting) != self.as_logged():
                problems.append(f"log: {line} instead of {self.as_logged()}")
        return problems

    def as_logged(self) -> tuple[str, int, int]:
        """Usage, running and waiting of the exporter, as vLLM prints them in its log."""
        says = self.exporter
        waiting = says["kvcache_requests_waiting{capacity}"] + says["kvcache_requests_waiting{deferred}"]
        return f"{says['kvcache_usage_ratio'] * 100:.1f}", int(says["kvcache_requests_running"]), int(waiting)


def still_frame(engine: Engine, exporter: Exporter) -> Frame:
    """Hold the engine still until the exporter has read it and the engine has logged it. Raises RuntimeError if it moved."""
    with engine.held_still():
        at = time.time()
        before = engine.page()
        exported = exporter.page_read_after(at)
        time.sleep(max(0.0, at + _LOG_SECONDS - time.time()))
        after = engine.page()
        logged = engine.stats_since(at)
    if _moving_part(before) != _moving_part(after):
        raise RuntimeError("the engine went on although it was held still")
    return Frame(EngineSays(after), engine_series(exported), logged)


def _moving_part(page: Page) -> list[tuple[str, float]]:
    return [(sample.name, sample.value) for sample in page.samples if sample.name.startswith("vllm:")]
