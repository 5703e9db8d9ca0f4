"""What prefix caching saves, from counters and from what running requests hold."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_exporter.history import EngineHistory
from kvcache_exporter.prefix_sharing import PrefixSavings, PrefixSharing
from kvcache_exporter.readings import EngineReading
from kvcache_exporter.running_requests import AgeGroup
from kvcache_exporter.sources.vllm_page import parse_metrics

SERIES = Path(__file__).parent.parent.parent / "shared" / "captures" / "series" / "prefix-hits.metrics.jsonl.gz"


def cache(queries: int, hits: int) -> EngineReading:
    return EngineReading("0", prefix_cache_queries_tokens=queries, prefix_cache_hits_tokens=hits)


def savings(*, hits: int, running: float, held_tokens: float) -> PrefixSavings:
    """Of requests with 1000 tokens of prompt, `hits` of them found, that hold so much together just after their start."""
    sharing = PrefixSharing(300.0)
    sharing.observe(5.0, cache(0, 0), cache(10_000, 10 * hits))
    sharing.compare(5.0, 1000.0, [AgeGroup(0.0, running)], held_tokens)
    result = sharing.savings()
    assert result is not None
    return result


def test_nothing_is_said_before_a_prompt_was_looked_up() -> None:
    assert PrefixSharing(300.0).savings() is None


def test_hits_on_blocks_of_running_requests_are_shared() -> None:
    """10 requests that have 600 tokens in common hold them once: 600 + 10 * 400."""
    assert savings(hits=600, running=10.0, held_tokens=4600.0) == pytest.approx(PrefixSavings(0.6, 0.6))


def test_hits_on_blocks_that_nobody_held_save_tokens_and_no_blocks() -> None:
    assert savings(hits=600, running=10.0, held_tokens=10_000.0) == PrefixSavings(0.6, 0.0)


def test_short_prompts_without_a_hit_are_not_shared() -> None:
    assert savings(hits=0, running=10.0, held_tokens=5000.0) == PrefixSavings(0.0, 0.0)


def test_one_request_alone_shares_with_nobody() -> None:
    assert savings(hits=600, running=1.0, held_tokens=400.0) == PrefixSavings(0.6, 0.0)


@given(st.integers(0, 1000), st.floats(1, 50), st.floats(0, 60_000))
def test_no_more_is_shared_than_was_found(hits: int, running: float, held_tokens: float) -> None:
    result = savings(hits=hits, running=running, held_tokens=held_tokens)
    assert 0 <= result.shared_ratio <= result.hit_ratio <= 1


@pytest.mark.skipif(not SERIES.exists(), reason="needs the recorded series")
def test_recorded_engine_with_a_shared_prefix() -> None:
    """A real engine whose requests share a prefix: its counters say 0.72, and running ones hold about 0.6 of their need."""
    history = EngineHistory(300.0)
    with gzip.open(SERIES, "rt") as lines:
        pages = [json.loads(line) for line in lines]
    reading = EngineReading("0")
    for page in pages:
        (reading,) = parse_metrics(page["body"].encode()).engines
        history.observe(page["t"], reading)
        traffic = history.traffic(4096, 32)
    assert traffic.prefix is not None
    assert traffic.prefix.hit_ratio == pytest.approx(0.72, abs=0.03)
    assert 0.3 < traffic.prefix.shared_ratio < 0.7
    # Nothing runs at the end, so nothing is used, however warm the cache.
    assert reading.used_blocks == 0
