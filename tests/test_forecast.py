"""The forecast, on traffic whose fate is known because a few lines here make it."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_exporter.forecast import LoadForecast, LoadHistory

WINDOW = 300.0
BLOCKS = 50

seeds = st.integers(min_value=0, max_value=2**32 - 1)
# What random traffic does is certain only for the seeds that were looked at: these, and none picked for it.
any_seed = pytest.mark.parametrize("seed", range(6))


@dataclass(frozen=True)
class Page:
    """What a page says, and the forecast's arguments by the same names."""

    at: float
    started: int
    running: int
    waiting: int
    used_blocks: int


def poisson(rate: Callable[[float], float], most: float, seconds: float, seed: int) -> Iterator[float]:
    """Arrival times at `rate(t)`, which is at most `most`."""
    dice, at = random.Random(seed), 0.0
    while (at := at + dice.expovariate(most)) < seconds:
        if dice.random() * most < rate(at):
            yield at


def pages(arrivals: Iterator[float], seconds: int, *, residence: float = 10.0, seats: int = 10**6, every: int = 1) -> list[Page]:
    """Pages of an engine with room for all, whose requests hold BLOCKS for an exponential time once they have a seat."""
    dice, todo = random.Random(1), list(arrivals)
    ends: list[float] = []
    arrived = started = 0
    out = []
    for at in range(0, seconds + 1, every):
        while True:
            free_at = ends[0] if len(ends) >= seats else -math.inf
            begin = max(todo[started], free_at) if started < len(todo) else math.inf
            while ends and ends[0] <= min(begin, at):
                heapq.heappop(ends)
            if begin > at:
                break
            heapq.heappush(ends, begin + dice.expovariate(1 / residence))
            started += 1
        while arrived < len(todo) and todo[arrived] <= at:
            arrived += 1
        out.append(Page(at, started, len(ends), arrived - started, BLOCKS * len(ends)))
    return out


def forecasts(
    traffic: list[Page],
    usable_blocks: int,
    *,
    max_num_seqs: int | None = None,
    window: float = WINDOW,
    size: int = 1,
    time: float = 1.0,
) -> dict[float, LoadForecast]:
    """The forecast after each page, in blocks that hold 1/`size` of what they do and a second that lasts `time`."""
    history, out = LoadHistory(window * time), {}
    for p in traffic:
        history.observe(p.at * time, started=p.started, running=p.running, waiting=p.waiting, used_blocks=p.used_blocks * size)
        out[p.at] = history.forecast(
            usable_blocks=usable_blocks * size, blocks_per_request=BLOCKS * size, max_num_seqs=max_num_seqs
        )
    return out


def soonest(result: dict[float, LoadForecast]) -> float:
    return min(f.exhaustion_seconds for f in result.values() if f.exhaustion_seconds is not None)


def test_nothing_is_known_at_first() -> None:
    history = LoadHistory(WINDOW)
    unknown = LoadForecast(None, None, None)
    assert history.forecast(usable_blocks=1000, blocks_per_request=BLOCKS, max_num_seqs=None) == unknown
    history.observe(0, started=100, running=5, waiting=0, used_blocks=250)
    assert history.forecast(usable_blocks=1000, blocks_per_request=BLOCKS, max_num_seqs=None) == unknown


def test_idle_engine_is_never_full() -> None:
    result = forecasts([Page(at, 7, 0, 0, 0) for at in range(400)], 1000)
    assert result[100] == LoadForecast(None, None, None)
    assert result[399] == LoadForecast(math.inf, 0.0, 0.0)


def test_no_typical_request_ever_fits_into_a_smaller_cache() -> None:
    result = forecasts(pages(poisson(lambda _: 1.0, 1.0, 300, 1), 300), BLOCKS)
    assert result[300].exhaustion_seconds == 0.0


@any_seed
@pytest.mark.parametrize("every", [1, 5, 20])
def test_light_traffic_never_fills_the_cache(seed: int, every: int) -> None:
    """20 requests of the 100 that fit."""
    result = forecasts(pages(poisson(lambda _: 2.0, 2.0, 900, seed), 900, every=every), 100 * BLOCKS)
    assert soonest(result) > 300
    assert sum(f.exhaustion_seconds == math.inf for f in result.values()) > 0.8 * len(result)
    assert result[900].offered_load_ratio == pytest.approx(0.2, rel=0.5)


@any_seed
def test_heavy_traffic_fills_the_cache_at_once(seed: int) -> None:
    """100 requests on average, where 90 fit: the queue grows, and the load counts those who wait too."""
    traffic = pages(poisson(lambda _: 10.0, 10.0, 600, seed), 600, seats=90, every=5)
    last = forecasts(traffic, 90 * BLOCKS)[600]
    assert last.exhaustion_seconds is not None
    assert last.exhaustion_seconds < 60
    assert last.offered_load_ratio is not None
    assert 0.9 < last.offered_load_ratio < 1.4


@any_seed
def test_ramp_is_foretold(seed: int) -> None:
    """Arrivals grow by one a second in 20 s. The forecast is early: usage swings, and is full before its mean is."""
    traffic = pages(poisson(lambda t: 2 + t / 20, 100.0, 800, seed), 800, every=2)
    full = next(p.at for p in traffic if p.used_blocks > 399 * BLOCKS)
    result = forecasts(traffic, 400 * BLOCKS)
    assert next(at for at, f in result.items() if f.exhaustion_seconds is not None and f.exhaustion_seconds < 300) < full - 60
    for ahead in (100, 200):
        foretold = result[full - ahead].exhaustion_seconds
        assert foretold is not None
        assert 0.3 * ahead < foretold < 1.2 * ahead


@any_seed
def test_accelerating_load_is_foretold(seed: int) -> None:
    """A minute and more ahead, though the load doubles every 70 s."""
    traffic = pages(poisson(lambda t: min(math.exp((t - 400) / 100), 60.0), 60.0, 800, seed), 800, every=2)
    full = next(p.at for p in traffic if p.used_blocks > 399 * BLOCKS)
    result = forecasts(traffic, 400 * BLOCKS)
    assert next(at for at, f in result.items() if f.exhaustion_seconds is not None and f.exhaustion_seconds < 300) < full - 60


@any_seed
@pytest.mark.parametrize("lasts", [1, 5, 20])
def test_one_burst_is_no_trend(seed: int, lasts: int) -> None:
    """It fills a third of the cache for a moment. A slope on usage would have it full within half a minute."""
    traffic = pages(poisson(lambda t: 5.0 if 400 <= t < 400 + lasts else 1.0, 5.0, 900, seed), 900, every=2)
    assert soonest(forecasts(traffic, 150 * BLOCKS)) > 300


@any_seed
def test_seats_bound_the_load(seed: int) -> None:
    """Arrivals grow without end, but 40 seats never hold what 100 requests need."""
    traffic = pages(poisson(lambda t: t / 50, 18.0, 900, seed), 900, seats=40, every=5)
    assert traffic[-1].waiting > 100
    result = forecasts(traffic, 100 * BLOCKS, max_num_seqs=40)
    assert soonest(result) == math.inf
    ratio = result[900].offered_load_ratio
    assert ratio is not None
    assert ratio > 1
    assert soonest(forecasts(traffic, 100 * BLOCKS)) < 60


def same(a: LoadForecast, b: LoadForecast, time: float = 1.0) -> bool:
    if a.exhaustion_seconds is None or b.exhaustion_seconds is None:
        return a == b
    return b.exhaustion_seconds == pytest.approx(a.exhaustion_seconds * time) and b.offered_load_ratio == pytest.approx(
        a.offered_load_ratio
    )


@settings(max_examples=10, deadline=None)
@given(seed=seeds, size=st.sampled_from([2, 16, 64]), time=st.sampled_from([0.25, 2.0, 8.0]))
def test_units_do_not_matter(seed: int, size: int, time: float) -> None:
    """Smaller blocks, and as many more of them, change nothing; on a faster clock all happens sooner by as much."""
    traffic = pages(poisson(lambda t: 1 + t / 100, 8.0, 600, seed), 600, every=5)
    plain = forecasts(traffic, 100 * BLOCKS)
    assert any(f.exhaustion_seconds not in (None, math.inf) for f in plain.values())
    resized, retimed = forecasts(traffic, 100 * BLOCKS, size=size), forecasts(traffic, 100 * BLOCKS, time=time)
    assert all(same(f, resized[at]) for at, f in plain.items())
    assert all(same(f, retimed[at], time) for at, f in plain.items())


@any_seed
def test_larger_cache_lasts_longer(seed: int) -> None:
    traffic = pages(poisson(lambda t: 1 + t / 60, 11.0, 600, seed), 600, every=5)
    lasts = [forecasts(traffic, requests * BLOCKS)[600].exhaustion_seconds for requests in (60, 120, 180, 240, 480)]
    known = [seconds for seconds in lasts if seconds is not None]
    assert len(known) == len(lasts)
    assert known == sorted(known)
    assert known[0] < known[-1]


def test_page_that_is_not_later_is_ignored() -> None:
    once, twice = LoadHistory(WINDOW), LoadHistory(WINDOW)
    for p in pages(poisson(lambda t: 2 + t / 50, 10.0, 400, 3), 400):
        for history in (once, twice):
            history.observe(p.at, started=p.started, running=p.running, waiting=p.waiting, used_blocks=p.used_blocks)
        for stale in (p.at, p.at - 7):
            twice.observe(stale, started=0, running=999, waiting=999, used_blocks=1)
    arguments = {"usable_blocks": 100 * BLOCKS, "blocks_per_request": BLOCKS, "max_num_seqs": None}
    assert once.forecast(**arguments) == twice.forecast(**arguments)  # type: ignore[arg-type]


def test_history_forgets() -> None:
    """What is older than the window, however many pages told of it; and everything, when half the window went unseen."""
    history, fresh = LoadHistory(WINDOW), LoadHistory(WINDOW)
    for step in range(20_000):
        history.observe(step / 10, started=step, running=9, waiting=0, used_blocks=900)
    assert len(history._window.bins) <= 16
    for at in range(3000, 3400):
        for one in (history, fresh):
            one.observe(at, started=20_000 + at // 10, running=1, waiting=0, used_blocks=50)
    arguments = {"usable_blocks": 1000, "blocks_per_request": BLOCKS, "max_num_seqs": None}
    assert history.forecast(**arguments) == fresh.forecast(**arguments)  # type: ignore[arg-type]


def test_a_few_missed_pages_do_not_matter() -> None:
    traffic = pages(poisson(lambda t: 2 + t / 20, 40.0, 600, 5), 600)
    whole = forecasts(traffic, 400 * BLOCKS)[600]
    holed = forecasts([p for p in traffic if not 350 < p.at < 400 and p.at % 7], 400 * BLOCKS)[600]
    assert whole.exhaustion_seconds is not None
    assert holed.exhaustion_seconds == pytest.approx(whole.exhaustion_seconds, rel=0.3)


counts = st.integers(min_value=0, max_value=10**6)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(min_value=0, max_value=200), counts, counts, counts, counts), max_size=60),
    usable=counts,
    block=st.floats(min_value=0, max_value=10**6),
    seats=st.none() | st.integers(min_value=1, max_value=4096),
)
def test_whatever_pages_say_the_forecast_is_a_time(
    steps: list[tuple[float, int, int, int, int]], usable: int, block: float, seats: int | None
) -> None:
    history, at, started = LoadHistory(WINDOW), 1e9, 0
    for seconds, more, running, waiting, used in steps:
        at, started = at + seconds, started + more
        history.observe(at, started=started, running=running, waiting=waiting, used_blocks=used)
        result = history.forecast(usable_blocks=usable, blocks_per_request=block, max_num_seqs=seats)
        assert result.exhaustion_seconds is None or result.exhaustion_seconds >= 0
        assert result.offered_load_ratio is None or 0 <= result.offered_load_ratio < math.inf


def closed_loop(level: float, *, swing: float) -> LoadForecast:
    """What is foretold of 200 requests that run at all times, clients that ask again; usage swings by a share of itself."""
    rng = random.Random(1)
    running, residence, blocks = 200, 20.0, 100
    held = running * blocks / 2
    history = LoadHistory(WINDOW)
    for at in range(0, 1200, 5):
        used = round(held * (1 + rng.gauss(0, swing)))
        history.observe(at, started=int(at * running / residence), running=running, waiting=0, used_blocks=used)
    return history.forecast(usable_blocks=int(held / level), blocks_per_request=blocks, max_num_seqs=None)


@pytest.mark.parametrize(("level", "swing"), [(0.8, 0.02), (0.9, 0.01), (0.95, 0.0), (0.95, 0.005)])
def test_steady_high_level_never_fills_the_cache(level: float, swing: float) -> None:
    """Less than what independent arrivals would make it swing, and long enough watched to know."""
    forecast = closed_loop(level, swing=swing)
    assert forecast.exhaustion_seconds == math.inf
    assert forecast.offered_load_trend_per_second == 0


def test_high_level_that_swings_up_to_the_full_cache_is_foretold_to_fill_it() -> None:
    forecast = closed_loop(0.95, swing=0.025)
    assert forecast.exhaustion_seconds is not None
    assert forecast.exhaustion_seconds < 300


def test_rising_load_shows_its_trend() -> None:
    rising = forecasts(pages(poisson(lambda at: 0.5 + at / 300, 3.5, 900, 3), 900), 10_000)[900]
    assert rising.offered_load_trend_per_second is not None
    assert rising.offered_load_trend_per_second > 0
