"""CPU time from the bytes of a recorded vLLM page to engine readings, beside prometheus_client's parser on the same page.

Run it as `python tests/bench/parse_page.py`. Both are timed in turn in one process; the ratio is the claim, the milliseconds
depend on the machine. Ours has seen the labels of the page before, as at every poll but the first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvcache_exporter.sources.vllm_page import parse_metrics
from lab import capture

PAGES = ("0.32.0_idle", "0.32.0_nearfull_waiting", "0.32.0_run3_dp2_loaded")
ROUNDS = 30


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    started = time.process_time()
    call()
    return time.process_time() - started


def main() -> None:
    """Print one line a page: best of ROUNDS for each parser, and their ratio."""
    print(f"{'page':<26} {'bytes':>7} {'ours ms':>8} {'library ms':>11} {'ratio':>6}")
    for name in PAGES:
        body = capture(name)
        text = body.decode()
        ours, library = [], []
        for _ in range(ROUNDS):
            ours.append(cpu_seconds(lambda body=body: parse_metrics(body)))  # type: ignore[misc]  # bound at once
            library.append(cpu_seconds(lambda text=text: list(text_string_to_metric_families(text))))  # type: ignore[misc]
        best = min(ours), min(library)
        print(f"{name:<26} {len(body):>7} {best[0] * 1e3:>8.2f} {best[1] * 1e3:>11.2f} {best[1] / best[0]:>6.1f}")


if __name__ == "__main__":
    main()
