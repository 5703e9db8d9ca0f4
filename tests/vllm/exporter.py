"""The exporter as it is installed, in its own process, pointed at one engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import requests
from child import Child, free_port, wait_for
from page import Page, fetch_page

POLL_INTERVAL_SECONDS = 1.0


class Exporter(Child):
    """`kvcache-exporter serve` with a configuration that does not say where the model is: the engine does."""

    def __init__(self, folder: Path, engine_url: str, *, max_num_seqs: int, request_lengths: Sequence[int]) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        config = folder / "exporter.yml"
        config.write_text(
            f"targets:\n- url: {engine_url}\n  max_num_seqs: {max_num_seqs}\n"
            f"poll_interval_seconds: {POLL_INTERVAL_SECONDS}\npoll_timeout_seconds: 0.9\n"
            f"request_lengths: {list(request_lengths)}\nlisten_address: 127.0.0.1:{port}\nnvml: false\n",
            encoding="utf-8",
        )
        program = Path(sys.executable).with_name("kvcache-exporter")
        super().__init__([str(program), "serve", "--config", str(config)])

    def __enter__(self) -> Exporter:
        wait_for("page of the exporter", self._page_if_up, seconds=20)
        return self

    def page(self) -> Page:
        """The exporter's /metrics."""
        return fetch_page(f"{self._url}/metrics")

    def page_read_after(self, at: float) -> Page:
        """The first page that shows a reading of the engine begun after `at` (Unix seconds)."""

        def read() -> Page | None:
            page = self.page()
            return page if (read_at(page) or 0.0) > at else None

        return wait_for("fresh reading of the exporter", read, seconds=10, every=0.05)

    def _page_if_up(self) -> Page | None:
        if not self.is_alive:
            raise RuntimeError("the exporter ended while it started")
        try:
            return self.page()
        except requests.RequestException:
            return None


def read_at(page: Page) -> float | None:
    """When the exporter began the reading of the engine that the page shows (Unix seconds)."""
    return page.get("kvcache_last_success_timestamp_seconds", source="vllm")
