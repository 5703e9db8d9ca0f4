"""A simulated vLLM engine: continuous batching over a paged block pool, after vLLM V1's `v1/core/sched/scheduler.py`.

Only what a KV cache shows is simulated: which request holds how many blocks, who waits, who is preempted, and when tokens come.
Time is simulated seconds from 0; nothing here reads a clock or draws a random number.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvcache_exporter.simulator.parameters import EngineParameters
from kvcache_exporter.simulator.stats import EngineHistograms, EngineStats, FinishedRequest


@dataclass(frozen=True)
class RequestReading:
    """One unfinished request: how many tokens are known (`num_tokens`), have their KV computed, and how many blocks it holds."""

    request_id: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int


@dataclass
class _Request:
    request_id: int
    prompt_tokens: int
    output_tokens: int
    arrival: float
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    admitted_before: bool = False
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.num_output_tokens

    def read(self) -> RequestReading:
        return RequestReading(self.request_id, self.num_tokens, self.num_computed_tokens, self.num_blocks)


@dataclass
class _Step:
    """Tokens that one engine step computes; `duration` follows from them."""

    requests: list[_Request] = field(default_factory=list)
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decodes: int = 0

    def add(self, request: _Request, num_tokens: int) -> None:
        # A lone missing token is a decode even if it is the end of a chunked prefill: it costs the same.
        if request.num_tokens - request.num_computed_tokens == 1:
            self.num_decodes += 1
        else:
            self.num_prefill_tokens += num_tokens
        request.num_computed_tokens += num_tokens
        self.num_tokens += num_tokens
        self.requests.append(request)

    def duration(self, parameters: EngineParameters) -> float:
        return (
            parameters.step_base_seconds
            + parameters.step_seconds_per_prefill_token * self.num_prefill_tokens
            + parameters.step_seconds_per_sequence * self.num_decodes
        )


class SimulatedEngine:
    """Serves requests over a paged block pool, one engine step after the other.

    Prompts share no prefix, so the prefix cache is asked and never hits. The same calls give the same states, and a stretch of
    time may be cut into pieces without changing them. Not thread safe.
    """

    def __init__(self, parameters: EngineParameters | None = None) -> None:
        self.parameters = parameters or EngineParameters()
        self._now = 0.0
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._used_blocks = 0
        self._step: _Step | None = None
        self._step_end = 0.0
        self._waiting_after_schedule = 0
        self._gauges = (0, 0, 0)
        self._num_submitted = 0
        self._num_preemptions = 0
        self._num_finished = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._prefix_cache_queries_tokens = 0
        self._histograms = EngineHistograms(self.parameters.max_model_len)

    @property
    def now(self) -> float:
        """Simulated seconds since the engine started."""
        return self._now

    @property
    def running(self) -> tuple[RequestReading, ...]:
        """Running requests in the order of their admission."""
        return tuple(request.read() for request in self._running)

    @property
    def waiting(self) -> tuple[RequestReading, ...]:
        """Waiting requests, preempted ones included, in the order in which they will be admitted."""
        return tuple(request.read() for request in self._waiting)

    @property
    def used_blocks(self) -> int:
        """Blocks that running requests hold."""
        return self._used_blocks

    def submit(self, prompt_tokens: int, output_tokens: int) -> int:
        """Queue a request that arrives now and ends after `output_tokens`; return its id, which counts up from 0.

        Raises ValueError when either count is below 1 or their sum is above max_model_len.
        """
        if min(prompt_tokens, output_tokens) < 1:
            raise ValueError("a request has at least 1 prompt token and 1 output token")
        if prompt_tokens + output_tokens > self.parameters.max_model_len:
            raise ValueError(f"{prompt_tokens} + {output_tokens} tokens are above max_model_len {self.parameters.max_model_len}")
        request_id = self._num_submitted
        self._num_submitted += 1
        self._waiting.append(_Request(request_id, prompt_tokens, output_tokens, arrival=self._now))
        return request_id

    def advance(self, dt_seconds: float) -> None:
        """Let `dt_seconds` of simulated time pass; a step that is under way at the end delivers its tokens in a later call.

        Raises ValueError when `dt_seconds` is negative.
        """
        if dt_seconds < 0:
            raise ValueError("time does not run backwards")
        self.advance_to(self._now + dt_seconds)

    def advance_to(self, seconds: float) -> None:
        """Let simulated time run to `seconds`; nothing happens when that is past."""
        while self._now < seconds:
            if self._step is None:
                if not self._running and not self._waiting:
                    self._now = seconds
                    return
                self._step = self._schedule()
                self._waiting_after_schedule = len(self._waiting)
                self._step_end = self._now + self._step.duration(self.parameters)
            if self._step_end > seconds:
                self._now = seconds
                return
            self._now = self._step_end
            self._complete(self._step)
            self._step = None
            self._gauges = (len(self._running), self._waiting_after_schedule, self._used_blocks)

    def stats(self) -> EngineStats:
        """Return what the engine's metrics tell now.

        As in vLLM (`v1/core/sched/scheduler.py`, `make_stats`), the gauges are those of the last step that ended; a request that
        has arrived since is not in the queue yet.
        """
        usable = self.parameters.usable_blocks
        num_running, num_waiting, used_blocks = self._gauges
        return EngineStats(
            num_requests_running=num_running,
            num_requests_waiting=num_waiting,
            used_blocks=used_blocks,
            kv_cache_usage=1.0 - (usable - used_blocks) / usable,
            num_preemptions=self._num_preemptions,
            num_requests_finished=self._num_finished,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries_tokens=self._prefix_cache_queries_tokens,
            histograms=self._histograms.read(),
        )

    def _schedule(self) -> _Step:
        step = _Step()
        if self._schedule_running(step):
            self._admit(step)
        return step

    def _schedule_running(self, step: _Step) -> bool:
        """Give running requests their tokens in order of admission; return False when one had to be preempted."""
        preemptions_before = self._num_preemptions
        index = 0
        while index < len(self._running):
            request = self._running[index]
            num_tokens = min(request.num_tokens - request.num_computed_tokens, self._budget(step))
            if num_tokens == 0 or not self._grow_or_preempt(request, num_tokens):
                break
            step.add(request, num_tokens)
            index += 1
        return self._num_preemptions == preemptions_before

    def _admit(self, step: _Step) -> None:
        """Admit from the head of the queue while seats, token budget and blocks last.

        The whole known sequence has to fit although only a chunk of it is allocated: vLLM's `scheduler_reserve_full_isl`.
        """
        while self._waiting and len(self._running) < self.parameters.max_num_seqs and self._budget(step) > 0:
            request = self._waiting[0]
            if self.parameters.blocks_for(request.num_tokens) > self._free_blocks:
                return
            self._waiting.popleft()
            self._running.append(request)
            if not request.admitted_before:
                request.admitted_before = True
                request.scheduled = self._now
                self._prefix_cache_queries_tokens += request.prompt_tokens
            num_tokens = min(request.num_tokens, self._budget(step))
            self._take(request, self._missing_blocks(request, num_tokens))
            step.add(request, num_tokens)

    def _grow_or_preempt(self, request: _Request, num_tokens: int) -> bool:
        """Allocate for `num_tokens` more, preempting from the youngest; return False when `request` itself had to go."""
        missing = self._missing_blocks(request, num_tokens)
        while missing > self._free_blocks:
            victim = self._running.pop()
            self._release(victim)
            victim.num_computed_tokens = 0
            victim.num_preemptions += 1
            self._num_preemptions += 1
            self._waiting.appendleft(victim)
            if victim is request:
                return False
        self._take(request, missing)
        return True

    def _complete(self, step: _Step) -> None:
        """Deliver a token to each request whose known tokens are all computed, and let go of those that are done."""
        self._histograms.observe_step(step.num_tokens)
        num_finished = self._num_finished
        for request in step.requests:
            if request.num_computed_tokens < request.num_tokens:
                continue
            self._deliver_token(request)
            if request.num_output_tokens == request.output_tokens:
                self._finish(request)
        if self._num_finished > num_finished:
            self._running = [request for request in self._running if request.num_output_tokens < request.output_tokens]

    def _deliver_token(self, request: _Request) -> None:
        if request.num_output_tokens == 0:
            request.first_token = self._now
            self._prompt_tokens += request.prompt_tokens
            self._histograms.observe_first_token(self._now - request.arrival)
        else:
            self._histograms.observe_next_token(self._now - request.last_token)
        request.last_token = self._now
        request.num_output_tokens += 1
        self._generation_tokens += 1

    def _finish(self, request: _Request) -> None:
        self._release(request)
        self._num_finished += 1
        self._histograms.observe_finished(
            FinishedRequest(
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                num_preemptions=request.num_preemptions,
                arrival=request.arrival,
                scheduled=request.scheduled,
                first_token=request.first_token,
                last_token=request.last_token,
            )
        )

    def _budget(self, step: _Step) -> int:
        return self.parameters.max_num_batched_tokens - step.num_tokens

    @property
    def _free_blocks(self) -> int:
        return self.parameters.usable_blocks - self._used_blocks

    def _missing_blocks(self, request: _Request, num_tokens: int) -> int:
        return self.parameters.blocks_for(request.num_computed_tokens + num_tokens) - request.num_blocks

    def _take(self, request: _Request, num_blocks: int) -> None:
        request.num_blocks += num_blocks
        self._used_blocks += num_blocks

    def _release(self, request: _Request) -> None:
        self._used_blocks -= request.num_blocks
        request.num_blocks = 0
