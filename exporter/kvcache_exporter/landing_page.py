"""The page at /: what each engine has left, and which source fails, for a person who opens the port in a browser."""

from __future__ import annotations

from html import escape

from kvcache_exporter import __version__
from kvcache_exporter.gpu_memory import (
    COMPONENTS,
    FREE,
    KV_CACHE,
    OTHER_PROCESSES,
    OVERHEAD,
    RESERVED,
    UNKNOWN,
    WEIGHTS,
    MemorySplit,
)
from kvcache_exporter.headroom import MAX_LENGTH, P95_LENGTH, TYPICAL_LENGTH, RequestSlots
from kvcache_exporter.snapshot import EngineSnapshot, GpuSnapshot, Snapshot, TargetSnapshot

# Told apart without color vision too (Okabe and Ito), beside the words.
_COLORS = {
    WEIGHTS: "#0072b2",
    KV_CACHE: "#e69f00",
    OVERHEAD: "#009e73",
    OTHER_PROCESSES: "#d55e00",
    UNKNOWN: "#999999",
    RESERVED: "#56b4e9",
    FREE: "#f0f0f0",
}
_GIB = 1024**3
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #d0d7de; vertical-align: top; }
.bar { background: #dfe5ec; width: 12rem; height: 1rem; }
.bar div { background: #0b62a8; height: 1rem; }
.split { display: flex; width: 28rem; height: 1rem; border: 1px solid #57606a; }
.key { display: inline-block; width: .8rem; height: .8rem; border: 1px solid #57606a; margin-right: .25rem; }
.big { font-size: 1.5rem; font-weight: 600; }
.simulated { background: #fff1c2; border: 1px solid #d9a400; padding: .5rem .8rem; }
.down { background: #ffe4e0; padding: 0 .3rem; }
"""


def landing_page(snapshot: Snapshot | None, *, simulated: bool) -> str:
    """Return the page as HTML."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>kvcache-exporter</title>',
        f"<style>{_STYLE}</style></head><body><h1>kvcache-exporter {escape(__version__)}</h1>",
        '<p><a href="metrics">Metrics</a> · <a href="healthz">Health</a> · <a href="readyz">Readiness</a></p>',
    ]
    if simulated:
        parts.append('<p class="simulated">Everything here is <b>simulated</b>: no real engine or GPU is read.</p>')
    if snapshot is None:
        parts.append("<p>No source has been polled yet.</p>")
    else:
        parts += [_engines(snapshot), _gpus(snapshot), _sources(snapshot)]
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _engines(snapshot: Snapshot) -> str:
    rows = [_engine_row(target, engine) for target in snapshot.targets for engine in target.engines]
    if not rows:
        return "<h2>Engines</h2><p>None has answered.</p>"
    columns = ("Target", "Engine", "Model", "KV cache in use", "Running, waiting", "More requests that fit")
    head = "".join(f"<th>{column}</th>" for column in columns)
    return f"<h2>Engines</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


def _engine_row(target: TargetSnapshot, engine: EngineSnapshot) -> str:
    reading, headroom = engine.reading, engine.headroom
    usage = "not known"
    if reading.usage_ratio is not None:
        percent = f"{reading.usage_ratio:.0%}"
        blocks = "" if reading.used_blocks is None else f"<br>{reading.used_blocks} of {reading.usable_blocks} blocks"
        usage = f'<div class="bar"><div style="width: {percent}"></div></div>{percent}{blocks}'
    slots = "not known"
    if headroom is not None and headroom.slots:
        slots = "<br>".join(
            f'<span class="big">{_or_unknown(slot.remaining)}</span> of {slot.slots} {escape(_of_length(slot))}'
            for slot in headroom.slots
        )
    cells = (
        escape(target.name),
        escape(reading.engine),
        escape(engine.model_name),
        usage,
        f"{_or_unknown(reading.num_requests_running)}, {_or_unknown(reading.num_requests_waiting)}<br>{engine.state or ''}",
        slots,
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _of_length(slots: RequestSlots) -> str:
    tokens = "" if slots.tokens is None else f"{slots.tokens} tokens"
    named = {TYPICAL_LENGTH: "typical", P95_LENGTH: "long (p95)", MAX_LENGTH: "longest"}.get(slots.length)
    return f"of {tokens}" if named is None else f"{named}, {tokens}" if tokens else named


def _gpus(snapshot: Snapshot) -> str:
    if not snapshot.gpus:
        return ""
    rows = "".join(_gpu_row(gpu) for gpu in snapshot.gpus)
    head = "<tr><th>GPU</th><th>Name</th><th>Memory, GiB (free is not room for requests)</th></tr>"
    return f"<h2>GPUs</h2><table>{head}{rows}</table>"


def _gpu_row(gpu: GpuSnapshot) -> str:
    reading = gpu.reading
    index = "?" if reading.index is None else str(reading.index)
    memory = '<span class="down">does not answer</span>' if reading.lost else "no figures"
    if gpu.memory is not None:
        memory = _memory(gpu.memory)
    name = f"{escape(reading.name or '')}<br>{escape(reading.uuid)}"
    return f"<tr><td>{index}</td><td>{name}</td><td>{memory}</td></tr>"


def _memory(split: MemorySplit) -> str:
    sizes = {component: split.components[component] for component in COMPONENTS if component in split.components}
    bar = "".join(f'<div style="flex: {size} 0 0; background: {_COLORS[component]}"></div>' for component, size in sizes.items())
    words = ", ".join(
        f'<span class="key" style="background: {_COLORS[component]}"></span>{component.replace("_", " ")} {size / _GIB:.1f}'
        for component, size in sizes.items()
    )
    return f'<div class="split">{bar}</div>{words}'


def _sources(snapshot: Snapshot) -> str:
    rows = "".join(
        f"<tr><td>{escape(health.target)}</td><td>{escape(health.source)}</td>"
        + ("<td>up</td>" if health.up else f'<td><span class="down">down</span> {escape(health.message or "")}</td>')
        + "</tr>"
        for health in snapshot.health
    )
    return f"<h2>Sources</h2><table><tr><th>Target</th><th>Source</th><th>State</th></tr>{rows}</table>"


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else str(value)
