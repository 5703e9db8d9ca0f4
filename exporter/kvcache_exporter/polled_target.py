"""One target from tick to tick: its page at each, its facts once and again after a restart, each in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from kvcache_exporter.capture import Recorder
from kvcache_exporter.config import Config, TargetConfig
from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_reading import GpuReading
from kvcache_exporter.health import HealthBook
from kvcache_exporter.job import Job
from kvcache_exporter.readings import PageReading
from kvcache_exporter.snapshot import TargetSnapshot
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

# A fact that could not be had from a running server (an API key is missing, an unknown model) is asked again after this long.
_FACTS_RETRY_SECONDS = 30.0
# A page that takes more than this share of the interval is asked at every second tick only: it costs the engine's API server.
_SLOW_PAGE_SHARE = 0.1


class PolledTarget:
    """What is remembered of one target between ticks. `recorder`, where given, gets its pages."""

    def __init__(self, target: TargetConfig, config: Config, recorder: Recorder | None = None) -> None:
        options = HttpOptions(config.poll_timeout_seconds, config.max_body_bytes, target.bearer_token_file, target.ca_file)
        on_page = None if recorder is None else partial(recorder.page, target.name)
        page_client = VllmClient(target.url, HttpClient(options), on_page=on_page)
        # Its own client: requests.Session is not for two threads at once.
        facts_client = VllmClient(target.url, HttpClient(options))
        self.config = target
        self._settings = config
        self._recorder = recorder
        self._page_job: Job[PageReading] = Job(f"page {target.name}", page_client.metrics)
        self._history = TargetHistory(target, request_lengths=config.request_lengths, window_seconds=config.window_seconds)
        self._page: PageReading | None = None
        self._read_at = 0.0
        self._skip_page = False
        self._timed_out = False
        self._facts_job: Job[FactsReading] = Job(
            f"facts {target.name}", lambda: read_facts(self.config, facts_client, self._facts)
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
                seconds = self._settings.poll_timeout_seconds
                error = SourceError("timeout", f"{self.config.url} does not answer within {seconds:g} s")
                health.failure(self.config.name, SOURCE_PAGE, error, duration_seconds=seconds)
        elif outcome.error is not None:
            health.failure(self.config.name, SOURCE_PAGE, outcome.error, duration_seconds=outcome.duration_seconds)
        elif outcome.value is not None:
            health.success(self.config.name, SOURCE_PAGE, at=now, duration_seconds=outcome.duration_seconds)
            health.count(self.config.name, SOURCE_PAGE, "invalid_sample", outcome.value.invalid_samples)
            self._page = outcome.value
            self._read_at = now
            self._skip_page = outcome.duration_seconds > _SLOW_PAGE_SHARE * self._settings.poll_interval_seconds
        if self._page is None:
            self._history.missed()
            if self._recorder is not None:
                self._recorder.missed(self.config.name)
        if self._page is None or self._history.restarts_with(self._page):
            # Another run may answer next, with other flags and another model; an answer under way may still be of the old one.
            self._facts = Facts()
            self._facts_outdated = self._facts_pending
            self._ask_facts_at = 0.0

    def start_facts(self, now: float) -> None:
        """Begin to ask for the facts that are missing, if the server answers and it is time."""
        if self._page is not None and not self._facts_pending and not self._facts.complete and now >= self._ask_facts_at:
            self._facts_pending = self._facts_job.start()

    def finish(self, now: float, deadline: float, health: HealthBook, gpus: Sequence[GpuReading]) -> TargetSnapshot:
        """Wait for the facts and say what the target looks like. `gpus` are those that its engines may run on."""
        if self._facts_pending:
            self._finish_facts(now, deadline, health)
        if self._page is None:
            return TargetSnapshot(name=self.config.name, url=self.config.url, pod=self.config.pod)
        snapshot, refusal = self._history.observe(self._page, self._read_at, self._facts, gpus)
        if refusal is not None:
            health.failure(self.config.name, SOURCE_MODEL_CONFIG, refusal, duration_seconds=0.0)
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
                health.failure(self.config.name, source, answer.error, duration_seconds=answer.duration_seconds)
            else:
                health.success(self.config.name, source, at=now, duration_seconds=answer.duration_seconds)
