"""Capacity and headroom of one engine, from a reading and a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_exporter.capacity import COMPUTED, REPORTED, capacity_of
from kvcache_exporter.headroom import Headroom, headroom_of
from kvcache_exporter.history import EngineHistory
from kvcache_exporter.kv_cache_spec import EngineConfig, KVCacheLayout, kv_cache_layout
from kvcache_exporter.limits import AdmissionLimits
from kvcache_exporter.model_config import parse_model_config
from kvcache_exporter.readings import EngineReading, Histogram
from lab import LLAMA_8B

LAYOUT = kv_cache_layout(parse_model_config(LLAMA_8B), EngineConfig(block_size=16))


def reading(usable: int = 1000, used: int | None = 400, **fields: Any) -> EngineReading:
    return EngineReading("0", num_gpu_blocks=usable + 1, usable_blocks=usable, used_blocks=used, **fields)


def headroom(engine: EngineReading, layout: KVCacheLayout | None = LAYOUT, **settings: Any) -> Headroom:
    capacity = capacity_of(engine, layout, settings.get("max_model_len"))
    assert capacity is not None
    limits = AdmissionLimits(max_num_seqs=settings.pop("max_num_seqs", None))
    defaults: dict[str, Any] = {"max_model_len": None, "limits": limits, "request_lengths": ()}
    return headroom_of(engine, capacity, layout, **{**defaults, **settings})


def slots(result: Headroom) -> dict[str, tuple[int, int | None]]:
    return {entry.length: (entry.slots, entry.remaining) for entry in result.slots}


def test_reported_tokens_win_over_computed_ones() -> None:
    reported = capacity_of(reading(kv_cache_size_tokens=15_000), LAYOUT, 8192)
    computed = capacity_of(reading(), LAYOUT, 8192)
    assert reported is not None
    assert (reported.tokens, reported.tokens_source) == (15_000, REPORTED)
    assert computed is not None
    assert (computed.tokens, computed.tokens_source) == (16_016, COMPUTED)


def test_capacity_is_absent_without_a_block_count() -> None:
    assert capacity_of(EngineReading("0", usage_ratio=0.5), LAYOUT, 8192) is None


def test_mismatch_tells_that_the_config_is_not_the_engines() -> None:
    """An engine whose own concurrency says that a request takes half the blocks that config.json says."""
    engine = reading(usable=1023, kv_cache_size_tokens=32_768, kv_cache_max_concurrency=32.0)
    capacity = capacity_of(engine, LAYOUT, 1024)
    assert capacity is not None
    assert capacity.mismatch_ratio == pytest.approx(-0.5)


def test_used_and_free_add_up_in_every_unit() -> None:
    result = headroom(reading())
    assert result.used is not None
    assert result.free is not None
    assert (result.used.blocks, result.free.blocks) == (400, 600)
    assert (result.used.tokens, result.free.tokens) == (6400, 9600)
    assert (result.used.size_bytes, result.free.size_bytes) == (400 * 16 * 131_072, 600 * 16 * 131_072)


def test_slots_of_each_length() -> None:
    result = headroom(reading(), max_model_len=8192, request_lengths=(160, 1024))
    assert slots(result) == {"max": (1, 1), "160": (100, 60), "1024": (15, 9)}


def test_length_that_the_engine_refuses_has_no_slots() -> None:
    assert slots(headroom(reading(), max_model_len=1024, request_lengths=(2048,))) == {"max": (15, 9)}


def test_engines_own_concurrency_gives_the_cost_of_the_longest_request() -> None:
    """Without any config.json: num_gpu_blocks over kv_cache_max_concurrency is what one request takes."""
    result = headroom(reading(usable=29_999, used=12_000, kv_cache_max_concurrency=12.5), layout=None)
    assert slots(result) == {"max": (12, 7)}


def test_seats_limit_slots() -> None:
    engine = reading(num_requests_running=30)
    assert slots(headroom(engine, max_num_seqs=32, request_lengths=(16,))) == {"16": (32, 2)}


def test_more_running_than_seats_leaves_none_and_not_less() -> None:
    engine = reading(num_requests_running=40)
    assert slots(headroom(engine, max_num_seqs=32, request_lengths=(16,))) == {"16": (32, 0)}


CAPACITY_1 = {"num_requests_waiting": 3, "num_requests_waiting_by_reason": {"capacity": 1, "deferred": 2}}


@pytest.mark.parametrize("queue", [{"num_requests_waiting": 1}, CAPACITY_1])
def test_nothing_is_left_while_one_waits_for_blocks(queue: dict[str, Any]) -> None:
    """599 free blocks are too few for a waiting request of 600: none is left for a new one, however short."""
    engine = reading(used=401, num_requests_running=4, **queue)
    result = headroom(engine, max_model_len=9600, max_num_seqs=32, request_lengths=(16,))
    assert slots(result) == {"max": (1, 0), "16": (32, 0)}


@pytest.mark.parametrize(("queue", "seats"), [({"num_requests_waiting": 1}, 27), (CAPACITY_1, 25)])
def test_a_waiting_request_is_served_first(queue: dict[str, Any], seats: int) -> None:
    """One that waits although there is room for it (the step's token budget was spent) takes its room at full length, no more.

    Deferred ones hold seats too.
    """
    engine = reading(num_requests_running=4, **queue)
    result = headroom(engine, max_model_len=1600, max_num_seqs=32, request_lengths=(800, 16))
    assert slots(result) == {"max": (10, 5), "800": (20, 10), "16": (32, seats)}


def test_queue_of_unknown_cost_leaves_nothing() -> None:
    """Without max_model_len, or without the number of seats, it cannot be told what the queue waits for."""
    queue = {"num_requests_running": 4, "num_requests_waiting": 1}
    assert slots(headroom(reading(**queue), max_num_seqs=32, request_lengths=(16,))) == {"16": (32, 0)}
    assert slots(headroom(reading(**queue), max_model_len=1600, request_lengths=(16,))) == {"max": (10, 0), "16": (1000, 0)}


def test_a_deferred_request_does_not_wait_for_blocks() -> None:
    queue: dict[str, Any] = {"num_requests_waiting": 2, "num_requests_waiting_by_reason": {"capacity": 0, "deferred": 2}}
    assert slots(headroom(reading(**queue), request_lengths=(16,))) == {"16": (1000, 600)}


def test_without_usage_the_empty_engine_is_still_known() -> None:
    result = headroom(reading(used=None), request_lengths=(16,))
    assert (result.used, result.free, slots(result)) == (None, None, {"16": (1000, None)})


def test_headroom_of_a_sleeping_engine_is_none() -> None:
    """It has given its cache back: 0 blocks in use are not 1000 blocks free."""
    result = headroom(reading(used=0, awake=False), request_lengths=(16,))
    assert (result.free, slots(result)) == (None, {"16": (1000, None)})


@given(st.integers(1, 50_000), st.floats(0, 1), st.integers(1, 20_000))
def test_remaining_requests_fit_and_one_more_does_not(usable: int, usage: float, length: int) -> None:
    used = round(usable * usage)
    result = headroom(reading(usable=usable, used=used), request_lengths=(length,))
    (entry,) = result.slots
    blocks = LAYOUT.blocks_for_request(length)
    assert entry.remaining is not None
    assert used + entry.remaining * blocks <= usable < used + (entry.remaining + 1) * blocks
    assert entry.remaining <= entry.slots


def test_nothing_fits_behind_a_queue_of_which_nobody_starts() -> None:
    """First come, first served: 200 free blocks are no room while the one at the head waits for 300."""
    history, first_tokens = EngineHistory(300.0), Histogram((1.0,), (9, 9), 3.0)
    waiting = reading(used=800, num_requests_running=4, num_requests_waiting=1, time_to_first_token_seconds=first_tokens)
    free = []
    for at, engine in (
        (0.0, waiting),
        (5.0, replace(waiting, generation_tokens=20)),
        (10.0, replace(waiting, num_requests_waiting=0)),
    ):
        history.observe(at, engine)
        result = headroom(engine, max_num_seqs=32, max_model_len=1600, request_lengths=(16,), traffic=history.traffic(1600, 16))
        free.append(slots(result)["16"][1])
    assert free == [28 - 1, 0, 28]
