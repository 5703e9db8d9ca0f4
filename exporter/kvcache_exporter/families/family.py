"""What one metric is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Labelled = tuple[tuple[str, ...], float | None]


@dataclass(frozen=True)
class Family:
    """One metric: how it is described, and what of a subject (an engine, a target, a source, a GPU) it shows.

    `read` yields (values of the labels that are added to the subject's own, value); a value of None gives no sample.
    """

    name: str
    documentation: str
    labels: tuple[str, ...]
    read: Callable[..., Iterable[Labelled]]
    is_counter: bool = False

    def empty(self) -> Metric:
        """Return the family without samples."""
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        return kind(self.name, self.documentation, labels=self.labels)
