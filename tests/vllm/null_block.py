"""Whether three or four requests of full length fit, where only the null block makes the difference.

vLLM logs num_gpu_blocks over the blocks of one such request as "Maximum concurrency"; but one block of the pool, the null block
(`vllm/v1/core/block_pool.py`), never holds anything of a request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from child import wait_for
from engine import Engine
from exporter import Exporter
from flags import BLOCK_SIZE, MAX_MODEL_LEN
from frame import Frame, still_frame
from load import Load, Request
from report import Report

BLOCKS = 4 * MAX_MODEL_LEN // BLOCK_SIZE

_FULL = Request(MAX_MODEL_LEN - 31, 31)
# Its prompt fills 127 blocks, of which four requests' fit; the first token that it makes is kept in one block more.
_GROWING = Request(MAX_MODEL_LEN - BLOCK_SIZE, 31)


@dataclass(frozen=True)
class _Outcome:
    """What became of some requests that were sent at once to an idle engine.

    `together` is the most that were past their prompt in one step, thus holding all of their blocks. `frame` is a moment at which
    three were.
    """

    together: int
    preempted: int
    frame: Frame


def compare_null_block(report: Report, engine: Engine, exporter: Exporter) -> None:
    """Send three and then four requests of full length to a pool of exactly four times their blocks."""
    logged, shown = engine.capacity(), exporter.says()
    tokens = shown.series["kvcache_capacity_tokens"]
    slots = shown.slots[0]
    three = _send(engine, exporter, [_FULL] * 3, seed=3)
    four = _send(engine, exporter, [_FULL] * 4, seed=4)
    growing = _send(engine, exporter, [_GROWING] * 4, seed=5)
    report.compare(
        f"Started anew with {BLOCKS} blocks, of which {BLOCKS - 1} can be used",
        [
            ("capacity in tokens (log)", logged.tokens, tokens, logged.tokens == tokens),
            (f"requests of {MAX_MODEL_LEN} (log; one too many)", f"{logged.max_concurrency}x", slots, slots == 3),
            *_rows(f"3 requests of {MAX_MODEL_LEN}", three, slots, waiting=0),
            *_rows(f"4 requests of {MAX_MODEL_LEN}", four, slots, waiting=1),
            (f"4 that grow to {MAX_MODEL_LEN - 1}: most together", growing.together, slots, growing.together == slots),
            ("   preempted", growing.preempted, "", growing.preempted > 0),
        ],
    )
    for outcome in (three, four, growing):
        report.explain(outcome.frame.problems)


def _rows(what: str, outcome: _Outcome, slots: int, *, waiting: int) -> list[tuple[str, object, object, bool]]:
    engine, exporter = outcome.frame.engine, outcome.frame.exporter
    used = exporter.series["kvcache_used_blocks"]
    held = 3 * MAX_MODEL_LEN // BLOCK_SIZE
    return [
        (f"{what}: most together", outcome.together, slots, outcome.together == slots),
        ("   preempted", outcome.preempted, "", outcome.preempted == 0),
        ("   blocks used while three make tokens", engine.used_blocks, used, engine.used_blocks == used == held),
        ("   waiting meanwhile", engine.waiting(), exporter.waiting, engine.waiting() == exporter.waiting == waiting),
        ("   remaining meanwhile", "", exporter.remaining[0], exporter.remaining[0] == 0),
    ]


def _send(engine: Engine, exporter: Exporter, requests: list[Request], *, seed: int) -> _Outcome:
    preempted = engine.says().preemptions
    began = time.time()

    def are_three_together() -> bool | None:
        return any(step.generating >= 3 for step in engine.steps_since(began)) or None

    load = Load(engine.url, requests, seed=seed)
    wait_for("step with three requests", are_three_together, seconds=60, every=0.002)
    frame = still_frame(engine, exporter)
    load.join()
    # The last lines of the log are on their way.
    time.sleep(0.5)
    together = max(step.generating for step in engine.steps_since(began))
    return _Outcome(together, engine.says().preemptions - preempted, frame)
