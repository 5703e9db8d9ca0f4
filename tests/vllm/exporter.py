"""The exporter as it is installed, in its own process, pointed at one engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from child import Child, free_port, wait_for
from page import fetch_page
from says import ExporterSays

POLL_INTERVAL_SECONDS = 1.0


class Exporter(Child):
    """`kvcache-exporter serve` with a configuration that does not say where the model is: the engine does.

    `watched` is the part of the configuration that says which engines there are.
    """

    start_seconds = 20.0

    def __init__(self, folder: Path, watched: str, *, request_lengths: Sequence[int]) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        config = folder / f"exporter-{port}.yml"
        config.write_text(
            f"{watched}\npoll_interval_seconds: {POLL_INTERVAL_SECONDS}\npoll_timeout_seconds: 0.9\n"
            f"request_lengths: {list(request_lengths)}\nlisten_address: 127.0.0.1:{port}\nnvml: false\n",
            encoding="utf-8",
        )
        program = Path(sys.executable).with_name("kvcache-exporter")
        super().__init__([str(program), "serve", "--config", str(config)])

    def is_ready(self) -> bool:
        """Whether the exporter answers with a page."""
        return bool(self.says().page.samples)

    def says(self) -> ExporterSays:
        """The exporter's /metrics now."""
        return ExporterSays(fetch_page(f"{self._url}/metrics"))

    def read_after(self, at: float) -> ExporterSays:
        """The first page that shows a reading of the engine begun after `at` (Unix seconds)."""

        def read() -> ExporterSays | None:
            says = self.says()
            return says if says.read_at > at else None

        return wait_for("fresh reading of the exporter", read, seconds=10, every=0.05)
