"""Both sides at a moment at which the engine stood still, so that every number can be compared exactly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine import Engine, LoggedStats, LoggedStep
from exporter import Exporter
from load import Load
from page import Page
from says import EngineSays, ExporterSays, differences

# The engine logs once a second; a moment more for the line to come through.
_LOG_SECONDS = 1.3


@dataclass(frozen=True)
class Frame:
    """One moment: both pages, the lines that the engine logged meanwhile, and the last two steps that it logged before.

    `kept_tokens` are those of each request in the cache, as far as its client can tell.
    """

    engine: EngineSays
    exporter: ExporterSays
    logged: Sequence[LoggedStats]
    last_steps: Sequence[LoggedStep]
    kept_tokens: Sequence[int]

    @property
    def problems(self) -> list[str]:
        """Every number that is not the same on both sides or in the log."""
        shown = self.exporter.as_logged
        return differences(self.engine, self.exporter) + [
            f"{line} in the log, {shown} shown"
            for line in self.logged
            if (line.usage_percent, line.running, line.waiting) != shown
        ]


def still_frame(engine: Engine, exporter: Exporter, load: Load | None = None) -> Frame:
    """Hold the engine still until the exporter has read it and the engine has logged it. Raises RuntimeError if it moved."""
    with engine.held_still():
        at = time.time()
        before = engine.page()
        exported = exporter.read_after(at)
        time.sleep(max(0.0, at + _LOG_SECONDS - time.time()))
        after = engine.page()
        logged = engine.stats_since(at)
        last_steps = engine.steps_since(0)[-2:]
        kept_tokens = [] if load is None else load.kept_tokens()
    if _values(before) != _values(after):
        raise RuntimeError("the engine went on although it was held still")
    return Frame(EngineSays(after, engine.model), exported, logged, last_steps, kept_tokens)


def _values(page: Page) -> list[tuple[str, float]]:
    return [(sample.name, sample.value) for sample in page.samples if sample.name.startswith("vllm:")]
