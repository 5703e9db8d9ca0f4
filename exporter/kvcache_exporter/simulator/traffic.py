"""The load of the demo: a seeded stream of requests whose rate rises and falls as a wave."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvcache_exporter.simulator.engine import SimulatedEngine


@dataclass(frozen=True)
class TrafficParameters:
    """The wave and the lengths; rates are requests a second, lengths tokens.

    The rate starts at `trough_rate` and reaches `crest_rate` half a period later. The default crest is above what the default
    engine can serve, so that the pool runs full, and the mean is below it, so that the queue drains again. Lengths are lognormal
    with the given medians; `_sigma` is the standard deviation of their logarithm.

    Raises ValueError when the rates do not describe a wave or the period is not above 0.
    """

    seed: int = 8
    period_seconds: float = 90.0
    trough_rate: float = 1.0
    crest_rate: float = 17.0
    prompt_tokens_median: float = 1650.0
    prompt_tokens_sigma: float = 0.5
    output_tokens_median: float = 260.0
    output_tokens_sigma: float = 0.55

    def __post_init__(self) -> None:
        if not 0 <= self.trough_rate <= self.crest_rate or self.crest_rate == 0 or self.period_seconds <= 0:
            raise ValueError("the rates are 0 <= trough_rate <= crest_rate; crest_rate and period_seconds are above 0")

    def rate(self, seconds: float) -> float:
        """Return requests a second at `seconds` of demo time."""
        wave = (1 - math.cos(2 * math.pi * seconds / self.period_seconds)) / 2
        return self.trough_rate + (self.crest_rate - self.trough_rate) * wave


@dataclass(frozen=True)
class Arrival:
    """A request that arrives at `seconds` of demo time."""

    seconds: float
    prompt_tokens: int
    output_tokens: int


def arrivals(parameters: TrafficParameters, max_model_len: int) -> Iterator[Arrival]:
    """Yield arrivals in order of time, for ever; the same parameters give the same ones.

    A Poisson process of changing rate, by thinning one of the crest's rate. Lengths are clipped so that a request fits into
    max_model_len, the output first, which keeps at least one token.
    """
    rng = random.Random(parameters.seed)  # noqa: S311 - load for a demo, nothing secret
    seconds = 0.0
    while True:
        seconds += rng.expovariate(parameters.crest_rate)
        if rng.random() * parameters.crest_rate > parameters.rate(seconds):
            continue
        prompt = _length(rng, parameters.prompt_tokens_median, parameters.prompt_tokens_sigma, max_model_len - 1)
        output = _length(rng, parameters.output_tokens_median, parameters.output_tokens_sigma, max_model_len - prompt)
        yield Arrival(seconds, prompt, output)


def _length(rng: random.Random, median: float, sigma: float, limit: int) -> int:
    return min(max(round(rng.lognormvariate(math.log(median), sigma)), 1), limit)


class SimulatedTraffic:
    """Feeds an engine with arrivals as its time passes. Not thread safe."""

    def __init__(self, engine: SimulatedEngine, arrivals: Iterator[Arrival]) -> None:
        self._engine = engine
        self._arrivals = arrivals
        self._next = next(arrivals, None)

    def advance_to(self, seconds: float) -> None:
        """Run the engine to `seconds` of demo time, submitting each request at the moment of its arrival."""
        while self._next is not None and self._next.seconds <= seconds:
            self._engine.advance_to(self._next.seconds)
            self._engine.submit(self._next.prompt_tokens, self._next.output_tokens)
            self._next = next(self._arrivals, None)
        self._engine.advance_to(seconds)
