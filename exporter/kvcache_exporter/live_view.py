"""The headroom as plain text: a screen that is redrawn in a terminal, a line now and then in a pipe."""

from __future__ import annotations

from kvcache_exporter.gpu_memory import COMPONENTS
from kvcache_exporter.headroom import P95_LENGTH, TYPICAL_LENGTH, RequestSlots
from kvcache_exporter.snapshot import EngineSnapshot, GpuSnapshot, Snapshot, TargetSnapshot

_BAR_WIDTH = 48
_GIB = 1024**3


def screen(snapshot: Snapshot, *, metrics_url: str, elapsed_seconds: float) -> str:
    """Return the whole view of all engines, several lines."""
    lines = [f"SIMULATED engine and GPU, {elapsed_seconds:.0f} s; metrics at {metrics_url}", ""]
    for target in snapshot.targets:
        for engine in target.engines:
            lines += _engine_lines(target, engine)
    for gpu in snapshot.gpus:
        lines += _gpu_lines(gpu)
    lines += [f"source down: {h.target} {h.source}: {h.message}" for h in snapshot.health if not h.up]
    return "\n".join([*lines, "", "Ctrl-C ends it."])


def line(snapshot: Snapshot, *, elapsed_seconds: float) -> str:
    """Return one line on all engines."""
    engines = [_engine_summary(engine) for target in snapshot.targets for engine in target.engines]
    return f"simulated t={elapsed_seconds:.0f}s {' | '.join(engines) if engines else 'no engine has answered'}"


def _engine_lines(target: TargetSnapshot, engine: EngineSnapshot) -> list[str]:
    reading, headroom, capacity = engine.reading, engine.headroom, engine.capacity
    lines = [f"{target.name} engine {reading.engine}, {engine.model_name}"]
    if headroom is None or headroom.used is None or headroom.free is None or capacity is None:
        return [*lines, "  the engine does not tell its KV cache"]
    filled = round(_BAR_WIDTH * headroom.used.blocks / capacity.usable_blocks)
    lines += [
        f"  KV cache  [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {headroom.used.blocks / capacity.usable_blocks:6.1%}",
        f"  in use    {headroom.used.blocks:>8,} of {capacity.usable_blocks:,} blocks{_gib(headroom.used.size_bytes)}",
        f"  free      {headroom.free.blocks:>8,} blocks{_gib(headroom.free.size_bytes)}",
        f"  requests  {reading.num_requests_running or 0:>8,} running, {reading.num_requests_waiting or 0:,} waiting, "
        f"{reading.num_preemptions or 0:,} preempted so far",
    ]
    for slots in headroom.slots:
        remaining = _or_unknown(slots.remaining)
        lines.append(f"  fits now  {remaining:>8} more {_requests_of(slots)} ({slots.slots:,} when empty)")
    lines.append(f"  full in   {_full_in(engine.exhaustion_seconds):>8}   limit: {headroom.binding_limit or '?'}")
    if engine.memory_bandwidth_utilization_ratio is not None:
        lines.append(f"  decoding  {engine.memory_bandwidth_utilization_ratio:>8.0%} of the memory bandwidth")
    return lines


def _gpu_lines(gpu: GpuSnapshot) -> list[str]:
    reading = gpu.reading
    name = f"GPU {'?' if reading.index is None else reading.index}, {reading.name or reading.uuid}"
    if reading.lost:
        return [f"{name}: does not answer"]
    if gpu.memory is None:
        return [f"{name}: no memory figures"]
    parts = ", ".join(
        f"{component} {gpu.memory.components[component] / _GIB:.1f}"
        for component in COMPONENTS
        if component in gpu.memory.components
    )
    return [f"{name}, GiB: {parts}"]


def _requests_of(slots: RequestSlots) -> str:
    """The requests of one length, in words."""
    tokens = "? tokens" if slots.tokens is None else f"{slots.tokens:,} tokens"
    kind = {TYPICAL_LENGTH: "typical requests, mean", P95_LENGTH: "long requests (p95),"}.get(slots.length, "requests of")
    return f"{kind} {tokens}"


def _full_in(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return "never" if seconds == float("inf") else f"{seconds:.0f} s"


def _engine_summary(engine: EngineSnapshot) -> str:
    reading, headroom = engine.reading, engine.headroom
    usage = "?" if reading.usage_ratio is None else f"{reading.usage_ratio:.3f}"
    by_length = () if headroom is None else headroom.slots
    slots = "".join(f" slots[{slot.length}]={_or_unknown(slot.remaining)}/{slot.slots}" for slot in by_length)
    return (
        f"usage={usage} running={_or_unknown(reading.num_requests_running)} waiting={_or_unknown(reading.num_requests_waiting)} "
        f"preemptions={_or_unknown(reading.num_preemptions)}{slots}"
    )


def _gib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f" ({size_bytes / _GIB:.1f} GiB)"


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"
