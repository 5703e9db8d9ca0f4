"""An engine that fills up until requests wait for blocks, and drains."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence

from engine import Engine, LoggedStep
from exporter import Exporter
from flags import MAX_MODEL_LEN
from frame import Frame, still_frame
from load import Load, rising_load
from report import Report
from says import ExporterSays
from tiny_model import LLAMA

_LOAD = rising_load(140, seconds=40, seed=1)
# How long the engine runs between two moments at which it is held still.
_RUN_SECONDS = 1.5
# A step's line and a page that holds its numbers leave the engine together, and reach us within this of each other.
_LAG_SECONDS = 0.25


def compare_under_load(report: Report, engine: Engine, exporter: Exporter) -> None:
    """Compare all numbers at moments at which the engine is held still, and usage also while it runs."""
    load = Load(engine.url, _LOAD, seed=2)
    frames: list[Frame] = []
    pages: list[ExporterSays] = []
    while not load.is_done:
        frames.append(still_frame(engine, exporter))
        run_until = time.time() + _RUN_SECONDS
        while time.time() < run_until:
            # A poll that the busy engine was late to answer leaves nothing to compare.
            if (says := exporter.says()).series:
                pages.append(says)
            time.sleep(0.2)
    load.join()
    report.table(
        f"{len(_LOAD)} requests, the engine held still at {len(frames)} moments: what it said, and what the exporter did",
        ("used", "usage %, running, waiting", "preempted", "lines in the log", "exporter", "remaining", "numbers"),
        [_frame_row(frame) for frame in frames],
    )
    for frame in frames:
        report.explain(frame.problems)
    _compare_totals(report, frames, pages, still_frame(engine, exporter), engine.steps_since(0))


def _frame_row(frame: Frame) -> tuple[bool, Sequence[object]]:
    engine, exporter, problems = frame.engine, frame.exporter, frame.problems
    says = f"{engine.usage * 100:.1f} {engine.running} {engine.waiting()}"
    shows = " ".join(map(str, exporter.as_logged))
    cells = (
        engine.used_blocks,
        says,
        engine.preemptions,
        len(frame.logged),
        shows,
        exporter.remaining,
        len(exporter.series),
    )
    return not problems, cells


def _compare_totals(
    report: Report, frames: Sequence[Frame], pages: Sequence[ExporterSays], drained: Frame, steps: Sequence[LoggedStep]
) -> None:
    full = sum(frame.engine.waiting() > 0 for frame in frames)
    lines = sum(len(frame.logged) for frame in frames)
    readings = {page.read_at: page for page in pages}.values()
    strays = [stray for page in readings if (stray := _not_in_log(steps, page))]
    longest = LLAMA.admitted_blocks(MAX_MODEL_LEN)
    crowded = [page for page in pages if page.waiting and page.series["kvcache_headroom_blocks"] < longest]
    with_room = sum(any(page.remaining) for page in crowded)
    slots, remaining = drained.exporter.slots, drained.exporter.remaining
    used = drained.exporter.series["kvcache_used_blocks"]
    preemptions = drained.exporter.series["kvcache_preemptions_total"]
    report.compare(
        "Over the whole load, and drained",
        [
            ("still moments with requests waiting", f"{full} of {len(frames)}", "", 3 <= full < len(frames)),
            ("lines of the log in still moments", lines, "", lines > 0),
            ("usage in motion: readings found in the log", len(readings), f"{len(strays)} not", not strays),
            (
                "pages in motion with waiting for blocks",
                len(crowded),
                f"{with_room} have room",
                bool(crowded) and not with_room,
            ),
            ("preemptions", drained.engine.preemptions, preemptions, 0 < drained.engine.preemptions == preemptions),
            ("blocks used, drained", drained.engine.used_blocks, used, drained.engine.used_blocks == used == 0),
            ("remaining requests, drained", f"of {slots}", remaining, remaining == slots),
            ("every number, drained", len(drained.exporter.series), f"{len(drained.problems)} differ", not drained.problems),
        ],
    )
    report.explain([*strays, *drained.problems])


def _not_in_log(steps: Sequence[LoggedStep], page: ExporterSays) -> str | None:
    """What differs, unless a step that was the newest while the exporter read the page ended with the page's usage."""
    begin = bisect.bisect_left(steps, page.read_at - _LAG_SECONDS, key=lambda step: step.at)
    end = bisect.bisect_right(steps, page.read_at + page.read_for + _LAG_SECONDS, key=lambda step: step.at)
    logged = [steps[begin - 1].usage_percent if begin else "0.0", *(step.usage_percent for step in steps[begin:end])]
    shown = page.as_logged[0]
    if shown in logged:
        return None
    return f"usage {shown} % was read at {page.read_at:.3f}; {len(logged)} steps around it logged {logged[0]} to {logged[-1]} %"
