"""What an engine is doing, told from successive pages: serving, idle, starting, asleep or frozen look alike in one of them.

vLLM sets its gauges only when a step ends, and nothing else refreshes them: the page of an engine that hangs, or whose requests
were all aborted at once (vllm-project/vllm#29928), answers 200 and shows the last step for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_exporter.readings import EngineReading

SERVING = "serving"
IDLE = "idle"
STARTING = "starting"
ASLEEP = "asleep"
FROZEN = "frozen"
STATES = (SERVING, IDLE, STARTING, ASLEEP, FROZEN)

# A long prefill or the first call of a kernel can hold everything still for seconds: a step of 6 s with a request running, and
# one of 22 s at warm-up, were seen on real engines. Only what lasts is frozen; a longer warm-up step looks so while it runs.
_FROZEN_INTERVALS = 2
_FROZEN_SECONDS = 10.0
# A single page may be rendered between the setting of one gauge and the next.
_ZERO_PAGES = 2
# Blocks taken and given back can cancel out. Usage stayed the same over 3 changes of the running requests at most on recorded and
# simulated engines, and over 6 in a model of small pools (5 to 255 blocks) kept full by a queue; each further one is far rarer.
_PINNED_CHANGES = 20


@dataclass(frozen=True)
class EngineCondition:
    """What an engine is doing: `state` is one of STATES.

    `usage_suspect` is set when its usage cannot be true: nothing held while requests run, or a figure that never moves.
    `shows_room` tells whether blocks that are free on this page are room for requests: the engine serves, and its usage may be
    true of this page alone too.
    """

    state: str
    usage_suspect: bool
    shows_room: bool


class ProgressWatch:
    """Follows one engine through one run, page by page; keeps the last page and a few counts.

    A page whose counters went down starts afresh, and so does a sleep.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._last: EngineReading | None = None
        self._still_since = 0.0
        self._still_intervals = 0
        self._zero_pages = 0
        self._pinned_changes = 0

    def observe(self, at: float, reading: EngineReading) -> EngineCondition:
        """What the engine is doing, given its next page; `at` is the Unix time of that page."""
        if reading.awake is False:
            self._forget()
            return EngineCondition(ASLEEP, usage_suspect=False, shows_room=False)
        if self._last is not None and has_restarted(self._last, reading):
            self._forget()
        self._follow_progress(at, reading)
        self._follow_usage(reading)
        self._last = reading
        state = FROZEN if self._is_frozen(at, reading) else _state_of(reading)
        is_suspect = self._zero_pages >= _ZERO_PAGES or self._pinned_changes >= _PINNED_CHANGES
        shows_room = state in (SERVING, IDLE) and not is_suspect and not self._zero_pages
        return EngineCondition(state, is_suspect, shows_room)

    def _follow_progress(self, at: float, reading: EngineReading) -> None:
        """Count the intervals in which no counter and no gauge moved; one that appears or goes has moved."""
        if self._last is not None and (_counters(reading), _gauges(reading)) == (_counters(self._last), _gauges(self._last)):
            self._still_since = min(self._still_since, at)  # the clock may be set back
            self._still_intervals += 1
        else:
            self._still_since = at
            self._still_intervals = 0

    def _is_frozen(self, at: float, reading: EngineReading) -> bool:
        """Whether there is work, and no step of it has ended for long enough to be sure.

        A prefill in chunks takes blocks with each of them, so that usage moves although no counter does.
        """
        return (
            self._still_intervals >= _FROZEN_INTERVALS
            and at - self._still_since >= _FROZEN_SECONDS
            and any(counter is not None for counter in _counters(reading))
            and (bool(reading.num_requests_running) or _waiting_for_the_engine(reading) > 0)
        )

    def _follow_usage(self, reading: EngineReading) -> None:
        """Count the pages on which running requests hold nothing, and changes of the running requests that usage slept through.

        A request holds a block at least, of any kind of attention or state, so usage moves with each that starts or ends unless
        others make up for it. A full pool is left out: while a queue keeps it full, usage stays at 1 as it should.
        """
        used = _used(reading)
        running = reading.num_requests_running
        self._zero_pages = self._zero_pages + 1 if used == 0 and running and _has_cache(reading) else 0
        last = self._last
        if last is None or not used or reading.usage_ratio == 1 or used != _used(last):
            self._pinned_changes = 0
        elif None not in (running, last.num_requests_running) and running != last.num_requests_running:
            self._pinned_changes += 1


def has_restarted(before: EngineReading, after: EngineReading) -> bool:
    """Whether one engine is another run on the later page: a counter went down, its pool or its server's start time changed.

    What either page does not know tells nothing.
    """
    pairs = zip(_counters(before), _counters(after), strict=True)
    if any(old is not None and new is not None and new < old for old, new in pairs):
        return True
    if None not in (before.num_gpu_blocks, after.num_gpu_blocks) and before.num_gpu_blocks != after.num_gpu_blocks:
        return True
    started, starts = before.process_start_time_seconds, after.process_start_time_seconds
    # Within a second it is the same start, computed or printed another way.
    return started is not None and starts is not None and abs(starts - started) > 1


def _state_of(reading: EngineReading) -> str:
    """The state as far as one page tells.

    Several API servers show no gauges of an engine before its first step. Its counters are there, at 0.
    """
    requests = [count for count in (reading.num_requests_running, reading.num_requests_waiting) if count is not None]
    if reading.usage_ratio is None and not requests and not any(_counters(reading)):
        return STARTING
    return IDLE if requests and not any(requests) else SERVING


def _counters(reading: EngineReading) -> tuple[int | None, ...]:
    """What only goes up while an engine runs, and does so with its work."""
    first_tokens = reading.time_to_first_token_seconds
    return (
        reading.generation_tokens,
        reading.prompt_tokens,
        reading.num_preemptions,
        reading.request_success,
        reading.prefix_cache_queries_tokens,
        reading.prefix_cache_hits_tokens,
        reading.external_prefix_cache_queries_tokens,
        reading.external_prefix_cache_hits_tokens,
        None if first_tokens is None else first_tokens.count,
    )


def _gauges(reading: EngineReading) -> tuple[object, ...]:
    return (
        reading.usage_ratio,
        reading.num_requests_running,
        reading.num_requests_waiting,
        reading.num_requests_waiting_by_reason,
    )


def _waiting_for_the_engine(reading: EngineReading) -> int:
    """Requests in the queue without the deferred ones, which wait for something else (a LoRA slot, a KV transfer)."""
    by_reason = reading.num_requests_waiting_by_reason
    waiting = sum(by_reason.values()) if reading.num_requests_waiting is None else reading.num_requests_waiting
    return waiting - by_reason.get("deferred", 0)


def _used(reading: EngineReading) -> float | None:
    return reading.usage_ratio if reading.used_blocks is None else reading.used_blocks


def _has_cache(reading: EngineReading) -> bool:
    """Whether running requests must hold blocks: a model that only pools may have no cache, and it never generates."""
    return bool(reading.generation_tokens if reading.usable_blocks is None else reading.usable_blocks)
