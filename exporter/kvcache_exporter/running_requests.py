"""How far the running requests have come: no page tells, so it follows from when they started and how fast tokens are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_exporter.length_distribution import LengthDistribution
from kvcache_exporter.readings import EngineReading

# So many groups of requests that started together are kept; the oldest are put together first.
_MOST_COHORTS = 256
# Ages are told apart in steps of this ratio.
_AGE_RATIO = 1.4
_LEAST_AGE = 8.0


@dataclass(frozen=True)
class AgeGroup:
    """`number` running requests (not whole) that have made `age_tokens` tokens of output."""

    age_tokens: float
    number: float


class RunningRequests:
    """Follows the requests of one run of one engine.

    The clock counts tokens of one request: all tokens made over the requests that made them. Requests that started between two
    polls are a cohort, and its age is how far the clock has gone since.
    """

    def __init__(self) -> None:
        self._clock_tokens = 0.0
        self._cohorts: list[tuple[float, float]] = []

    def observe(self, before: EngineReading, after: EngineReading) -> None:
        """Take what happened between two readings of one run."""
        if before.generation_tokens is not None and after.generation_tokens is not None:
            made = after.generation_tokens - before.generation_tokens
            running = ((before.num_requests_running or 0) + (after.num_requests_running or 0)) / 2
            self._clock_tokens += max(0, made) / max(1.0, running)
        if before.time_to_first_token_seconds is not None and after.time_to_first_token_seconds is not None:
            started = after.time_to_first_token_seconds.count - before.time_to_first_token_seconds.count
            if started > 0:
                self._cohorts.append((self._clock_tokens, float(started)))
                if len(self._cohorts) > _MOST_COHORTS:
                    self._cohorts = _halved(self._cohorts)

    def ages(self, running: int, output: LengthDistribution) -> list[AgeGroup]:
        """The running requests by age: of each cohort, as many as have not ended by now, made to add up to `running`.

        A cohort older than the longest output is forgotten.
        """
        if running <= 0:
            return []
        oldest = self._clock_tokens - output.longest
        self._cohorts = [cohort for cohort in self._cohorts if cohort[0] >= oldest]
        groups: dict[int, list[float]] = {}
        for clock, number in self._cohorts:
            age = self._clock_tokens - clock
            left = number * output.share_longer(age)
            if left > 0:
                step = 0 if age < _LEAST_AGE else 1 + int(math.log(age / _LEAST_AGE) / math.log(_AGE_RATIO))
                group = groups.setdefault(step, [0.0, 0.0])
                group[0] += left
                group[1] += left * age
        total = sum(left for left, _ in groups.values())
        if total <= 0:
            return [AgeGroup(0.0, float(running))]
        return [AgeGroup(ages / left, left * running / total) for left, ages in groups.values()]


def _halved(cohorts: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The older half of the cohorts put together in pairs; the younger half as it is."""
    half = len(cohorts) // 2 // 2 * 2
    pairs = [
        ((c1 * n1 + c2 * n2) / (n1 + n2), n1 + n2) for (c1, n1), (c2, n2) in zip(cohorts[:half:2], cohorts[1:half:2], strict=True)
    ]
    return [*pairs, *cohorts[half:]]
