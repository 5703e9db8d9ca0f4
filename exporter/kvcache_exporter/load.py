"""The load of one engine over a window, in bins: what arrived, what started, and what was held for how long."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

# Bins that a window is cut into: enough of them for a test of rank, and each long enough (20 s of 300 s) to hold several
# residence times, so that neighbours are nearly independent.
_BINS = 15


@dataclass
class LoadSums:
    """Integrals over the observed part of a bin or a window: seconds, requests, block-seconds, request-seconds, and squares."""

    seconds: float = 0.0
    steps: float = 0.0
    arrived: float = 0.0
    arrived_squared: float = 0.0  # per step, over the step's seconds
    started: float = 0.0
    used: float = 0.0
    used_squared: float = 0.0
    running: float = 0.0
    running_squared: float = 0.0
    used_running: float = 0.0

    def add(self, other: LoadSums, share: float = 1.0) -> None:
        """Take in `share` of another."""
        self.seconds += share * other.seconds
        self.steps += share * other.steps
        self.arrived += share * other.arrived
        self.arrived_squared += share * other.arrived_squared
        self.started += share * other.started
        self.used += share * other.used
        self.used_squared += share * other.used_squared
        self.running += share * other.running
        self.running_squared += share * other.running_squared
        self.used_running += share * other.used_running

    @property
    def rate(self) -> float:
        """Requests arriving per second."""
        return max(self.arrived, 0.0) / self.seconds

    @property
    def load(self) -> float:
        """Blocks in use in steady state (Little): arrivals per second times block-seconds for each that started."""
        return self.rate * self.used / self.started if self.started > 0 else self.used / self.seconds

    @property
    def residence(self) -> float:
        """Seconds that a request runs (Little)."""
        return self.running / self.started if self.started > 0 else self.seconds


@dataclass(frozen=True)
class _Observation:
    at: float
    started: int
    running: int
    waiting: int
    used: int

    def since(self, last: _Observation) -> LoadSums:
        """The step from the page before. A gauge is taken to have stood all the step where it stands now."""
        seconds = self.at - last.at
        # Who arrives joins the queue, who starts leaves it; who is preempted comes back and leaves it again without starting.
        arrived = self.started - last.started + self.waiting - last.waiting
        return LoadSums(
            seconds=seconds,
            steps=1.0,
            arrived=arrived,
            arrived_squared=arrived**2 / seconds,
            started=self.started - last.started,
            used=self.used * seconds,
            used_squared=self.used**2 * seconds,
            running=self.running * seconds,
            running_squared=self.running**2 * seconds,
            used_running=self.used * self.running * seconds,
        )


@dataclass(frozen=True)
class LoadBin:
    """One bin of a window: its number on the clock, the second in its middle, and what was observed in it."""

    number: int
    middle: float
    sums: LoadSums


class LoadWindow:
    """What one engine's pages said during the last `window_seconds`, in bins: its size does not depend on how many there were."""

    def __init__(self, window_seconds: float) -> None:
        self.window_seconds = window_seconds
        self.bin_seconds = window_seconds / _BINS
        self.bins: deque[LoadBin] = deque()
        self._last: _Observation | None = None

    def observe(self, at: float, *, started: int, running: int, waiting: int, used_blocks: int) -> None:
        """Take in a page read at `at` seconds; one not later than the last is ignored. `started` counts first tokens so far."""
        last, new = self._last, _Observation(at, started, running, waiting, used_blocks)
        if last is not None and not at > last.at:
            return
        self._last = new
        if last is None:
            return
        if at - last.at > self.window_seconds / 2:
            # Two pages say nothing about the course of so long a time, and what lies before it is not the present.
            self.bins.clear()
            return
        self._spread(new.since(last), last.at, new.at)

    @property
    def last_at(self) -> float | None:
        """When the last page was read, None before the first."""
        return None if self._last is None else self._last.at

    def _spread(self, step: LoadSums, start: float, end: float) -> None:
        """Share a step among the bins that it touches, and forget the bins that have left the window."""
        first, final = math.floor(start / self.bin_seconds), math.floor(end / self.bin_seconds)
        for number in range(first, final + 1):
            overlap = min(end, (number + 1) * self.bin_seconds) - max(start, number * self.bin_seconds)
            if overlap <= 0:
                continue
            if not self.bins or self.bins[-1].number < number:
                self.bins.append(LoadBin(number, (number + 0.5) * self.bin_seconds, LoadSums()))
            self.bins[-1].sums.add(step, overlap / step.seconds)
        while self.bins and self.bins[0].number < final - _BINS:
            self.bins.popleft()
