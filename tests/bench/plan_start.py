"""Time of `kvcache-exporter plan` as a whole process, beside a Python that only imports click.

Run it as `python tests/bench/plan_start.py`. Both are started in turn; the difference is what the command itself adds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

MODEL = Path(__file__).parents[1] / "data" / "models" / "Meta-Llama-3.1-8B.json"
COMMANDS = {
    "python -c 'import click'": [sys.executable, "-c", "import click"],
    "kvcache-exporter plan": [sys.executable, "-m", "kvcache_exporter", "plan", str(MODEL), "--json"],
}
ROUNDS = 15


def seconds(command: list[str]) -> float:
    """Wall time of one process."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Print the median of each, and the difference."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:<26} {median * 1e3:6.0f} ms")
    click, plan = medians.values()
    print(f"{'difference':<26} {(plan - click) * 1e3:6.0f} ms; ratio {plan / click:.2f}")


if __name__ == "__main__":
    main()
