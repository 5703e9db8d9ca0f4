"""Predicted slots and time to exhaustion of simulated and recorded engines, beside the truth that only an oracle knows.

Scenarios are folders of capture.jsonl.gz, truth.jsonl.gz and engine.json, as two tools make them with numpy (TOOLS is a folder
that is not part of the repository, ../shared/replay):

    python TOOLS/simulate.py ramp-conv /tmp/replay/ramp-conv-1 --seed 1
    python TOOLS/from_recording.py SERIES/ramp-kv-bound /tmp/replay/real-kv \
        --blocks 511 --block-size 32 --max-num-seqs 32 --max-model-len 4096

Run it as `python tests/bench/predict_slots.py /tmp/replay/ramp-conv-*`. `--interval 5` looks at a page every 5 seconds only, and
`--plot FILE.png` draws one scenario; that needs `pip install '.[bench]'`. The columns:

    moments   of the truth that were predicted, and of all; the others come before anything is known and count nowhere
    wape      sum of |predicted - true| over sum of true slots; 0 is perfect
    over      the part of it that was promised and not there
    missed    share of the moments without room at which more than a tenth of the most there ever was is promised
    naive     wape of free tokens over the mean length of the requests finished so far, limited by the seats
    full at   seconds into the capture at which a request first has to wait for blocks, or is preempted; - for never or not known
    warned    when exhaustion_seconds is below 300 for the first time, and how long before `full at` that is
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvcache_exporter.capture import CapturedPoll, read_capture
from kvcache_exporter.replay import Replay, subject_of_file
from kvcache_exporter.sources.vllm_page import parse_metrics

_WARNING_SECONDS = 300.0
_MISSED_SHARE = 0.1
# Okabe-Ito: told apart without colour vision too.
_TRUE, _PREDICTED, _NAIVE, _RUNNING, _USAGE = "#000000", "#0072B2", "#D55E00", "#009E73", "#A6D8F4"


@dataclass(frozen=True)
class Load:
    """What a page shows at `t`: usage as a share, and requests."""

    t: float
    usage: float
    running: int
    waiting: int


@dataclass(frozen=True)
class Predictions:
    """Slots at moments (seconds) that rise; None where nothing was said."""

    at: Sequence[float]
    slots: Sequence[float | None]

    def shown(self, t: float, max_age: float) -> float | None:
        """What is on show at `t`: the last word, if it is not older than `max_age`."""
        index = bisect_right(self.at, t) - 1
        return self.slots[index] if index >= 0 and t - self.at[index] <= max_age else None


@dataclass(frozen=True)
class Scenario:
    """One folder: the truth, and what was said about its pages. `warned_at` and `full_at` are seconds into the capture."""

    name: str
    simulated: bool
    interval: float
    truth: Sequence[Mapping[str, Any]]
    predicted: Predictions
    naive: Predictions
    loads: Sequence[Load]
    warned_at: float | None
    full_at: float | None

    @property
    def lead(self) -> float | None:
        """Seconds from the first warning to the first exhaustion."""
        return None if self.warned_at is None or self.full_at is None else self.full_at - self.warned_at


@dataclass(frozen=True)
class Score:
    """How far predictions are off; see the columns."""

    moments: int
    wape: float
    over: float
    missed: float


def run_scenario(folder: Path, interval: float) -> Scenario:
    """Replay a scenario as `kvcache-exporter replay` does."""
    engine = json.loads((folder / "engine.json").read_text())
    truth = _rows(folder / "truth.jsonl.gz")

    def complain(sentence: str) -> None:
        print(f"{folder}: {sentence}", file=sys.stderr)

    polls = list(read_capture(folder / "capture.jsonl.gz", complain))
    replay = Replay(subject_of_file(folder / "engine.json"), interval_seconds=interval, on_problem=complain)
    records = [json.loads(line) for line in replay.lines(polls)]
    loads, naive = _naive(engine, polls)
    return Scenario(
        name=folder.resolve().name,
        simulated="seed" in engine,
        interval=interval,
        truth=truth,
        predicted=Predictions([record["t"] for record in records], [record.get("slots") for record in records]),
        naive=naive,
        loads=loads,
        warned_at=next((r["t"] for r in records if r.get("exhaustion_seconds", _WARNING_SECONDS) < _WARNING_SECONDS), None),
        full_at=next((row["t"] + row["exhausted_in"] for row in truth if row.get("exhausted_in") is not None), None),
    )


def score(scenario: Scenario, predictions: Predictions) -> Score:
    """Compare with the truth, at its moments."""
    said = [(predictions.shown(row["t"], scenario.interval), row["slots"]) for row in scenario.truth]
    pairs = [(slots, true) for slots, true in said if slots is not None]
    total = sum(true for _, true in pairs)
    if not total:
        raise SystemExit(f"{scenario.name}: nothing to compare")
    promised = _MISSED_SHARE * max(true for _, true in pairs)
    without_room = [slots > promised for slots, true in pairs if not true]
    return Score(
        moments=len(pairs),
        wape=sum(abs(slots - true) for slots, true in pairs) / total,
        over=sum(slots - true for slots, true in pairs if slots > true) / total,
        missed=statistics.fmean(without_room) if without_room else 0.0,
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def _naive(engine: Mapping[str, Any], polls: Iterable[CapturedPoll]) -> tuple[list[Load], Predictions]:
    """What pages show, and the slots that a spreadsheet would make of each alone."""
    loads: list[Load] = []
    slots: list[float | None] = []
    for poll in polls:
        reading = None if poll.page is None else parse_metrics(poll.page).engines[0]
        if reading is None or reading.usage_ratio is None:
            continue
        load = Load(poll.t, reading.usage_ratio, reading.num_requests_running or 0, reading.num_requests_waiting or 0)
        prompts, outputs = reading.request_prompt_tokens, reading.request_generation_tokens
        mean = float(engine["max_model_len"])
        if prompts is not None and outputs is not None and prompts.count:
            mean = (prompts.sum + outputs.sum) / prompts.count
        free_tokens = (1 - load.usage) * engine["blocks"] * engine["block_size"]
        seats = max(0, engine["max_num_seqs"] - load.running - load.waiting)
        loads.append(load)
        slots.append(min(free_tokens // mean, seats))
    return loads, Predictions([load.t for load in loads], slots)


_COLUMNS = (
    f"{'scenario':<16} {'moments':>9} {'wape':>6} {'over':>6} {'missed':>6} {'naive':>6} {'full at':>8} {'warned':>8} {'lead':>6}"
)


@dataclass(frozen=True)
class Row:
    """One row of the table; several make a mean. `moments` is text, the times are seconds and None where there is none."""

    name: str
    moments: str
    ratios: tuple[float, float, float, float]
    times: tuple[float | None, float | None, float | None]

    def __str__(self) -> str:
        ratios = [f"{ratio:6.3f}" for ratio in self.ratios]
        times = ["-" if time is None else str(round(time)) for time in self.times]
        full_at, warned, lead = times
        return " ".join([f"{self.name:<16} {self.moments:>9}", *ratios, f"{full_at:>8} {warned:>8} {lead:>6}"])


def row_of(scenario: Scenario) -> Row:
    """The numbers of one scenario."""
    predicted, naive = score(scenario, scenario.predicted), score(scenario, scenario.naive)
    return Row(
        scenario.name,
        f"{predicted.moments}/{len(scenario.truth)}",
        (predicted.wape, predicted.over, predicted.missed, naive.wape),
        (scenario.full_at, scenario.warned_at, scenario.lead),
    )


def mean_of(name: str, rows: Sequence[Row]) -> Row:
    """The mean of several rows; that of a time over those that have it, as a lead that others lack would not be one."""
    ratios = [statistics.fmean(column) for column in zip(*(row.ratios for row in rows), strict=True)]
    leads = [lead for *_, lead in (row.times for row in rows) if lead is not None]
    a, b, c, d = ratios
    return Row(name, f"mean of {len(rows)}", (a, b, c, d), (None, None, statistics.fmean(leads) if leads else None))


def print_table(scenarios: Sequence[Scenario]) -> None:
    """A row for each scenario, the mean of those that differ in seed, and that of all simulated ones."""
    print(_COLUMNS)
    rows = [(scenario, row_of(scenario)) for scenario in scenarios]
    for _, row in rows:
        print(row)
    print()
    groups: dict[str, list[Row]] = {}
    for scenario, row in rows:
        groups.setdefault(scenario.name.rpartition("-")[0] or scenario.name, []).append(row)
    for name, members in groups.items():
        print(mean_of(name, members))
    simulated = [row for scenario, row in rows if scenario.simulated]
    if simulated:
        print(mean_of("all simulated", simulated))


def plot(scenario: Scenario, path: Path) -> None:
    """Draw the predicted slots over the true ones, at the moments of the truth, and the load that they come from."""
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MultipleLocator, PercentFormatter

    figure = Figure(figsize=(9, 6.6), layout="constrained", facecolor="white")
    slots, load = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    at = [row["t"] for row in scenario.truth]
    true = [row["slots"] for row in scenario.truth]
    low = [row["slots_p10"] for row in scenario.truth]

    def draw(axes: Axes, values: Sequence[float | None], **style: Any) -> None:
        axes.plot(at, [math.nan if value is None else value for value in values], **style)

    def shown(predictions: Predictions) -> list[float | None]:
        return [predictions.shown(t, scenario.interval) for t in at]

    slots.fill_between(at, low, true, color="#999999", alpha=0.5, linewidth=0, label="true, down to the 10th percentile")
    draw(slots, true, color=_TRUE, linewidth=1.8, label="true, median")
    draw(slots, shown(scenario.naive), color=_NAIVE, linewidth=0.8, label="free tokens / mean finished length")
    draw(slots, shown(scenario.predicted), color=_PREDICTED, linewidth=1.5, label="predicted")
    # What is said before anything is known may be far out.
    slots.set_ylim(0, 1.3 * max(true))
    slots.set_ylabel("remaining request slots")
    slots.set_title(f"{scenario.name}: how many more typical requests fit", loc="left", fontweight="bold")
    slots.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")

    by_time = {entry.t: entry for entry in scenario.loads}
    loads = [by_time[t] for t in at if t in by_time]
    times = [entry.t for entry in loads]
    load.fill_between(times, [entry.usage for entry in loads], color=_USAGE, linewidth=0, label="KV cache usage")
    load.yaxis.set_major_formatter(PercentFormatter(1.0))
    load.set_ylim(0, 1.3)
    load.set_yticks([0, 0.25, 0.5, 0.75, 1])
    load.set_ylabel("KV cache usage")
    load.set_xlabel("minutes")
    load.xaxis.set_major_locator(MultipleLocator(300 if at[-1] > 900 else 60))
    load.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds / 60:g}"))
    load.set_xlim(at[0], at[-1])
    requests = load.twinx()
    requests.plot(times, [entry.running for entry in loads], color=_RUNNING, linewidth=1.3, label="requests running")
    requests.plot(times, [entry.waiting for entry in loads], color=_NAIVE, linewidth=1.5, linestyle="--", label="waiting")
    requests.set_ylim(0, 1.3 * max(1, *(max(entry.running, entry.waiting) for entry in loads)))
    requests.set_ylabel("requests")
    areas, lines = load.get_legend_handles_labels(), requests.get_legend_handles_labels()
    load.legend(areas[0] + lines[0], areas[1] + lines[1], frameon=False, fontsize=9, ncols=3, loc="upper left")

    moments = (scenario.warned_at, "forecast first says:\nfull within 5 min"), (scenario.full_at, "first wait\nfor blocks")
    for moment, words in moments:
        if moment is not None:
            for axes in (slots, load):
                axes.axvline(moment, ymax=0.84, color="#555555", linewidth=0.9, linestyle=":")
            place = {"xycoords": ("data", "axes fraction"), "xytext": (4, 0), "textcoords": "offset points"}
            slots.annotate(words, (moment, 0.84), **place, va="top", fontsize=9)
    for axes in (slots, load, requests):
        axes.spines["top"].set_visible(False)
    slots.spines["right"].set_visible(False)
    figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})


def main() -> None:
    """Print the table, and draw the plot if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="SCENARIO_DIR")
    parser.add_argument("--interval", type=float, default=0.0, metavar="SECONDS", help="take pages at least this far apart")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes, one scenario each")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the scenario, of which there is one then")
    arguments = parser.parse_args()
    if arguments.plot is not None and len(arguments.folders) != 1:
        parser.error("--plot draws one scenario: give one folder")
    run = partial(run_scenario, interval=arguments.interval)
    if arguments.jobs > 1:
        with ProcessPoolExecutor(arguments.jobs) as pool:
            scenarios = list(pool.map(run, arguments.folders))
    else:
        scenarios = [run(folder) for folder in arguments.folders]
    print_table(scenarios)
    if arguments.plot is not None:
        plot(scenarios[0], arguments.plot)


if __name__ == "__main__":
    main()
