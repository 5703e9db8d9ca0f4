"""Latency quantiles of late, from a histogram that only ever grows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_exporter.readings import Histogram
from kvcache_exporter.recent_latency import RecentLatency

BOUNDS = (0.1, 0.5, 1.0, 5.0)
WINDOW = 300.0


def histogram(*numbers: int, total: float = 0.0) -> Histogram:
    """`numbers` are the observations in each bucket."""
    return Histogram(BOUNDS, tuple(accumulate(numbers)), total)


NOTHING = histogram(0, 0, 0, 0, 0)


def test_quantiles_are_of_what_came_between_two_pages() -> None:
    latency = RecentLatency(WINDOW)
    before = histogram(1000, 0, 0, 0, 0, total=50.0)
    latency.observe(5.0, before, histogram(1000, 90, 10, 0, 0, total=50.0 + 90 * 0.3 + 10 * 0.75))
    quantiles = latency.quantiles()
    assert quantiles is not None
    assert quantiles.median == pytest.approx(0.1 + 0.4 * 50 / 90)
    assert quantiles.p95 == pytest.approx(0.5 + 0.5 * 5 / 10)


def test_new_latencies_take_over_within_minutes() -> None:
    latency = RecentLatency(WINDOW)
    slow = histogram(0, 0, 0, 100, 0, total=300.0)
    latency.observe(5.0, NOTHING, slow)
    quick = slow
    for step in range(1, 61):
        later = histogram(10 * step, 0, 0, 100, 0, total=300.0 + 0.5 * step)
        latency.observe(5.0, quick, later)
        quick = later
    quantiles = latency.quantiles()
    assert quantiles is not None
    assert quantiles.p95 < 0.1


def test_nothing_is_known_before_something_comes_and_long_after_it_has_ended() -> None:
    latency = RecentLatency(WINDOW)
    assert latency.quantiles() is None
    some = histogram(1, 0, 0, 0, 0, total=0.05)
    latency.observe(5.0, NOTHING, some)
    assert latency.quantiles() is not None
    latency.observe(299.0, some, some)
    assert latency.quantiles() is not None
    latency.observe(2.0, some, some)
    assert latency.quantiles() is None


def test_page_without_the_histogram_changes_nothing() -> None:
    latency = RecentLatency(WINDOW)
    latency.observe(5.0, None, NOTHING)
    latency.observe(5.0, NOTHING, None)
    assert latency.quantiles() is None


@given(st.lists(st.integers(0, 1000), min_size=5, max_size=5), st.floats(0, 10_000))
def test_quantiles_lie_within_the_buckets_that_hold_something(numbers: Sequence[int], total: float) -> None:
    latency = RecentLatency(WINDOW)
    latency.observe(5.0, NOTHING, histogram(*numbers, total=total))
    quantiles = latency.quantiles()
    if not sum(numbers):
        assert quantiles is None
        return
    assert quantiles is not None
    assert 0 <= quantiles.median <= quantiles.p95
    first = next(index for index, number in enumerate(numbers) if number)
    assert quantiles.median >= (0.0, *BOUNDS)[first]
