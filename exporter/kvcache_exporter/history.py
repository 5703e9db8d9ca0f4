"""What is remembered of one engine from poll to poll: whether it moves, what it gets, how far that is, how its load goes."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_exporter.engine_state import EngineCondition, ProgressWatch, has_restarted
from kvcache_exporter.forecast import LoadForecast, LoadHistory
from kvcache_exporter.limits import waiting_for_capacity
from kvcache_exporter.memory_bandwidth import DecodeReads, StepReads, StepsDone, decode_reads, steps_between
from kvcache_exporter.prefix_sharing import PrefixSavings, PrefixSharing
from kvcache_exporter.readings import EngineReading
from kvcache_exporter.recent_latency import LatencyQuantiles, RecentLatency
from kvcache_exporter.request_mix import RequestMix, RequestMixHistory
from kvcache_exporter.running_requests import AgeGroup, RunningRequests

# A queue seen at one poll may be of the step that runs: its token budget is spent. One seen at so many in a row stays.
_POLLS_OF_A_QUEUE = 3
# A full cache has room for a moment whenever a request ends. Room that was there for so long, and at so many polls, stays.
_SECONDS_OF_ROOM = 10.0


@dataclass(frozen=True)
class Traffic:
    """What an engine's past says of its requests. `mix` is None before the first one has finished.

    `has_requests`: one has started at least. `prefix` is what prefix caching saves, None when nothing was looked up.
    `ages` are the running requests by how far they have come. `queue_stays`: requests have waited at every one of the last polls,
    and `least_free_blocks` were free at any of them (None where usage is not known);
    `queue_is_stuck`: and since the last poll none of them has started.
    """

    mix: RequestMix | None = None
    ages: tuple[AgeGroup, ...] = ()
    queue_stays: bool = False
    least_free_blocks: int | None = None
    queue_is_stuck: bool = False
    has_requests: bool = False
    prefix: PrefixSavings | None = None


class EngineHistory:
    """The past of one engine; it starts afresh when the engine does. Its size is bounded.

    `window_seconds` is how far back "lately" reaches.
    """

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._reading: EngineReading | None = None
        self._at = 0.0
        self._seconds = 0.0
        self._is_compared = False
        self._is_stuck = False
        self._condition: EngineCondition | None = None
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._progress = ProgressWatch()
        self._mix = RequestMixHistory(self._window_seconds)
        self._running = RunningRequests()
        self._prefix = PrefixSharing(self._window_seconds)
        self._load = LoadHistory(self._window_seconds)
        self._polls_with_queue = 0
        self._free_blocks: list[tuple[float, int]] = []
        self._steps: StepsDone | None = None
        self._first_token = RecentLatency(self._window_seconds)
        self._output_token = RecentLatency(self._window_seconds)

    def observe(self, at: float, reading: EngineReading) -> EngineCondition:
        """Take the reading of a page that was read `at` (Unix seconds); says in what state the engine is.

        A page that was seen before, which stands for a tick without a new one, changes nothing.
        """
        before = self._reading
        if self._condition is not None and reading is before and at == self._at:
            return self._condition
        if before is not None and has_restarted(before, reading):
            self._start_afresh()
            before = None
        if before is None:
            self._mix.begin(reading)
        else:
            self._mix.observe(max(0.0, at - self._at), before, reading)
            self._running.observe(before, reading)
            self._prefix.observe(max(0.0, at - self._at), before, reading)
            self._steps = steps_between(at - self._at, before, reading)
            self._observe_latency(max(0.0, at - self._at), before, reading)
        self._observe_load(at, reading)
        self._polls_with_queue = self._polls_with_queue + 1 if waiting_for_capacity(reading) else 0
        self._observe_free_blocks(at, reading)
        self._is_stuck = before is not None and self._nobody_started(before, reading)
        self._seconds = 0.0 if before is None else max(0.0, at - self._at)
        self._is_compared = False
        self._reading, self._at = reading, at
        self._condition = self._progress.observe(at, reading)
        return self._condition

    @staticmethod
    def _nobody_started(before: EngineReading, after: EngineReading) -> bool:
        """Whether requests waited on both pages and none of them got its first token in between."""
        earlier, later = before.time_to_first_token_seconds, after.time_to_first_token_seconds
        if earlier is None or later is None or earlier.count != later.count:
            return False
        return waiting_for_capacity(before) > 0 and waiting_for_capacity(after) > 0

    def _observe_free_blocks(self, at: float, reading: EngineReading) -> None:
        if reading.used_blocks is None or reading.usable_blocks is None:
            self._free_blocks = []
            return
        self._free_blocks.append((at, reading.usable_blocks - reading.used_blocks))
        # The last polls, and so many more that their first is old enough.
        while len(self._free_blocks) > _POLLS_OF_A_QUEUE and at - self._free_blocks[1][0] >= _SECONDS_OF_ROOM:
            del self._free_blocks[0]

    def _observe_latency(self, seconds: float, before: EngineReading, after: EngineReading) -> None:
        self._first_token.observe(seconds, before.time_to_first_token_seconds, after.time_to_first_token_seconds)
        self._output_token.observe(seconds, before.inter_token_latency_seconds, after.inter_token_latency_seconds)

    def _observe_load(self, at: float, reading: EngineReading) -> None:
        started = reading.time_to_first_token_seconds
        if started is None or reading.num_requests_running is None or reading.used_blocks is None:
            return
        self._load.observe(
            at,
            started=started.count,
            running=reading.num_requests_running,
            waiting=waiting_for_capacity(reading),
            used_blocks=reading.used_blocks,
        )

    def traffic(self, max_model_len: int | None, tokens_per_block: int | None) -> Traffic:
        """What the readings so far say of the requests.

        `tokens_per_block` is None where a request needs blocks of several groups: what it shares cannot be told there.
        """
        mix = self._mix.mix(max_model_len)
        reading = self._reading
        running = 0 if reading is None else reading.num_requests_running or 0
        ages = () if mix is None else tuple(self._running.ages(running, mix.output))
        if mix is not None and reading is not None and tokens_per_block is not None and not self._is_compared:
            self._is_compared = True
            if reading.used_blocks is not None:
                # Half of a request's last block is empty, on average.
                held = (reading.used_blocks - running / 2) * tokens_per_block
                self._prefix.compare(self._seconds, mix.prompt_mean, ages, held)
        first_tokens = None if reading is None else reading.time_to_first_token_seconds
        has_requests = running > 0 or (first_tokens is not None and first_tokens.count > 0)
        return Traffic(
            mix=mix,
            ages=ages,
            queue_stays=self._polls_with_queue >= _POLLS_OF_A_QUEUE,
            least_free_blocks=min((free for _, free in self._free_blocks), default=None),
            queue_is_stuck=self._is_stuck,
            has_requests=has_requests,
            prefix=self._prefix.savings(),
        )

    def decode_reads(self, step: StepReads | None) -> DecodeReads | None:
        """What one of the engine's GPUs has read a second between the last two pages, given what a step reads."""
        return None if self._steps is None else decode_reads(self._steps, step)

    def time_to_first_token(self) -> LatencyQuantiles | None:
        """Seconds from arrival to first token of the requests of late; None when there was none."""
        return self._first_token.quantiles()

    def time_per_output_token(self) -> LatencyQuantiles | None:
        """Seconds between output tokens of late; None when there was none."""
        return self._output_token.quantiles()

    def forecast(self, *, usable_blocks: int, blocks_per_request: float, seats: int | None) -> LoadForecast:
        """How the load of the cache goes on, given what a typical request takes at its most."""
        return self._load.forecast(usable_blocks=usable_blocks, blocks_per_request=blocks_per_request, max_num_seqs=seats)
