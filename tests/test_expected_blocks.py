"""Blocks that requests will hold: those that run, those that wait, and more that come."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_exporter.expected_blocks import RequestBlocks, expected_blocks, fullest, requests_that_fit
from kvcache_exporter.kv_cache_spec import EngineConfig, KVCacheLayout, kv_cache_layout
from kvcache_exporter.length_distribution import LengthDistribution, length_distribution
from kvcache_exporter.model_config import parse_model_config
from kvcache_exporter.request_mix import RequestMix
from kvcache_exporter.running_requests import AgeGroup
from lab import LLAMA_8B

LLAMA = kv_cache_layout(parse_model_config(LLAMA_8B), EngineConfig(block_size=16))
MODELS = Path(__file__).parent / "data" / "models"


def exactly(tokens: float) -> LengthDistribution:
    """All requests about that long."""
    distribution = length_distribution((tokens - 1, tokens), [0.0, 1.0, 0.0], tokens - 0.5)
    assert distribution is not None
    return distribution


def mix_of(prompt: float, output: float) -> RequestMix:
    return RequestMix(prompt, exactly(prompt), exactly(output))


def fit(room: float, *, mix: RequestMix, ages: tuple[AgeGroup, ...] = (), used: int = 0, waiting: int = 0) -> float:
    expected = expected_blocks(RequestBlocks(LLAMA), mix, ages, used, 8192)
    return requests_that_fit(expected, room, waiting=waiting, queue_spread=0, cost_factor=1, admission_extra=0)


def test_a_request_counts_with_what_it_holds_at_its_largest() -> None:
    """160 tokens of prompt and 160 of output: 20 blocks and half a one at the end, not 10 at the start."""
    assert fit(1000, mix=mix_of(160, 160)) == pytest.approx(1000 / 20.5, rel=0.03)


def test_growth_of_running_requests_is_paid_first() -> None:
    """10 requests that are at the start of 160 tokens of output will each take 10 more blocks."""
    young = (AgeGroup(0.0, 10.0),)
    old = (AgeGroup(158.0, 10.0),)
    mix = mix_of(160, 160)
    assert fit(500, mix=mix, ages=young, used=105) == pytest.approx((500 - 205) / 20.5, rel=0.05)
    # Those that are about to end leave their room to what comes, which needs it later.
    assert fit(500, mix=mix, ages=old, used=205) == pytest.approx(500 / 20.5, rel=0.05)


def test_waiting_requests_are_served_first() -> None:
    mix = mix_of(160, 160)
    assert fit(500, mix=mix, waiting=4) == pytest.approx(fit(500, mix=mix) - 4)


def test_blocks_held_with_nothing_running_stay_held() -> None:
    """A prefill engine keeps blocks until they are handed over."""
    mix = mix_of(160, 160)
    assert fit(500, mix=mix, used=205) == pytest.approx((500 - 205) / 20.5, rel=0.03)


def test_now_the_running_ones_hold_what_the_engine_reports() -> None:
    expected = expected_blocks(RequestBlocks(LLAMA), mix_of(160, 160), (AgeGroup(30.0, 7.0),), 123, 8192)
    assert expected.running[0] == pytest.approx(123)
    assert fullest(expected) >= 123


def layouts() -> list[KVCacheLayout]:
    found = [LLAMA]
    for file in sorted(MODELS.glob("*.json"))[:12]:
        try:
            found.append(kv_cache_layout(parse_model_config(json.loads(file.read_text())), EngineConfig(block_size=16)))
        except Exception:  # any model of which there is a layout will do
            continue
    return found


@pytest.mark.parametrize("layout", layouts())
def test_average_blocks_are_those_of_real_requests(layout: KVCacheLayout) -> None:
    """Over a block's worth of lengths, the average is what blocks_for_request gives, hybrids and windows too."""
    blocks = RequestBlocks(layout)
    step = layout.tokens_per_block or layout.block_size
    for start in (step, 5 * step, 40 * step):
        lengths = range(start + 1, start + step + 1)
        exact = sum(layout.blocks_for_request(length) for length in lengths) / step
        average = sum(blocks.held(length) for length in lengths) / step
        assert average == pytest.approx(exact, abs=0.51 * len(layout.groups))


@settings(max_examples=50)
@given(st.floats(1, 4000), st.floats(2, 2000), st.integers(0, 3000), st.integers(0, 50))
def test_more_room_and_fewer_running_never_leave_less(prompt: float, output: float, used: int, running: int) -> None:
    mix = mix_of(max(2.0, prompt), output)
    ages = (AgeGroup(0.0, float(running)),) if running else ()
    here = fit(4000, mix=mix, ages=ages, used=used)
    assert fit(5000, mix=mix, ages=ages, used=used) >= here
    assert fit(4000, mix=mix) >= here - 1e-9
    assert fit(4000, mix=replace(mix, prompt_mean=mix.prompt_mean * 2), ages=ages, used=used) <= here or here < 0
