"""Latencies of late as quantiles, from the engine's histograms: time to first token (prefill), time per output token (decode)."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_exporter.length_distribution import length_distribution
from kvcache_exporter.readings import Histogram

# Latency is what is looked at right now: of a window, a quarter.
_HALF_LIVES_IN_A_WINDOW = 4


@dataclass(frozen=True)
class LatencyQuantiles:
    """Seconds that half, and 95 of 100, of the observations of late did not exceed."""

    median: float
    p95: float


class RecentLatency:
    """Learns from one run of one engine. What it has seen loses half its weight in a quarter of `window_seconds`."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._bounds: tuple[float, ...] = ()
        self._numbers: list[float] = []
        self._sum = 0.0
        self._quiet_seconds = 0.0

    def observe(self, seconds: float, before: Histogram | None, after: Histogram | None) -> None:
        """Take the observations between two readings of one run, `seconds` apart."""
        self._quiet_seconds += seconds
        if before is None or after is None or before.bounds != after.bounds or after.count <= before.count:
            return
        kept = 0.5 ** (seconds * _HALF_LIVES_IN_A_WINDOW / self._window_seconds)
        if self._bounds != after.bounds:
            self._bounds, self._numbers, self._sum = after.bounds, [0.0] * len(after.counts), 0.0
        new = [later - earlier for later, earlier in zip(after.counts, before.counts, strict=True)]
        for index, number in enumerate(new):
            # Counts are cumulative over buckets.
            self._numbers[index] = self._numbers[index] * kept + max(0, number - (new[index - 1] if index else 0))
        self._sum = self._sum * kept + max(0.0, after.sum - before.sum)
        self._quiet_seconds = 0.0

    def quantiles(self) -> LatencyQuantiles | None:
        """The quantiles; None when nothing was observed within the window."""
        total = sum(self._numbers)
        if total <= 0 or self._quiet_seconds > self._window_seconds:
            return None
        distribution = length_distribution(self._bounds, self._numbers, self._sum / total)
        return None if distribution is None else LatencyQuantiles(distribution.quantile(0.5), distribution.quantile(0.95))
