"""Histograms of a /metrics page, put together from their `_bucket` and `_sum` lines."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcache_exporter.readings import Histogram


class HistogramLines:
    """The histogram lines of one engine while its page is being read, by family.

    Several series of a family are API-server processes (`pid`) or Ray replicas, as with counters. Their lines are not to be
    mixed: the series that counted most stands for the engine, whole.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, frozenset[tuple[str, str]]], _Series] = {}

    def add(self, family: str, part: str, labels: Mapping[str, str], value: float) -> None:
        """Take one line. `part` is what its name has behind the family: "bucket" or "sum"."""
        key = family, frozenset([label for label in labels.items() if label[0] != "le"])
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series()
        if part == "bucket":
            series.buckets[labels.get("le", "")] = value
        else:
            series.sum = value

    def read(self) -> tuple[dict[str, Histogram | None], int]:
        """The histogram of each family, None where no series can be true; and how many series cannot be."""
        largest: dict[str, Histogram | None] = {}
        impossible = 0
        for (family, _), series in self._series.items():
            histogram, before = series.histogram(), largest.setdefault(family, None)
            if histogram is None:
                impossible += 1
            elif before is None or histogram.count > before.count:
                largest[family] = histogram
        return largest, impossible


@dataclass
class _Series:
    """Lines that differ in `le` alone: their cumulative counts by it, and the sum. `_count` only repeats the one at +Inf."""

    buckets: dict[str, float] = field(default_factory=dict)
    sum: float = math.nan

    def histogram(self) -> Histogram | None:
        """The histogram; None without +Inf or sum, and when a value is NaN, infinite, negative or below the one before."""
        try:
            buckets = sorted((float(bound), count) for bound, count in self.buckets.items())
        except ValueError:
            return None
        bounds = [bound for bound, _ in buckets]
        counts = [count for _, count in buckets]
        if not bounds or bounds[0] == -math.inf or bounds[-1] != math.inf:
            return None
        # NaN is neither above nor below, so no list with it rises.
        if not (all(map(operator.lt, bounds, bounds[1:])) and all(map(operator.le, counts, counts[1:]))):
            return None
        if not (counts[0] >= 0 and counts[-1] < math.inf and 0 <= self.sum < math.inf):
            return None
        return Histogram(tuple(bounds[:-1]), tuple(map(round, counts)), self.sum)
