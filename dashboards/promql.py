"""Selectors of the boards: what the variables choose, in each of them."""

from __future__ import annotations

from collections.abc import Iterable

SCOPE = 'cluster=~"$cluster", namespace=~"$namespace", job=~"$job"'
# What makes a series of one page one of the same page.
PAGE = "cluster, namespace, job, instance"
FOR_CAPACITY = 'reason!="deferred"'
"""Of requests in the queue: those that wait for blocks or a seat."""
ENGINES = f'{SCOPE}, model_name=~"$model", target=~"$target", engine=~"$engine"'


def select(metric: str, selection: str, *matchers: str) -> str:
    """The series of a metric that are selected, and fulfil further matchers."""
    return f"{metric}{{{', '.join((selection, *matchers))}}}"


def coded(metric: str, selection: str, label: str, values: Iterable[str]) -> str:
    """A metric that is 1 for a value of `label`, as the place of that value: 1, 2, 3; the last of several, 0 if there is none."""
    terms = (f"{place} * " + select(metric, selection, f'{label}="{value}"') for place, value in enumerate(values, start=1))
    return f"max without ({label}) ({' or '.join(terms)})"
