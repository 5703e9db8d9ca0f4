"""An engine whose layers keep different things: what is planned before it starts, what it says, and what the exporter says of it.

Groups of layers draw blocks from one pool, so that neither tokens nor requests follow from blocks alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine import KV_CACHE_GIB, Engine
from exporter import Exporter
from flags import MAX_MODEL_LEN
from frame import Frame, still_frame
from load import Load, even_load
from plans import planned
from report import Report
from says import LENGTHS, ExporterSays, differences

_LOAD = even_load(40, seconds=4, seed=6)
# How long the engine runs between two moments at which it is held still.
_RUN_SECONDS = 0.6
# Requests that have to run at once somewhere in the load.
_SEVERAL = 8


def compare_hybrid(report: Report, what: str, engine: Engine, idle: ExporterSays, exporter: Exporter) -> None:
    """Compare the plan with the engine, the exporter with the engine, and under a load the blocks that are held with the plan."""
    says = engine.says()
    pool_bytes = says.num_gpu_blocks * planned(engine.config)["bytes_per_block_per_rank"][0]
    _compare_plan(report, what, engine, pool_bytes)
    _compare_idle(report, what, engine, idle, pool_bytes)
    _compare_load(report, what, engine, exporter)


def _compare_plan(report: Report, what: str, engine: Engine, pool_bytes: int) -> None:
    config, logged = engine.says().cache_config, engine.capacity()
    plan = planned(engine.config, kv_bytes=pool_bytes)
    without_override = planned(engine.config, kv_bytes=KV_CACHE_GIB * 2**30)["num_blocks"]
    groups = tuple(group["block_size"] for group in plan["groups"])
    rows: list[tuple[str, object, object]] = [
        ("capacity in tokens (log)", logged.tokens, plan["kv_cache_size_tokens"]),
        (f"requests of {MAX_MODEL_LEN} (log)", f"{logged.max_concurrency}x", f"{plan['max_concurrency']:.2f}x"),
        ("the same (label)", float(config["kv_cache_max_concurrency"]), plan["max_concurrency"]),
        ("blocks (label)", int(config["num_gpu_blocks"]), plan["num_blocks"]),
        (f"blocks that {KV_CACHE_GIB} GiB would make (log)", logged.blocks_without_override, without_override),
        ("tokens in a block after alignment (label)", int(config["block_size"]), plan["block_size"]),
        ("tokens in a block of each group (log)", logged.group_block_sizes, groups),
    ]
    report.table(
        f"{what}: planned with the engine's flags",
        ("quantity", "engine", "plan"),
        [(engine_says == plan_says, (quantity, engine_says, plan_says)) for quantity, engine_says, plan_says in rows],
    )


def _compare_idle(report: Report, what: str, engine: Engine, exporter: ExporterSays, pool_bytes: int) -> None:
    says, shown, model = engine.says(), exporter.series, engine.model
    usable, block_bytes = says.num_gpu_blocks - 1, pool_bytes // says.num_gpu_blocks
    problems = differences(says, exporter)
    tokens, source_up = engine.capacity().tokens, exporter.page.value("kvcache_up", source="model_config")

    def row(quantity: str, said: object, name: str, expected: float) -> tuple[str, object, object, bool]:
        return quantity, said, shown[name], shown[name] == expected

    report.compare(
        f"{what}: idle",
        [
            row("capacity in tokens (log)", tokens, "kvcache_capacity_tokens", tokens),
            row("capacity in blocks (label)", f"{usable + 1} - 1", "kvcache_capacity_blocks", usable),
            row("capacity in bytes (plan)", f"{usable} x {block_bytes}", "kvcache_capacity_bytes", usable * block_bytes),
            row("mismatch of computed and reported", "", "kvcache_capacity_mismatch_ratio", 0),
            ("kvcache_up{source=model_config}", "", source_up, source_up == 1),
            *(
                row(
                    f"requests of {length} from empty",
                    f"({usable} - {model.admitted_blocks(length)}) // {model.held_blocks(length)} + 1",
                    f"kvcache_request_slots{{{name}}}",
                    model.requests_in(usable, length),
                )
                for name, length in LENGTHS.items()
            ),
            ("every number", len(says.exporter_should_say()), f"{len(problems)} differ", not problems),
        ],
    )
    report.explain(problems)


def _compare_load(report: Report, what: str, engine: Engine, exporter: Exporter) -> None:
    load = Load(engine.url, _LOAD, seed=7, token_by_token=True)
    frames: list[Frame] = []
    while not load.is_done:
        frames.append(still_frame(engine, exporter, load))
        time.sleep(_RUN_SECONDS)
    load.join()
    drained = still_frame(engine, exporter)
    kept = sorted({tokens for frame in frames for tokens in frame.kept_tokens})
    held = {int(tokens): blocks for tokens, blocks in planned(engine.config, lengths=kept)["blocks_held_by_request"].items()}
    report.table(
        f"{what}: {len(_LOAD)} requests, held still at {len(frames)} moments: blocks in use, and by plan of all who run",
        ("used", "plan", "difference", "running, waiting", "exporter", "remaining", "numbers"),
        [_frame_row(engine, frame, held) for frame in frames],
    )
    for frame in [*frames, drained]:
        report.explain(frame.problems)
    longest = engine.model.admitted_blocks(MAX_MODEL_LEN)
    crowded = [f for f in frames if f.engine.waiting() and f.exporter.series["kvcache_headroom_blocks"] < longest]
    with_room = sum(any(frame.exporter.remaining) for frame in crowded)
    settled = sum(_is_settled(frame) for frame in frames)
    together = max(frame.engine.running for frame in frames)
    report.compare(
        f"{what}: over the whole load, and drained",
        [
            ("most requests together", together, "", together >= _SEVERAL),
            ("moments whose requests all make tokens", f"{settled} of {len(frames)}", "", settled > 0),
            ("moments with waiting for blocks", len(crowded), f"{with_room} have room", bool(crowded) and not with_room),
            ("every number, drained", len(drained.exporter.series), f"{len(drained.problems)} differ", not drained.problems),
        ],
    )


def _frame_row(engine: Engine, frame: Frame, held: dict[int, int]) -> tuple[bool, Sequence[object]]:
    says, shown = frame.engine, frame.exporter.series
    plan: object = "-"
    agrees = not frame.problems
    difference: object = "-"
    if _is_settled(frame):
        plan = sum(held[tokens] for tokens in frame.kept_tokens)
        difference = says.used_blocks - plan
        # A window that begins at the edge of a block is a block narrower than the plan has it. States have no bar: the plan has
        # the second one there all the time, and vLLM for some steps after a block boundary (MambaManager.remove_skipped_blocks).
        if not engine.model.state_groups:
            agrees = agrees and -says.running * engine.model.sliding_groups <= difference <= 0
    cells = (
        says.used_blocks,
        plan,
        difference,
        f"{says.running} {says.waiting()}",
        f"{shown['kvcache_used_blocks']:.0f}",
        frame.exporter.remaining,
        len(shown),
    )
    return agrees, cells


def _is_settled(frame: Frame) -> bool:
    """Whether the running requests are those that clients have tokens of, so that it is known what each keeps.

    Not so after a step that read a prompt (its windows are trimmed in the next one) or ended a request, while a preempted one
    waits, or when the page is of another step than the log's last line.
    """
    if len(frame.last_steps) < 2:
        return False
    shown_percent = frame.exporter.as_logged[0]
    return (
        not any(step.reading for step in frame.last_steps)
        and frame.last_steps[-1].usage_percent == shown_percent
        and frame.last_steps[-1].generating == frame.engine.running == len(frame.kept_tokens) > 0
    )
