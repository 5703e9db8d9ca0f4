"""When the KV cache will fill up at the present traffic, from arrivals, lengths and residence times.

The load is Little's law in blocks: requests arriving per second times the block-seconds that each takes. Usage swings around the
load much faster than the load moves, so a slope on usage is no forecast; but how far and how fast it swings says how often it
reaches a level that its mean does not. The forecast is the time by which that is as likely as not to have happened.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache_exporter.load import LoadBin, LoadSums, LoadWindow

# Kendall's score above which a rise or a fall counts, two-sided: chance shows one in 5 % of windows. The newer half of the window
# is looked at as well, and has to be surer, 1 %, since a second look doubles the chances of seeing what is not there.
_SIGNIFICANT = 1.96
_SIGNIFICANT_IN_HALF = 2.58
# Before the window is full, the load is known once so many requests have started (a rate from 5 is good to 45 %) ...
_FEWEST_REQUESTS = 5
# ... and so many residence times are over, so that usage had time to climb to what the arrivals make of it.
_RESIDENCES = 2
# Nothing is said about times further ahead than so many windows.
_HORIZON_WINDOWS = 12
# Chance of having filled up, at whose time the forecast stands: -ln(1 - 1/2) passages are then expected.
_PASSAGES = math.log(2)
# A variance estimated from n independent sights is good to sqrt(2 / n); from fewer it says nothing, and it is off by more than
# three times that in one of some hundred cases.
_FEWEST_SIGHTS = 5
_SURE = 3.0
# Below this share of the mean a swing is none, and its density beyond what floats can hold.
_NOTHING = 1e-9
# Steps, in geometric progression, from a quarter of the swing's time to the horizon.
_STEPS = 48


@dataclass(frozen=True)
class LoadForecast:
    """What the present traffic will do to the cache; None is "not known yet".

    `exhaustion_seconds`: until no typical request fits; infinite when the traffic does not fill the cache.
    `offered_load_ratio`: blocks that the traffic needs in steady state over the blocks there are; more than 1 cannot be served.
    `offered_load_trend_per_second`: how much that changes a second; 0 unless the window shows a trend.
    """

    exhaustion_seconds: float | None
    offered_load_ratio: float | None
    offered_load_trend_per_second: float | None


class LoadHistory:
    """The load of one engine during the last `window_seconds`, and how it goes on. Its size is bounded."""

    def __init__(self, window_seconds: float) -> None:
        self._window = LoadWindow(window_seconds)

    def observe(self, at: float, *, started: int, running: int, waiting: int, used_blocks: int) -> None:
        """Take in a page read at `at` seconds; one not later than the last is ignored. `started` counts first tokens so far."""
        self._window.observe(at, started=started, running=running, waiting=waiting, used_blocks=used_blocks)

    def forecast(self, *, usable_blocks: int, blocks_per_request: float, max_num_seqs: int | None) -> LoadForecast:
        """What the window's traffic does to `usable_blocks`, where a typical request holds `blocks_per_request` at its peak."""
        traffic = self._traffic(blocks_per_request)
        if traffic is None or usable_blocks <= 0:
            return LoadForecast(None, None, None)
        level = usable_blocks - blocks_per_request
        return LoadForecast(
            exhaustion_seconds=_time_to_fill(traffic, level, max_num_seqs, self._window.window_seconds * _HORIZON_WINDOWS),
            offered_load_ratio=traffic.load / usable_blocks,
            offered_load_trend_per_second=traffic.slope / usable_blocks,
        )

    def _traffic(self, blocks_per_request: float) -> _Traffic | None:
        """The window in numbers; None while it is too short for them."""
        window = self._window
        now, total = window.last_at, LoadSums()
        for b in window.bins:
            total.add(b.sums)
        full = total.seconds >= window.window_seconds - window.bin_seconds
        settled = total.started >= _FEWEST_REQUESTS and total.seconds >= _RESIDENCES * total.residence
        if now is None or not (full or settled):
            return None
        # The bin that is being filled counts once it holds as much as it lacks.
        bins = [b for b in window.bins if b.sums.seconds > window.bin_seconds / 2]
        load, slope = _line(bins, total, now, _SIGNIFICANT)
        trend = slope
        half = bins[-(len(bins) // 2) :]
        if len(half) > 1:
            # A load that accelerates (requests stay longer the more run beside them) shows in the newer half first. The sooner
            # forecast wins, so that half a window of calm does not hide what the other half has shown.
            newer = LoadSums()
            for b in half:
                newer.add(b.sums)
            recent, rise = _line(half, newer, now, _SIGNIFICANT_IN_HALF)
            if rise and recent + rise * window.window_seconds > load + slope * window.window_seconds:
                load, trend = recent, rise
        variance = max(
            total.used_squared / total.seconds - (total.used / total.seconds) ** 2 - (slope * total.seconds) ** 2 / 12, 0.0
        )
        # A time longer than the window cannot be told from it.
        swing = min(max(total.residence, _correlation_seconds(bins, slope, variance, window.bin_seconds)), window.window_seconds)
        held = total.used / total.running if total.running > 0 else 0.0
        return _Traffic(
            load=max(load, 0.0),
            slope=trend,
            watched=total.seconds,
            clump=max(
                _clump(total, variance, swing),
                min(blocks_per_request * _together(total), _clump_at_most(total, variance, swing)),
            ),
            swing=swing,
            held=held,
            # A request's blocks grow from few to its peak: spread evenly over those, if the pages have not shown more.
            held_variance=max(_held_variance(total, held), (blocks_per_request - held) ** 2 / 3),
        )


@dataclass(frozen=True)
class _Traffic:
    """The load in blocks now and its change per second; how usage swings around it; and what one running request holds.

    The change is taken to go on for as long as it was `watched`, in seconds, and no longer: what looks like a trend in flat
    traffic now and then is small, and fills a cache only when it is drawn out far beyond what was seen.
    `clump` is the variance of usage over its mean: the blocks that come and go at once. `swing` is the time in seconds after
    which usage has forgotten where it stood.
    """

    load: float
    slope: float
    watched: float
    clump: float
    swing: float
    held: float
    held_variance: float


def _time_to_fill(traffic: _Traffic, level: float, seats: int | None, horizon: float) -> float:
    """Seconds by which usage has passed `level` as likely as not; infinite beyond the horizon.

    Passages expected so far are the integral of their rate, and the chance of none is exp(-that). The seats bound the rate: no
    more than all of them taken can hold blocks.
    """
    if level <= 0:
        return 0.0
    if traffic.swing <= 0:
        return math.inf
    most = 1 / traffic.swing
    if seats is not None:
        taken = traffic.held * seats
        most = _passages_per_second(taken, traffic.held_variance * seats / taken if taken else 0.0, level, traffic.swing)

    def rate(ahead: float) -> float:
        mean = traffic.load + traffic.slope * min(ahead, traffic.watched)
        return min(_passages_per_second(mean, traffic.clump, level, traffic.swing), most)

    return _time_to_integral(rate, _PASSAGES, traffic.swing / 4, horizon)


def _time_to_integral(rate: Callable[[float], float], wanted: float, first: float, horizon: float) -> float:
    """Where the integral of `rate` from 0 reaches `wanted`, by trapezoids that widen from `first` to the horizon."""
    ratio = (horizon / first) ** (1 / _STEPS)
    start, value, integral, end = 0.0, rate(0.0), 0.0, first
    for _ in range(_STEPS + 1):
        next_value = rate(end)
        part = (value + next_value) / 2 * (end - start)
        if integral + part >= wanted:
            return start + (wanted - integral) / part * (end - start)
        start, value, integral, end = end, next_value, integral + part, end * ratio
    return math.inf


def _passages_per_second(mean: float, clump: float, level: float, swing: float) -> float:
    """How often usage that swings around `mean` comes up to `level`.

    Usage is never negative and leans to the right, as sums of independent requests do: gamma distributed, with variance
    mean x clump. A process that is gamma distributed and forgets at the rate 1/swing (Cox-Ingersoll-Ross) passes a high level
    density(level) x (level - mean) / swing times a second (its flux there). Where the level lies within one standard deviation
    above the mean, or below it, the rate is the one at that deviation: a passage within a few swings.
    """
    if mean <= 0:
        return 0.0
    if clump <= mean * _NOTHING:
        return 1 / swing if mean >= level else 0.0
    at = max(level, mean + math.sqrt(mean * clump))
    shape, x = mean / clump, at / clump
    log_density = (shape - 1) * math.log(x) - x - math.lgamma(shape) - math.log(clump)
    return math.exp(min(log_density + math.log(at - mean), 0.0)) / swing


def _line(bins: Sequence[LoadBin], total: LoadSums, now: float, significant: float) -> tuple[float, float]:
    """Load at `now` in blocks and its change per second, which is 0 unless the bins show a trend.

    The trend is looked for in the arrivals alone, which their number makes the surest, and in the load, which also sees lengths
    and residence times change; of two trends, the steeper.
    """
    if not bins:
        return total.load, 0.0
    at = [b.middle for b in bins]
    cost = total.used / total.started if total.started > 0 else 0.0
    slope = max(
        cost * _trend(at, [b.sums.rate for b in bins], significant),
        _trend(at, [b.sums.load for b in bins], significant),
        key=abs,
    )
    return total.load + slope * (now - sum(at) / len(at)), slope


def _trend(at: Sequence[float], values: Sequence[float], significant: float) -> float:
    """Median slope between any two values (Theil-Sen) if Kendall's test sees one, else 0.

    Ranks do not care how high a burst is, so one that is short against the window makes no trend. Of those that pass, the barely
    significant are the ones that chance has helped most, so what chance explains is taken off (James-Stein).
    """
    count = len(at)
    slopes = sorted((values[j] - values[i]) / (at[j] - at[i]) for j in range(1, count) for i in range(j))
    score = len(slopes) - bisect_right(slopes, 0.0) - bisect_left(slopes, 0.0)
    deviations = (abs(score) - 1) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18) if count > 1 else 0.0
    if deviations < significant:
        return 0.0
    middle = len(slopes) // 2
    return (slopes[middle] + slopes[~middle]) / 2 * (1 - deviations**-2)


def _correlation_seconds(bins: Sequence[LoadBin], slope: float, variance: float, width: float) -> float:
    """Time over which usage is correlated, by batch means: the variance of the bins' means is 2 x time / width x variance."""
    if len(bins) < 3 or variance <= 0:
        return 0.0
    means = [b.sums.used / b.sums.seconds - slope * b.middle for b in bins]
    mean = sum(means) / len(means)
    return width / 2 * min(sum((m - mean) ** 2 for m in means) / (len(means) - 1) / variance, 1.0)


def _clump(total: LoadSums, variance: float, swing: float) -> float:
    """Variance of usage over its mean, as seen, widened by how little the window tells about the mean itself."""
    return variance / (total.used / total.seconds) * (1 + 2 * swing / total.seconds) if total.used > 0 else 0.0


def _clump_at_most(total: LoadSums, variance: float, swing: float) -> float:
    """The most that the variance over the mean can be, given as many independent sights of usage as swings were watched.

    Requests that come independently make usage vary by a request's blocks at least. Those of a closed loop, where a client asks
    again when it is answered, do not: at a steady 95 % they never fill the cache, and enough of it has been seen to say so.
    """
    sights = total.seconds / swing if swing > 0 else 0.0
    if sights < _FEWEST_SIGHTS or total.used <= 0:
        return math.inf
    return variance / (total.used / total.seconds) * (1 + _SURE * math.sqrt(2 / sights))


def _together(total: LoadSums) -> float:
    """Requests that come at once: the dispersion of arrivals, 1 where each comes independently (Poisson), never taken as less.

    Pages tell how many came in a step but not how they were spread over it; at worst, all together.
    """
    if total.arrived <= 0:
        return 1.0
    rate = total.rate
    return max((total.arrived_squared - rate * total.arrived) / (rate * total.steps), 1.0)


def _held_variance(total: LoadSums, held: float) -> float:
    """Variance of the blocks of one running request: what usage varies by beyond the number running, over that number."""
    if total.running <= 0:
        return 0.0
    left = total.used_squared - 2 * held * total.used_running + held**2 * total.running_squared
    return max(left / total.running, 0.0)
