"""Blocks that requests hold now and will hold later, on average: those that run, those that wait, and one more that comes.

Time is counted in tokens of output that each running request makes from now on: 0 is now, 100 is when each has made a hundred
more. What ends before frees its blocks; what goes on grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvcache_exporter.kv_cache_spec import KVCacheLayout
from kvcache_exporter.length_distribution import LengthDistribution
from kvcache_exporter.request_mix import RequestMix
from kvcache_exporter.running_requests import AgeGroup

# Moments that are looked at: close to each other at first, where blocks change fast, then in steps of this ratio.
_FIRST_MOMENT = 4.0
_MOMENT_RATIO = 1.4
# A moment at which fewer requests than this share still run cannot be the fullest.
_FEW = 1e-3


class RequestBlocks:
    """Blocks of one request by its tokens, as the layout has them, averaged over where in its last block it ends.

    An average of many requests has no steps: a request of 100 tokens in blocks of 16 holds 7, one of any length near it holds
    6.75 on average, half a block more than its tokens fill.
    """

    def __init__(self, layout: KVCacheLayout) -> None:
        self._per_block = layout.tokens_per_block
        self._step = layout.tokens_per_block or layout.block_size
        self._at = lru_cache(4096)(layout.blocks_for_request)

    def held(self, tokens: float) -> float:
        """Blocks that a request of about `tokens` tokens holds."""
        if self._per_block is not None:
            return tokens / self._per_block + 0.5
        place = tokens / self._step
        index = int(place)
        low, middle, high = (self._at((index + step) * self._step) for step in range(3))
        return (low + middle + (place - index) * (high - low)) / 2

    def tokens(self, blocks: float, most: float) -> float:
        """Tokens of a request that holds `blocks` blocks, at most `most`."""
        if self._per_block is not None:
            return min(most, max(0.0, (blocks - 0.5) * self._per_block))
        low, high = 0.0, most
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if self.held(middle) < blocks else (low, middle)
        return low


@dataclass(frozen=True)
class ExpectedBlocks:
    """Blocks at each of `moments` (tokens of output from now on), all lists alike long.

    `running`: of the requests that run now; the first is what they hold now. `request`: of one more of the mix that starts now,
    counted as often as it still runs; `request_variance` of the same, blocks squared.
    """

    moments: tuple[float, ...]
    running: tuple[float, ...]
    request: tuple[float, ...]
    request_variance: tuple[float, ...]


def moments(output: LengthDistribution) -> tuple[float, ...]:
    """Moments up to the end of the longest output, tokens; among them those from which on requests end."""
    points, longest = [0.0, _FIRST_MOMENT], output.longest
    while points[-1] < longest:
        points.append(max(points[-1] + _FIRST_MOMENT, points[-1] * _MOMENT_RATIO))
    ends = (low for low, share in zip(output.edges, output.shares, strict=False) if share)
    return tuple(sorted({*points, *ends}))


def expected_blocks(
    blocks: RequestBlocks, mix: RequestMix, ages: Sequence[AgeGroup], used_blocks: int, max_model_len: float
) -> ExpectedBlocks:
    """What the running requests, which hold `used_blocks`, and one of the mix will hold.

    Blocks that are held while nothing runs (a prefill engine holds those that it has yet to hand over) are held on.
    """
    points = moments(mix.output)
    per_token = blocks.held(mix.prompt_mean + 1) - blocks.held(mix.prompt_mean)
    prompt_variance = mix.prompt_variance * per_token * per_token
    request, variance = [], []
    for moment in points:
        alive = mix.output.share_longer(moment)
        held = blocks.held(mix.prompt_mean + moment)
        request.append(alive * held)
        variance.append(alive * (held * held * (1 - alive) + prompt_variance))
    running = _running(blocks, mix, ages, used_blocks, max_model_len, points)
    return ExpectedBlocks(points, running, tuple(request), tuple(variance))


def _running(
    blocks: RequestBlocks,
    mix: RequestMix,
    ages: Sequence[AgeGroup],
    used_blocks: int,
    max_model_len: float,
    points: Sequence[float],
) -> tuple[float, ...]:
    number = sum(group.number for group in ages)
    if not number:
        return (float(used_blocks),) * len(points)
    mean_age = sum(group.number * group.age_tokens for group in ages) / number
    # Their prompts are not those of all requests: they follow from the blocks that they hold, shared prefixes counted once.
    prompt = max(1.0, blocks.tokens(used_blocks / number, max_model_len) - mean_age)
    now = sum(group.number * blocks.held(prompt + group.age_tokens) for group in ages)
    scale = used_blocks / now if now > 0 else 0.0
    living = [(group, mix.output.share_longer(group.age_tokens)) for group in ages]
    return tuple(
        scale
        * sum(
            _left(group, alive, moment, mix.output) * blocks.held(prompt + group.age_tokens + moment) for group, alive in living
        )
        for moment in points
    )


def _left(group: AgeGroup, alive: float, moment: float, output: LengthDistribution) -> float:
    """Requests of the group that still run at that moment."""
    return group.number * output.share_longer(group.age_tokens + moment) / alive if alive > 0 else 0.0


def fullest(expected: ExpectedBlocks) -> float:
    """Most blocks that the running requests hold at any moment from now on."""
    return max(expected.running)


def requests_that_fit(
    expected: ExpectedBlocks,
    room_blocks: float,
    *,
    waiting: float,
    queue_spread: float,
    cost_factor: float,
    admission_extra: float,
) -> float:
    """Requests of the mix (not whole, and below 0 when too many are here) that fit at every moment beside running and waiting.

    Each moment has `room_blocks`, of which running ones take theirs and `waiting` ones the blocks of the mix, `queue_spread`
    standard deviations above the mean. A new request counts `cost_factor` times its mean. `admission_extra` blocks have to be
    free now besides.
    """
    few = _FEW * max(expected.request)
    least = float("inf")
    for index, request in enumerate(expected.request):
        if request > few:
            queue = waiting * request + queue_spread * math.sqrt(waiting * expected.request_variance[index])
            room = room_blocks - expected.running[index] - queue - (0.0 if index else admission_extra)
            least = min(least, room / (request * cost_factor))
    return least
