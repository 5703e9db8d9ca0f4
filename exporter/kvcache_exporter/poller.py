"""The tick: asks every source in its own thread, hands readings to the core, and swaps one immutable Snapshot.

It is the one place that turns errors into health. A source that fails loses its values at once; the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvcache_exporter.capture import Recorder
from kvcache_exporter.config import Config
from kvcache_exporter.discovery import Discovery
from kvcache_exporter.gpu_placement import GpuPlacement
from kvcache_exporter.gpu_reading import GpuReading
from kvcache_exporter.health import HealthBook
from kvcache_exporter.node_gpus import SOURCE_NVML, GpuSources, NodeGpus, NodeReading
from kvcache_exporter.polled_target import PolledTarget
from kvcache_exporter.snapshot import Snapshot

log = logging.getLogger(__name__)

# On top of the timeout, for the thread to report it.
_GRACE_SECONDS = 0.25


class Poller:
    """Polls all targets and the GPUs of this machine.

    `clock` gives Unix seconds for time stamps. `gpus` are what tells of GPUs, None for nothing; `discovery` finds targets besides
    the configured ones. One thread calls `poll_once` or `run`; `latest` may be called from any.
    """

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float] = time.time,
        gpus: GpuSources | None = None,
        discovery: Discovery | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._health = HealthBook()
        self._recorder = recorder
        self._discovery = discovery
        self._targets = {target.name: PolledTarget(target, config, recorder) for target in config.targets}
        self._gpus = None if gpus is None else NodeGpus(config, gpus)
        self._gpus_here: tuple[GpuReading, ...] = ()
        self._placement = GpuPlacement()
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
        if self._discovery is not None:
            self._follow(self._discovery, now)
        polled = tuple(self._targets.values())
        configs = {target.config.name: target.config for target in polled}
        for target in polled:
            target.start_page()
        if self._gpus is not None:
            self._gpus.start(now, configs)
        # Facts come after the page, not beside it: an engine is asked one thing at a time, and one that is down only its page.
        for target in polled:
            target.finish_page(now, deadline, self._health)
            target.start_facts(now)
        node = NodeReading() if self._gpus is None else self._gpus.finish(now, deadline, self._health)
        if node.nvml is not None:
            # Which GPUs there are stays true while NVML fails.
            self._gpus_here = node.nvml.gpus
        targets = tuple(target.finish(now, deadline, self._health, self._gpus_here) for target in polled)
        placed = self._placement.place(node, targets, configs)
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

    def _follow(self, discovery: Discovery, now: float) -> None:
        """Poll what is found now, and forget what is no longer: its series end with this tick."""
        found = {target.name: target for target in discovery.targets(now, self._health)}
        configured = {target.name: target for target in self._config.targets}
        # A name that is configured stays what the operator says it is.
        wanted = {**found, **configured}
        for name, target in list(self._targets.items()):
            if wanted.get(name) != target.config:
                del self._targets[name]
                self._placement.forget(name)
                if name not in wanted:
                    log.info("target gone", extra={"fields": {"target": name}})
        for name, config in wanted.items():
            if name not in self._targets:
                log.info("target found", extra={"fields": {"target": name, "url": config.url}})
                self._targets[name] = PolledTarget(config, self._config, self._recorder)
        self._health.keep_targets(wanted.keys() | discovery.troubled)
