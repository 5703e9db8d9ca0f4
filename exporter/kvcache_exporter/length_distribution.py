"""How long requests are: shares in ranges of tokens, as a histogram gives them, made continuous so that the mean is exact."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# An exponent beyond these puts all requests of a range at one of its ends, where the formulas lose their digits.
_LEAST_PLACE, _MOST_PLACE = 0.02, 0.98


@dataclass(frozen=True)
class LengthDistribution:
    """Request lengths in tokens (or any size that is not negative).

    `edges` are the ends of the ranges, rising from 0; `shares` the share of requests in each range, adding up to 1, so it is one
    shorter. Inside a range a request stands at low + (high - low) * u ** exponent, with u even over 0-1: one exponent for all
    ranges, chosen so that the mean is `mean`, which a histogram knows exactly.
    """

    edges: tuple[float, ...]
    shares: tuple[float, ...]
    longer: tuple[float, ...]
    exponent: float
    mean: float

    @property
    def longest(self) -> float:
        """Upper end of the last range that holds a request."""
        return self.edges[max(index for index, share in enumerate(self.shares) if share > 0) + 1]

    @property
    def variance(self) -> float:
        """Variance in tokens squared."""
        a = self.exponent
        square = 0.0
        for low, high, share in zip(self.edges, self.edges[1:], self.shares, strict=False):
            width = high - low
            square += share * (low * low + 2 * low * width / (a + 1) + width * width / (2 * a + 1))
        return max(0.0, square - self.mean * self.mean)

    def share_longer(self, tokens: float) -> float:
        """Share of requests that are longer than `tokens`."""
        if tokens <= 0:
            return 1.0 if tokens < 0 else self.longer[0]
        index = bisect_left(self.edges, tokens) - 1
        if index >= len(self.shares):
            return 0.0
        share = self.shares[index]
        if not share:
            return self.longer[index]
        low = self.edges[index]
        place = (tokens - low) / (self.edges[index + 1] - low)
        return self.longer[index] - share * math.pow(place, 1 / self.exponent)

    def quantile(self, share: float) -> float:
        """Length that `share` of the requests do not exceed, 0 < share <= 1."""
        for index, above in enumerate(self.longer[1:]):
            part = self.shares[index]
            if part and 1 - above >= share - 1e-12:
                place = min(1.0, max(0.0, (share - (1 - self.longer[index])) / part))
                low = self.edges[index]
                return low + (self.edges[index + 1] - low) * math.pow(place, self.exponent)
        return self.longest


def length_distribution(
    bounds: Sequence[float], numbers: Sequence[float], mean: float, *, limit: float | None = None
) -> LengthDistribution | None:
    """The distribution of a histogram; None when it holds nothing.

    `bounds` are finite upper bounds in tokens, `numbers` the requests in each bucket (not cumulative; any weights), one more for
    +Inf. Nothing is longer than `limit` (max_model_len); where that is not known, the open bucket ends at twice the last bound:
    vLLM's bounds go 1, 2, 5, 10 up to max_model_len.
    """
    total = sum(numbers)
    if total <= 0 or not bounds:
        return None
    end = max(bounds[-1] * 2, mean) if limit is None else max(limit, bounds[-1] + 1)
    edges = (0.0, *map(float, bounds), float(end))
    shares = tuple(number / total for number in numbers)
    low = sum(share * edge for share, edge in zip(shares, edges, strict=False))
    widths = sum(share * (b - a) for share, a, b in zip(shares, edges, edges[1:], strict=False))
    place = min(_MOST_PLACE, max(_LEAST_PLACE, (mean - low) / widths))
    longer = tuple(max(0.0, 1 - below) for below in accumulate((0.0, *shares)))
    return LengthDistribution(edges, shares, longer, 1 / place - 1, mean)
