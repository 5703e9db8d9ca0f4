"""Start a real vLLM and the exporter, and compare what both say: idle, under load, drained, killed, and started anew.

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
from engine import BLOCK_SIZE, MAX_NUM_SEQS, Engine, Workshop
from exporter import POLL_INTERVAL_SECONDS, Exporter, read_at
from frame import EngineSays, Frame, engine_series, still_frame
from load import Load, Request, rising_load
from page import Page
from report import Report
from tiny_model import BYTES_PER_TOKEN, MAX_MODEL_LEN

_LENGTHS = (512, 1024)
_SOURCES = ("model_config", "vllm", "vllm_models", "vllm_version")
_BLOCKS = 600
# Exactly four times the blocks of a request of MAX_MODEL_LEN tokens, so that the null block decides whether three or four fit.
_BLOCKS_OF_FOUR = 4 * MAX_MODEL_LEN // BLOCK_SIZE
_LOAD = rising_load(140, seconds=40, seed=1)
# How long the engine runs between two moments at which it is held still.
_RUN_SECONDS = 1.5
# A line of the engine's log may come this much before or after the page that holds the same numbers.
_CLOCK_SECONDS = 0.25


def main(vllm: Path) -> int:
    """Run all comparisons; returns the exit status."""
    report = Report()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvcache-vllm-") as name:
        folder = Path(name)
        workshop = Workshop(folder)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with Exporter(folder, url, max_num_seqs=MAX_NUM_SEQS, request_lengths=_LENGTHS) as exporter:
            with Engine(vllm, workshop, port, _BLOCKS) as engine:
                _compare_idle(report, engine, exporter)
                _compare_under_load(report, engine, exporter)
                _compare_killed(report, engine, exporter)
            with Engine(vllm, workshop, port, _BLOCKS_OF_FOUR) as engine:
                _compare_null_block(report, engine, exporter)
    outcome = f"{report.differences} rows differ" if report.differences else "everything agrees"
    sys.stdout.write(f"\n{outcome}; {time.monotonic() - began:.0f} s\n")
    return 1 if report.differences else 0


def _compare_idle(report: Report, engine: Engine, exporter: Exporter) -> None:
    page = wait_for("full page of the exporter", lambda: _if_complete(exporter.page()), seconds=45)
    says, logged = EngineSays(engine.page()), engine.capacity()
    usable = says.num_gpu_blocks - 1
    shown = engine_series(page)
    slots, capacity = int(shown["kvcache_request_slots{max}"]), shown["kvcache_capacity_bytes"]
    version = requests.get(f"{engine.url}/version", timeout=5).json()["version"]
    shown_version = page.all("kvcache_engine_info")[0].labels["vllm_version"]
    remaining = _remaining(shown)
    report.compare(
        f"A pool of {_BLOCKS} blocks, idle",
        [
            ("tokens (log)", logged.tokens, shown["kvcache_capacity_tokens"], logged.tokens == shown["kvcache_capacity_tokens"]),
            (
                f"requests of {MAX_MODEL_LEN} (log)",
                f"{logged.max_concurrency}x",
                slots,
                int(float(logged.max_concurrency)) == slots,
            ),
            (
                "blocks without the null block",
                f"{says.num_gpu_blocks} - 1",
                shown["kvcache_capacity_blocks"],
                usable == shown["kvcache_capacity_blocks"],
            ),
            (
                "bytes",
                f"{usable} x {BLOCK_SIZE} x {BYTES_PER_TOKEN}",
                capacity,
                usable * BLOCK_SIZE * BYTES_PER_TOKEN == capacity,
            ),
            ("remaining requests, each length", "idle", remaining, all(remaining) and _no_slot_taken(shown)),
            ("version", version, shown_version, version == shown_version),
            ("sources up", ", ".join(_SOURCES), ", ".join(_up(page)), _up(page) == list(_SOURCES)),
            _every_number(says, shown),
        ],
    )


def _compare_under_load(report: Report, engine: Engine, exporter: Exporter) -> None:
    began = time.time()
    load = Load(engine.url, _LOAD, seed=2)
    frames: list[Frame] = []
    moving: list[Page] = []
    while not load.is_done:
        frames.append(still_frame(engine, exporter))
        run_until = time.time() + _RUN_SECONDS
        while time.time() < run_until:
            moving.append(exporter.page())
            time.sleep(0.2)
    load.join()
    report.table(
        f"{len(_LOAD)} requests; the engine held still at {len(frames)} moments and every number compared",
        ("used", "usage %", "running", "waiting", "preempted", "log lines", "exporter: usage %, running, waiting", "remaining"),
        [_frame_row(frame) for frame in frames],
    )
    time.sleep(1)
    after = still_frame(engine, exporter)
    full = sum(frame.engine.waiting("capacity") > 0 for frame in frames)
    readings = {read_at(page): page for page in moving}.values()
    found = sum(_is_in_log(engine, page, began) for page in readings)
    wrong = sum(_shows_room_in_vain(engine_series(page)) for page in moving)
    waiting = sum(engine_series(page)["kvcache_requests_waiting{capacity}"] > 0 for page in moving)
    problems = [problem for frame in (*frames, after) for problem in frame.problems(_LENGTHS)]
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    report.compare(
        "Under load and after it",
        [
            ("moments with requests waiting for blocks", full, "-", 3 <= full < len(frames)),
            ("lines of the log in still moments", sum(len(f.logged) for f in frames), "-", any(f.logged for f in frames)),
            ("readings on the run that are in the log", len(readings), found, found == len(readings)),
            ("pages on the run with requests waiting", waiting, f"{wrong} of them show room", waiting > 0 and wrong == 0),
            ("preemptions", after.engine.preemptions, after.exporter["kvcache_preemptions_total"], after.engine.preemptions > 0),
            ("usage, drained", after.engine.usage, after.exporter["kvcache_usage_ratio"], after.engine.usage == 0),
            ("remaining requests, drained", "idle", _remaining(after.exporter), _no_slot_taken(after.exporter)),
            _every_number(after.engine, after.exporter),
        ],
    )


def _compare_killed(report: Report, engine: Engine, exporter: Exporter) -> None:
    wait_for("full page of the exporter", lambda: _if_complete(exporter.page()), seconds=45)
    killed_at = time.monotonic()
    engine.kill_at_once()
    page = wait_for("page without the engine", lambda: _if_gone(exporter.page()), seconds=20, every=0.05)
    seconds = time.monotonic() - killed_at
    refused = page.get("kvcache_poll_errors_total", source="vllm", reason="connection")
    report.compare(
        "The engine killed",
        [
            ("no series of the engine", "dead", f"after {seconds:.1f} s", seconds <= 2 * POLL_INTERVAL_SECONDS + _CLOCK_SECONDS),
            ("kvcache_up{source=vllm}", "dead", page.value("kvcache_up", source="vllm"), "vllm" not in _up(page)),
            ("polls that failed by reason connection", "dead", refused, bool(refused)),
        ],
    )


def _compare_null_block(report: Report, engine: Engine, exporter: Exporter) -> None:
    page = wait_for("full page of the exporter", lambda: _if_complete(exporter.page()), seconds=45)
    logged, shown = engine.capacity(), engine_series(page)
    slots = int(shown["kvcache_request_slots{max}"])
    three = _full_length(engine, exporter, [Request(MAX_MODEL_LEN - 31, 31)] * 3)
    four = _full_length(engine, exporter, [Request(MAX_MODEL_LEN - 31, 31)] * 4)
    # Prompts that fill 127 blocks each: 4 x 127 fit, and the first token that each request makes needs one block more.
    growing = _full_length(engine, exporter, [Request(MAX_MODEL_LEN - 32, 31)] * 4)
    report.compare(
        f"Started anew with {_BLOCKS_OF_FOUR} blocks, of which {_BLOCKS_OF_FOUR - 1} are usable",
        [
            ("tokens (log)", logged.tokens, shown["kvcache_capacity_tokens"], logged.tokens == shown["kvcache_capacity_tokens"]),
            (f"requests of {MAX_MODEL_LEN} (log; exporter 1 less)", f"{logged.max_concurrency}x", slots, slots == 3),
            (f"3 requests of {MAX_MODEL_LEN}: together", three.together, slots, three.together == slots),
            ("  preempted", three.preempted, "-", three.preempted == 0),
            ("  waiting, and remaining", three.waiting, three.remaining, (three.waiting, three.remaining) == (0, 0)),
            (f"4 requests of {MAX_MODEL_LEN}: together", four.together, slots, four.together == slots),
            ("  waiting, and remaining", four.waiting, four.remaining, (four.waiting, four.remaining) == (1, 0)),
            (f"4 that grow to {MAX_MODEL_LEN - 1}: together", growing.together, slots, growing.together == slots),
            ("  preempted", growing.preempted, "-", growing.preempted > 0),
            _every_number(EngineSays(engine.page()), shown),
        ],
    )
    sys.stdout.writelines(f"{problem}\n" for outcome in (three, four, growing) for problem in outcome.problems)
