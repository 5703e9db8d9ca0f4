"""What one metric is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

    @property
    def type(self) -> str:
        """Its type in the exposition format. Only a summary may have a label `quantile`."""
        if self.is_counter:
            return "counter"
        return "summary" if "quantile" in self.labels else "gauge"

    def empty(self) -> Metric:
        """Return the family without samples."""
        if self.type == "summary":
            return _Quantiles(self.name, self.documentation, self.labels)
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        return kind(self.name, self.documentation, labels=self.labels)


class _Quantiles(Metric):
    """A summary of quantiles alone, which prometheus_client has no class for."""

    def __init__(self, name: str, documentation: str, labels: tuple[str, ...]) -> None:
        super().__init__(name, documentation, "summary")
        self._label_names = labels

    def add_metric(self, labels: Sequence[str], value: float) -> None:
        """Add one quantile, with its labels in the order of the family's."""
        self.add_sample(self.name, dict(zip(self._label_names, labels, strict=True)), value)
