"""What kind of requests an engine gets, learned from differences of its counters and histograms.

Prompts are counted when a request starts (`prompt_tokens` over the count of first tokens), so a new kind shows at once; outputs
when it ends. Traffic drifts, jumps or stays, and no one window suits all: several memories of different length run beside each
other, and each is trusted by how well it foretold the prompts that came next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcache_exporter.length_distribution import LengthDistribution, length_distribution
from kvcache_exporter.readings import EngineReading, Histogram

# Half-lives of the memories, in windows: a short one for jumps, a long one for traffic that stays.
_HALF_LIVES = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
_WINDOW_MEMORY = 2
# Forecasts are compared with what came this often, in windows: one request says little about a mean.
_CHECKS_PER_WINDOW = 64
# Part of the trust that all memories share evenly, whatever they foretold (as in "fixed share" forecasting: the best memory
# changes when traffic does).
_EVEN_TRUST = 0.3
# What an engine did before the exporter came counts as this many requests: a start, not a weight.
_REQUESTS_BEFORE = 20.0
# Prompts and outputs that stand for their distributions where the two are added up.
_STEPS = 20


@dataclass(frozen=True)
class RequestMix:
    """The requests to expect next. `prompt_mean` and the distributions are in tokens.

    `prompt` and `output` are of finished requests; `prompt_mean` is of started ones.
    """

    prompt_mean: float
    prompt: LengthDistribution
    output: LengthDistribution

    @property
    def prompt_variance(self) -> float:
        """Variance of a prompt, tokens squared: the spread of finished ones around the mean of started ones."""
        return self.prompt.variance * (self.prompt_mean / self.prompt.mean) ** 2 if self.prompt.mean > 0 else 0.0

    @property
    def mean_tokens(self) -> float:
        """Prompt and output of the mean request, tokens."""
        return self.prompt_mean + self.output.mean

    def quantile_tokens(self, share: float) -> float:
        """Prompt and output that `share` of the requests do not exceed, tokens; prompt and output taken as independent."""
        steps = [(step + 0.5) / _STEPS for step in range(_STEPS)]
        outputs = [self.output.quantile(step) for step in steps]
        scale = self.prompt_mean / self.prompt.mean if self.prompt.mean > 0 else 1.0
        prompts = [self.prompt.quantile(step) * scale for step in steps]
        sums = sorted(prompt + output for prompt in prompts for output in outputs)
        return sums[min(len(sums) - 1, math.ceil(share * len(sums)) - 1)]


@dataclass(frozen=True)
class _Increment:
    """What one poll brought: requests started and their prompt tokens, and those that finished."""

    started: float
    prompt_tokens: float
    prompt: tuple[float, ...]
    prompt_sum: float
    output: tuple[float, ...]
    output_sum: float

    def times(self, factor: float) -> _Increment:
        return _Increment(
            self.started * factor,
            self.prompt_tokens * factor,
            tuple(number * factor for number in self.prompt),
            self.prompt_sum * factor,
            tuple(number * factor for number in self.output),
            self.output_sum * factor,
        )


@dataclass
class _Memory:
    """Sums that lose half their weight in `half_life_seconds`."""

    half_life_seconds: float
    started: float = 0.0
    prompt_tokens: float = 0.0
    prompt: list[float] = field(default_factory=list)
    prompt_sum: float = 0.0
    output: list[float] = field(default_factory=list)
    output_sum: float = 0.0

    def add(self, seconds: float, more: _Increment) -> None:
        kept = 0.5 ** (seconds / self.half_life_seconds)
        self.started = self.started * kept + more.started
        self.prompt_tokens = self.prompt_tokens * kept + more.prompt_tokens
        self.prompt = [a * kept + b for a, b in zip(self.prompt or [0.0] * len(more.prompt), more.prompt, strict=True)]
        self.prompt_sum = self.prompt_sum * kept + more.prompt_sum
        self.output = [a * kept + b for a, b in zip(self.output or [0.0] * len(more.output), more.output, strict=True)]
        self.output_sum = self.output_sum * kept + more.output_sum

    @property
    def prompt_mean(self) -> float:
        return self.prompt_tokens / self.started


class RequestMixHistory:
    """Learns the mix of one run of one engine. Its size does not grow: five memories of two histograms.

    `window_seconds` is the half-life of the middle memory. Time counts while requests start or end: a quiet night makes nobody
    forget the traffic of the day.
    """

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._memories = [_Memory(window_seconds * half_life) for half_life in _HALF_LIVES]
        self._scores = [0.0] * len(self._memories)
        self._surprise = 1.0
        self._surprise_weight = 1.0
        self._prompt_bounds: tuple[float, ...] = ()
        self._output_bounds: tuple[float, ...] = ()
        self._foretold: list[tuple[float, float]] = []
        self._unchecked_seconds = 0.0
        self._unchecked_started = 0.0
        self._unchecked_tokens = 0.0

    def begin(self, reading: EngineReading) -> None:
        """Take what the engine counted before, as a small start."""
        before = _increment(None, reading)
        if before is None:
            return
        self._learn_bounds(reading)
        most = max(before.started, sum(before.output), 1.0)
        for memory in self._memories:
            memory.add(0.0, before.times(min(1.0, _REQUESTS_BEFORE / most)))

    def observe(self, seconds: float, before: EngineReading, after: EngineReading) -> None:
        """Take what happened in the `seconds` between two readings of one run."""
        more = _increment(before, after)
        if more is None or not (more.started or any(more.output)):
            return
        self._learn_bounds(after)
        self._check(seconds, more)
        for memory in self._memories:
            memory.add(seconds, more)

    def mix(self, max_model_len: int | None) -> RequestMix | None:
        """The requests to expect; None before the first one has finished."""
        known = [
            (trust, memory)
            for trust, memory in zip(self._trust(), self._memories, strict=True)
            if memory.started > 0 and sum(memory.prompt) > 0 and sum(memory.output) > 0
        ]
        total = sum(trust for trust, _ in known)
        if not total:
            return None
        prompt_mean = sum(trust * memory.prompt_mean for trust, memory in known) / total
        prompt = _blend(self._prompt_bounds, [(t, m.prompt, m.prompt_sum) for t, m in known], max_model_len)
        output = _blend(self._output_bounds, [(t, m.output, m.output_sum) for t, m in known], max_model_len)
        return None if prompt is None or output is None else RequestMix(prompt_mean, prompt, output)

    def _learn_bounds(self, reading: EngineReading) -> None:
        if reading.request_prompt_tokens is not None and reading.request_generation_tokens is not None:
            self._prompt_bounds = reading.request_prompt_tokens.bounds
            self._output_bounds = reading.request_generation_tokens.bounds

    def _trust(self) -> list[float]:
        best = max(self._scores)
        weights = [math.exp(score - best) for score in self._scores]
        total, even = sum(weights), _EVEN_TRUST / len(weights)
        return [(1 - _EVEN_TRUST) * weight / total + even for weight in weights]

    def _check(self, seconds: float, more: _Increment) -> None:
        """Score the memories by the requests that started since they were last asked.

        The score is the log likelihood of the mean prompt, normal around what each memory says, lost by half in a window.
        Traffic is more uneven than independent requests would make it: what exceeds that is `_surprise`, and widens all alike.
        """
        if self._unchecked_seconds + seconds > self._window_seconds / _CHECKS_PER_WINDOW:
            variance = self._prompt_variance()
            if self._foretold and self._unchecked_started > 0 and variance > 0:
                mean = self._unchecked_tokens / self._unchecked_started
                spreads = [variance * (1 / self._unchecked_started + 1 / max(weight, 1.0)) for _, weight in self._foretold]
                squares = [(mean - told) ** 2 / spread for (told, _), spread in zip(self._foretold, spreads, strict=True)]
                kept = 0.5 ** (self._unchecked_seconds / self._window_seconds)
                surprise = sum(trust * square for trust, square in zip(self._trust(), squares, strict=True))
                weight = self._surprise_weight * kept
                self._surprise = (self._surprise * weight + surprise) / (weight + 1)
                self._surprise_weight = weight + 1
                widened = max(1.0, self._surprise)
                self._scores = [
                    score * kept - square / widened / 2 - math.log(spread) / 2
                    for score, square, spread in zip(self._scores, squares, spreads, strict=True)
                ]
            self._foretold = [(m.prompt_mean, m.started) for m in self._memories] if self._memories[0].started > 0 else []
            self._unchecked_seconds = self._unchecked_started = self._unchecked_tokens = 0.0
        self._unchecked_seconds += seconds
        self._unchecked_started += more.started
        self._unchecked_tokens += more.prompt_tokens

    def _prompt_variance(self) -> float:
        """Variance of one prompt over the window, tokens squared; 0 while nothing has finished."""
        memory = self._memories[_WINDOW_MEMORY]
        distribution = _blend(self._prompt_bounds, [(1.0, memory.prompt, memory.prompt_sum)], None)
        return 0.0 if distribution is None else distribution.variance


def _blend(
    bounds: Sequence[float], parts: Sequence[tuple[float, Sequence[float], float]], limit: int | None
) -> LengthDistribution | None:
    """One distribution of several: (weight, numbers in buckets, sum of lengths) each."""
    numbers = [0.0] * (len(bounds) + 1)
    mean = weights = 0.0
    for weight, part, length_sum in parts:
        count = sum(part)
        if count > 0:
            weights += weight
            mean += weight * length_sum / count
            numbers = [total + weight * number / count for total, number in zip(numbers, part, strict=True)]
    return length_distribution(bounds, numbers, mean / weights, limit=limit) if weights > 0 else None


def _increment(before: EngineReading | None, after: EngineReading) -> _Increment | None:
    """What the counters gained; None when the page lacks them, or shows another process's histogram than the page before."""
    prompt = _gained(None if before is None else before.request_prompt_tokens, after.request_prompt_tokens)
    output = _gained(None if before is None else before.request_generation_tokens, after.request_generation_tokens)
    if prompt is None or output is None:
        return None
    started, tokens = _started(before, after)
    if started is None or tokens is None:
        # Without a count of starts, a request is counted when it ends.
        started, tokens = sum(prompt[0]), prompt[1]
    return _Increment(started, tokens, *prompt, *output)


def _started(before: EngineReading | None, after: EngineReading) -> tuple[float | None, float | None]:
    first_tokens, prompt_tokens = after.time_to_first_token_seconds, after.prompt_tokens
    if first_tokens is None or prompt_tokens is None:
        return None, None
    if before is None:
        return first_tokens.count, prompt_tokens
    if before.time_to_first_token_seconds is None or before.prompt_tokens is None:
        return None, None
    started = first_tokens.count - before.time_to_first_token_seconds.count
    tokens = prompt_tokens - before.prompt_tokens
    return (None, None) if started < 0 or tokens < 0 else (started, tokens)


def _gained(before: Histogram | None, after: Histogram | None) -> tuple[tuple[float, ...], float] | None:
    """Observations in each bucket, and their sum, that `after` has more than `before`."""
    if after is None:
        return None
    counts: Sequence[int] = after.counts
    length_sum = after.sum
    if before is not None:
        if before.bounds != after.bounds:
            return None
        counts = [new - old for old, new in zip(before.counts, after.counts, strict=True)]
        length_sum -= before.sum
    numbers = tuple(float(high - low) for low, high in zip((0, *counts), counts, strict=False))
    return None if min(numbers) < 0 or length_sum < 0 else (numbers, length_sum)
