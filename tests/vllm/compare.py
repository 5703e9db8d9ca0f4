"""Start a real vLLM and the exporter, and compare what both say: idle, loaded, drained, killed, started anew.

Usage: compare.py VLLM, where VLLM is the program of that name. Exits 1 when a number differs.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import requests
from child import free_port, wait_for
from discovered import compare_discovered
from engine import Engine, Workshop
from exporter import POLL_INTERVAL_SECONDS, Exporter
from flags import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS
from hybrid import compare_hybrid
from null_block import BLOCKS as BLOCKS_OF_FOUR
from null_block import compare_null_block
from report import Report
from says import REQUEST_LENGTHS, SOURCES, ExporterSays, differences
from tiny_model import CONV, LLAMA, SLIDING
from under_load import compare_under_load

_BLOCKS = 600
_BLOCKS_OF_SLIDING = 768
_BLOCKS_OF_CONV = 256
# A fact that could not be had just when the engine came up is asked again after 30 s.
_COMPLETE_SECONDS = 45.0
# How late the two polls after an engine's end may be seen.
_GRACE_SECONDS = 0.25


def main(vllm: Path) -> int:
    """Run all comparisons; returns the exit status."""
    report = Report()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvcache-vllm-") as name:
        folder = Path(name)
        workshop = Workshop(folder / "llama", LLAMA)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        watched = f"targets:\n- url: {url}\n  max_num_seqs: {MAX_NUM_SEQS}"
        with Exporter(folder, watched, request_lengths=REQUEST_LENGTHS) as exporter:
            with Engine(vllm, workshop, port, _BLOCKS) as engine:
                _compare_idle(report, engine, _complete(exporter))
                compare_discovered(report, folder, engine, _complete)
                compare_under_load(report, engine, exporter)
                _compare_killed(report, engine, exporter)
            with Engine(vllm, workshop, port, BLOCKS_OF_FOUR) as engine:
                _complete(exporter)
                compare_null_block(report, engine, exporter)
            with Engine(vllm, Workshop(folder / "sliding", SLIDING), port, _BLOCKS_OF_SLIDING) as engine:
                compare_hybrid(report, "Sliding windows and full attention", engine, _complete(exporter), exporter)
            with Engine(vllm, Workshop(folder / "conv", CONV), port, _BLOCKS_OF_CONV) as engine:
                compare_hybrid(report, "Short convolutions and full attention", engine, _complete(exporter), exporter)
    outcome = f"{report.differing} rows differ" if report.differing else "Everything agrees"
    sys.stdout.write(f"\n{outcome} ({time.monotonic() - began:.0f} s).\n")
    return 1 if report.differing else 0


def _complete(exporter: Exporter) -> ExporterSays:
    """Wait until the exporter knows all about the engine."""

    def read() -> ExporterSays | None:
        says = exporter.says()
        return says if says.is_complete else None

    return wait_for("complete page of the exporter", read, seconds=_COMPLETE_SECONDS)


def _compare_idle(report: Report, engine: Engine, exporter: ExporterSays) -> None:
    says, logged, shown = engine.says(), engine.capacity(), exporter.series
    usable = says.num_gpu_blocks - 1
    problems = differences(says, exporter)
    version = requests.get(f"{engine.url}/version", timeout=5).json()["version"]

    def row(quantity: str, said: object, name: str, expected: float) -> tuple[str, object, object, bool]:
        return quantity, said, shown[name], shown[name] == expected

    bytes_per_token = LLAMA.block_bytes // BLOCK_SIZE
    in_bytes = f"{usable} x {BLOCK_SIZE} x {bytes_per_token}"
    fit = int(float(logged.max_concurrency))
    shown_version = exporter.page.all("kvcache_engine_info")[0].labels["vllm_version"]
    report.compare(
        f"A pool of {_BLOCKS} blocks, idle",
        [
            row("capacity in tokens (log)", logged.tokens, "kvcache_capacity_tokens", logged.tokens),
            row(f"requests of {MAX_MODEL_LEN} (log)", f"{logged.max_concurrency}x", "kvcache_request_slots{max}", fit),
            row("capacity in blocks (label)", f"{says.num_gpu_blocks} - 1", "kvcache_capacity_blocks", usable),
            row("capacity in bytes", in_bytes, "kvcache_capacity_bytes", usable * BLOCK_SIZE * bytes_per_token),
            row("bytes of a token", bytes_per_token, "kvcache_bytes_per_token", bytes_per_token),
            row("mismatch of computed and reported", "", "kvcache_capacity_mismatch_ratio", 0),
            ("remaining requests", "idle", exporter.remaining, exporter.remaining == exporter.slots and all(exporter.slots)),
            ("version", version, shown_version, version == shown_version),
            ("sources up", "", ", ".join(exporter.sources_up), exporter.sources_up == SOURCES),
            ("every number", len(says.exporter_should_say()), f"{len(problems)} differ", not problems),
        ],
    )
    report.explain(problems)


def _compare_killed(report: Report, engine: Engine, exporter: Exporter) -> None:
    _complete(exporter)

    def read() -> ExporterSays | None:
        says = exporter.says()
        return None if says.series else says

    killed_at = time.monotonic()
    engine.kill()
    says = wait_for("page without the engine", read, seconds=20, every=0.02)
    seconds = time.monotonic() - killed_at
    up = says.page.value("kvcache_up", source="vllm")
    failed = says.page.get("kvcache_poll_errors_total", source="vllm", reason="connection") or 0
    report.compare(
        "The engine killed",
        [
            ("no series of the engine", "dead", f"after {seconds:.1f} s", seconds <= 2 * POLL_INTERVAL_SECONDS + _GRACE_SECONDS),
            ("kvcache_up{source=vllm}", "dead", up, up == 0),
            ("polls that failed for the connection", "dead", failed, failed > 0),
        ],
    )


def _end(_signal: int, _frame: FrameType | None) -> None:
    """Leave by an exception, so that everything that was started ends too."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main(Path(sys.argv[1])))
