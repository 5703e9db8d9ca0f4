"""A Prometheus histogram in plain Python: what the simulated engine observes and its page shows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class HistogramReading:
    """A histogram at one moment: upper bounds without +Inf, cumulative counts (one more, the last for +Inf) and the sum."""

    bounds: tuple[float, ...]
    cumulative_counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Number of observations."""
        return self.cumulative_counts[-1]


class Histogram:
    """Counts observations into buckets whose upper bounds, ascending and without +Inf, are inclusive as in Prometheus."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation, in the histogram's own unit."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> HistogramReading:
        """Return the present state."""
        return HistogramReading(self._bounds, tuple(accumulate(self._counts)), self._sum)


def one_two_five(limit: int) -> tuple[float, ...]:
    """Bounds 1, 2, 5, 10, 20, ... up to and including `limit`: vLLM's bounds for token counts, where `limit` is max_model_len."""
    bounds: list[float] = []
    magnitude = 1
    while magnitude <= limit:
        bounds.extend(float(step * magnitude) for step in (1, 2, 5) if step * magnitude <= limit)
        magnitude *= 10
    return tuple(bounds)
