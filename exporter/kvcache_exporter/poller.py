"""The tick: asks every source in its own thread, hands readings to the core, and swaps one immutable Snapshot.

It is the one place that turns errors into health. A source that fails loses its values at once; the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from kvcache_exporter.capture import Recorder
from kvcache_exporter.config import Config, TargetConfig
from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_placement import GpuPlacement
from kvcache_exporter.health import HealthBook
from kvcache_exporter.job import Job
from kvcache_exporter.node_gpus import SOURCE_NVML, GpuSources, NodeGpus, NodeReading
from kvcache_exporter.readings import PageReading
from kvcache_exporter.snapshot import Snapshot, TargetSnapshot
from kvcache_exporter.sources.http import HttpClient, HttpOptions
from kvcache_exporter.sources.vllm import VllmClient
from kvcache_exporter.target import (
    SOURCE_MODEL_CONFIG,
    SOURCE_PAGE,
    Facts,
    FactsReading,
    TargetHistory,
    read_facts,
)

log = logging.getLogger(__name__)

# A fact that could not be had from a running server (an API key is missing, an unknown model) is asked again after this long.
_FACTS_RETRY_SECONDS = 30.0
# On top of the timeout, for the thread to report it.
_GRACE_SECONDS = 0.25
# A page that takes more than this share of the interval is asked at every second tick only: it costs the engine's API server.
_SLOW_PAGE_SHARE = 0.1


class Poller:
    """Polls all targets and the GPUs of this machine.

    `clock` gives Unix seconds for time stamps. `gpus` are what tells of GPUs, None for nothing. One thread calls `poll_once` or
    `run`; `latest` may be called from any.
    """

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float] = time.time,
        gpus: GpuSources | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._health = HealthBook()
        self._targets = [_TargetState(target, config, recorder) for target in config.targets]
        self._gpus = None if gpus is None else NodeGpus(config, gpus)
        self._placement = GpuPlacement(config.targets)
        self._latest: Snapshot | None = None
        self._ticked_at = clock()

    def latest(self) -> Snapshot | None:
        """Return the newest snapshot; None before the first tick is done."""
        return self._latest

    @property
    def ticked_at(self) -> float:
        """When the last tick ended (Unix seconds), or when the poller was made."""
        return self._ticked_at

    def poll_once(self) -> Snapshot:
        """Do one tick: returns within poll_timeout_seconds and a moment, whatever the sources do."""
        now = self._clock()
        timeout = self._config.poll_timeout_seconds
        deadline = time.monotonic() + timeout + _GRACE_SECONDS
        for target in self._targets:
            target.start_page()
        if self._gpus is not None:
            self._gpus.start(now)
        # Facts come after the page, not beside it: an engine is asked one thing at a time, and one that is down only its page.
        for target in self._targets:
            target.finish_page(now, deadline, self._health)
            target.start_facts(now)
        targets = tuple(target.finish(now, deadline, self._health) for target in self._targets)
        node = NodeReading() if self._gpus is None else self._gpus.finish(now, deadline, self._health)
        placed = self._placement.place(node, targets)
        contradictions = sum(gpu.memory is not None and gpu.memory.contradiction for gpu in placed.gpus)
        self._health.count("", SOURCE_NVML, "split_exceeds_used", contradictions)
        snapshot = Snapshot(
            at=now,
            targets=placed.targets,
            health=self._health.snapshot(),
            nvml=node.nvml,
            gpus=placed.gpus,
            nvml_read_at=None if node.nvml is None else now,
        )
        self._latest = snapshot
        self._ticked_at = self._clock()
        return snapshot

    def run(self, stop: threading.Event) -> None:
        """Tick at the interval until `stop` is set; a tick that overruns is followed by the next whole one, not by a burst."""
        interval = self._config.poll_interval_seconds
        next_tick = time.monotonic()
        while not stop.is_set():
            self.poll_once()
            now = time.monotonic()
            next_tick += interval * max(1, -(-(now - next_tick) // interval))
            stop.wait(next_tick - now)


class _TargetState:
    """What the poller remembers of one target between ticks."""

    def __init__(self, target: TargetConfig, config: Config, recorder: Recorder | None) -> None:
        options = HttpOptions(config.poll_timeout_seconds, config.max_body_bytes, target.bearer_token_file, target.ca_file)
        on_page = None if recorder is None else partial(recorder.page, target.name)
        page_client = VllmClient(target.url, HttpClient(options), on_page=on_page)
        # Its own client: requests.Session is not for two threads at once.
        facts_client = VllmClient(target.url, HttpClient(options))
        self._target = target
        self._config = config
        self._recorder = recorder
        self._page_job: Job[PageReading] = Job(f"page {target.name}", page_client.metrics)
        self._history = TargetHistory(target, request_lengths=config.request_lengths, window_seconds=config.window_seconds)
        self._page: PageReading | None = None
        self._read_at = 0.0
        self._skip_page = False
        self._timed_out = False
        self._facts_job: Job[FactsReading] = Job(
            f"facts {target.name}", lambda: read_facts(self._target, facts_client, self._facts)
        )
        self._facts = Facts()
        self._facts_pending = False
        self._facts_outdated = False
        self._ask_facts_at = 0.0

    def start_page(self) -> None:
        """Begin to read the page, unless it is one to skip or the one before has not come back."""
        if not self._skip_page and self._page_job.start():
            self._timed_out = False

    def finish_page(self, now: float, deadline: float, health: HealthBook) -> None:
        """Wait for the page; one that does not come, or fails, leaves none."""
        if self._skip_page:
            self._skip_page = False
            return
        self._page = None
        outcome = self._page_job.finish(deadline - time.monotonic())
        if outcome is None:
            if not self._timed_out:
                self._timed_out = True
                seconds = self._config.poll_timeout_seconds
                error = SourceError("timeout", f"{self._target.url} does not answer within {seconds:g} s")
                health.failure(self._target.name, SOURCE_PAGE, error, duration_seconds=seconds)
        elif outcome.error is not None:
            health.failure(self._target.name, SOURCE_PAGE, outcome.error, duration_seconds=outcome.duration_seconds)
        elif outcome.value is not None:
            health.success(self._target.name, SOURCE_PAGE, at=now, duration_seconds=outcome.duration_seconds)
            health.count(self._target.name, SOURCE_PAGE, "invalid_sample", outcome.value.invalid_samples)
            self._page = outcome.value
            self._read_at = now
            self._skip_page = outcome.duration_seconds > _SLOW_PAGE_SHARE * self._config.poll_interval_seconds
        if self._page is None:
            self._history.missed()
            if self._recorder is not None:
                self._recorder.missed(self._target.name)
        if self._page is None or self._history.restarts_with(self._page):
            # Another run may answer next, with other flags and another model; an answer under way may still be of the old one.
            self._facts = Facts()
            self._facts_outdated = self._facts_pending
            self._ask_facts_at = 0.0

    def start_facts(self, now: float) -> None:
        """Begin to ask for the facts that are missing, if the server answers and it is time."""
        if self._page is not None and not self._facts_pending and not self._facts.complete and now >= self._ask_facts_at:
            self._facts_pending = self._facts_job.start()

    def finish(self, now: float, deadline: float, health: HealthBook) -> TargetSnapshot:
        """Wait for the facts and say what the target looks like."""
        if self._facts_pending:
            self._finish_facts(now, deadline, health)
        if self._page is None:
            return TargetSnapshot(name=self._target.name, url=self._target.url)
        snapshot, refusal = self._history.observe(self._page, self._read_at, self._facts)
        if refusal is not None:
            health.failure(self._target.name, SOURCE_MODEL_CONFIG, refusal, duration_seconds=0.0)
        return snapshot

    def _finish_facts(self, now: float, deadline: float, health: HealthBook) -> None:
        outcome = self._facts_job.finish(deadline - time.monotonic())
        if outcome is None:
            return
        self._facts_pending = False
        outdated, self._facts_outdated = self._facts_outdated, False
        if outdated or outcome.value is None:
            return
        self._facts = outcome.value.facts
        self._ask_facts_at = now + _FACTS_RETRY_SECONDS
        for source, answer in outcome.value.outcomes.items():
            if answer.error is not None:
                health.failure(self._target.name, source, answer.error, duration_seconds=answer.duration_seconds)
            else:
                health.success(self._target.name, source, at=now, duration_seconds=answer.duration_seconds)
