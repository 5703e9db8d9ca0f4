"""Draws the panels of a board with matplotlib: light, in pixels, readable at 1600 of them."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from PIL import Image  # type: ignore[import-not-found,unused-ignore]  # comes with matplotlib

from dashboards.colors import VERMILLION
from dashboards.queries import Panel, Query, Series, View, legend_of
from dashboards.tables import Table, table_of
from dashboards.values import MUTED, PALETTE, TEXT, color_of, no_value, shown, threshold_steps, with_unit

mpl.use("Agg")
mpl.rcParams["text.parse_math"] = False
# The narrower one, as in Grafana, where it is there; the other comes with matplotlib.
_NARROW = "Liberation Sans"
if _NARROW in font_manager.get_font_names():
    mpl.rcParams["font.family"] = [_NARROW, "DejaVu Sans"]

_DPI = 100
_POINT = _DPI / 72
# matplotlib leaves these two of its calls without types; `unused-ignore` is for where it is not installed.
_RULER = RendererAgg(1, 1, _DPI)  # type: ignore[no-untyped-call,unused-ignore]
SIZE, _SMALL = 10.0, 9.0
_LINE = 17.0
_FRAME, _GRID = "#d8dce0", "#e6e9ec"
_BACKGROUND = "#f4f5f7"
ALERT = VERMILLION
_DASHES = (0, (4, 2))


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels from the top left corner."""

    x: float
    y: float
    w: float
    h: float

    def inside(self, left: float, top: float, right: float, bottom: float) -> Box:
        """The rectangle without these margins."""
        return Box(self.x + left, self.y + top, self.w - left - right, self.h - top - bottom)

    def columns(self, number: int) -> list[Box]:
        """Equal parts side by side."""
        return [Box(self.x + index * self.w / number, self.y, self.w / number, self.h) for index in range(number)]

    def rows(self, number: int) -> list[Box]:
        """Equal parts one below the other."""
        return [Box(self.x, self.y + index * self.h / number, self.w, self.h / number) for index in range(number)]


class Canvas:
    """A picture of `width` x `height` pixels."""

    def __init__(self, width: float, height: float) -> None:
        self._width, self._height = width, height
        self._figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=_BACKGROUND)
        self._page = self._figure.add_axes((0, 0, 1, 1))
        self._page.set_xlim(0, width)
        self._page.set_ylim(height, 0)
        self._page.axis("off")

    def save(self, path: Path) -> None:
        """Write a PNG of 256 colors, which is a third of the size."""
        picture = io.BytesIO()
        self._figure.savefig(picture, dpi=_DPI, format="png")
        Image.open(picture).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)

    def rectangle(self, box: Box, color: str, *, edge: str | None = None, alpha: float = 1.0) -> None:
        """Fill a rectangle."""
        self._page.add_patch(
            Rectangle((box.x, box.y), box.w, box.h, facecolor=color, edgecolor=edge or "none", linewidth=0.8, alpha=alpha)
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = SIZE,
        color: str = TEXT,
        bold: bool = False,
        align: str = "left",
        width: float = math.inf,
    ) -> None:
        """Write one line whose middle is at `y`, cut to `width`."""
        weight = "bold" if bold else "normal"
        cut = fitted(text, size, width, bold=bold)
        self._page.text(x, y, cut, fontsize=size, color=color, fontweight=weight, ha=align, va="center_baseline")

    def axes(self, box: Box) -> Axes:
        """Axes for a chart in a rectangle."""
        place = (box.x / self._width, 1 - (box.y + box.h) / self._height, box.w / self._width, box.h / self._height)
        return self._figure.add_axes(place)


@cache
def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """How wide a line is, in pixels."""
    font = FontProperties(size=size, weight="bold" if bold else "normal")
    width, _, _ = _RULER.get_text_width_height_descent(text, font, False)  # type: ignore[no-untyped-call,unused-ignore]
    return float(width)


def fitted(text: str, size: float, width: float, *, bold: bool = False) -> str:
    """The text, shortened until it fits."""
    if math.isinf(width) or text_width(text, size, bold=bold) <= width:
        return text
    while text and text_width(text + "…", size, bold=bold) > width:
        text = text[:-1]
    return text.rstrip() + "…"


@dataclass(frozen=True)
class Span:
    """From when to when (Unix seconds) something of this name was."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Drawn:
    """A series with what its panel says about it."""

    name: str
    field: dict[str, Any]
    series: Series


def draw_panel(canvas: Canvas, panel: Panel, view: View, box: Box, alerts: Sequence[Span]) -> None:
    """Draw one panel with its frame and title; `alerts` are marked on time series."""
    if panel.kind == "row":
        canvas.text(box.x + 4, box.y + box.h / 2, f"▾ {view.text(panel.title)}", size=11, bold=True)
        return
    canvas.rectangle(box, "white", edge=_FRAME)
    inner = box.inside(10, 8, 10, 8)
    if panel.title:
        canvas.text(inner.x, inner.y + 9, view.text(panel.title), size=10.5, bold=True, width=inner.w)
        inner = inner.inside(0, 24, 0, 0)
    answers = [(query, view.answers(query)) for query in panel.queries]
    if panel.kind == "table":
        _draw_table(canvas, panel, table_of(panel, answers), inner)
        return
    drawn = [_drawn(panel, query, series) for query, answer in answers for series in answer]
    if not drawn:
        _draw_nothing(canvas, panel, inner)
        return
    if panel.kind == "stat":
        _draw_stat(canvas, drawn, inner)
    elif panel.kind == "bargauge":
        _draw_bars(canvas, drawn, inner)
    elif panel.kind == "timeseries":
        _draw_lines(canvas, view, drawn, inner, alerts)
    elif panel.kind == "state-timeline":
        _draw_states(canvas, view, drawn, inner)
    else:
        raise ValueError(f"panels of type {panel.kind} are not known here")


def _drawn(panel: Panel, query: Query, series: Series) -> Drawn:
    name = legend_of(query, series.labels)
    return Drawn(name, panel.field(name, ref_id=query.ref_id), series)


def _draw_nothing(canvas: Canvas, panel: Panel, box: Box) -> None:
    canvas.text(box.x + box.w / 2, box.y + box.h / 2, no_value(panel.field()), color=MUTED, align="center", width=box.w)


def _draw_stat(canvas: Canvas, drawn: Sequence[Drawn], box: Box) -> None:
    """Big numbers side by side, each with its name where there are several."""
    for item, tile in zip(drawn, box.columns(len(drawn)), strict=True):
        inner = tile.inside(4, 2, 4, 2)
        middle = inner.x + inner.w / 2
        if len(drawn) > 1:
            canvas.text(middle, inner.y + 8, item.name, color=MUTED, align="center", width=inner.w)
            inner = inner.inside(0, 12, 0, 0)
        value = item.series.last
        text = shown(value, item.field)
        size = min(inner.h * 0.5 / _POINT, 34.0)
        while size > _SMALL and text_width(text, size, bold=True) > inner.w:
            size -= 0.5
        color = color_of(value, item.field)
        canvas.text(middle, inner.y + inner.h / 2, text, size=size, color=color, bold=True, align="center", width=inner.w)


def _draw_bars(canvas: Canvas, drawn: Sequence[Drawn], box: Box) -> None:
    """Horizontal bars from the least to the most, with a tick at each threshold."""
    names = [item.name for item in drawn]
    labels = max(text_width(name, SIZE) for name in names) + 10 if len(drawn) > 1 else 0.0
    label_width = min(labels, box.w * 0.45)
    finite = [item.series.last for item in drawn if math.isfinite(item.series.last)]
    value_width = max(text_width(shown(item.series.last, item.field), 12, bold=True) for item in drawn) + 14
    shown_rows = max(min(len(drawn), int(box.h / 20)), 1)
    for item, row in zip(drawn, box.rows(shown_rows), strict=False):
        value = item.series.last
        low = float(item.field.get("min") or 0)
        high = float(item.field["max"]) if item.field.get("max") is not None else max([*finite, low + 1e-9])
        middle = row.y + row.h / 2
        bar = Box(row.x + label_width, middle - min(row.h * 0.36, 16), row.w - label_width - value_width, min(row.h * 0.72, 32))
        if label_width:
            canvas.text(row.x, middle, item.name, width=label_width - 8)
        canvas.rectangle(bar, _GRID)
        color = color_of(value, item.field)
        share = min(max((value - low) / (high - low), 0.0), 1.0) if math.isfinite(value) else float(value > 0)
        canvas.rectangle(Box(bar.x, bar.y, bar.w * share, bar.h), color)
        for start, _ in threshold_steps(item.field):
            if low < start < high:
                x = bar.x + bar.w * (start - low) / (high - low)
                canvas.rectangle(Box(x - 1, bar.y - 3, 2, bar.h + 6), TEXT)
        canvas.text(
            row.x + row.w, middle, shown(value, item.field), size=min(12, row.h * 0.5), color=color, bold=True, align="right"
        )


def _draw_lines(canvas: Canvas, view: View, drawn: Sequence[Drawn], box: Box, alerts: Sequence[Span]) -> None:
    plot = _draw_legend(canvas, drawn, box).inside(62, 4, 8, 22)
    axes = canvas.axes(plot)
    _plot(axes, view, drawn)
    _style(axes, view, drawn[0], plot)
    _draw_thresholds(axes, drawn[0])
    for alert in alerts:
        end = min(alert.end, view.end)
        axes.axvspan(alert.start, end, color=ALERT, alpha=0.05, linewidth=0)
        # Below the axis, where it hides no line.
        axes.axvspan(alert.start, end, ymin=-5 / plot.h, ymax=-1 / plot.h, color=ALERT, linewidth=0, clip_on=False)


def _custom(item: Drawn) -> dict[str, Any]:
    custom: dict[str, Any] = item.field.get("custom") or {}
    return custom


def _line_color(item: Drawn, index: int) -> str:
    color = item.field.get("color") or {}
    return str(color["fixedColor"]) if color.get("mode") == "fixed" else PALETTE[index % len(PALETTE)]


def _plot(axes: Axes, view: View, drawn: Sequence[Drawn]) -> None:
    floor: dict[float, float] = {}
    for index, item in enumerate(drawn):
        custom, color = _custom(item), _line_color(item, index)
        times, values = _with_gaps(item.series, view.step)
        base = [0.0] * len(values)
        if (custom.get("stacking") or {}).get("mode") == "normal":
            base = [floor.get(time, 0.0) for time in times]
            values = [low + value for low, value in zip(base, values, strict=True)]
            floor.update((time, value) for time, value in zip(times, values, strict=True) if not math.isnan(value))
        if opacity := custom.get("fillOpacity"):
            axes.fill_between(times, base, values, color=color, alpha=opacity / 100, linewidth=0)
        dashed = (custom.get("lineStyle") or {}).get("fill") == "dash"
        axes.plot(times, values, color=color, linewidth=custom.get("lineWidth", 1) * 1.2, linestyle=_DASHES if dashed else "-")


def _style(axes: Axes, view: View, item: Drawn, plot: Box) -> None:
    unit = str(item.field.get("unit") or "")
    axes.set_xlim(view.start, view.end)
    times = list(_ticks(view, max(int(plot.w / 110), 2)))
    axes.set_xticks(times, [_clock(at) for at in times])
    axes.set_ylim(*_limits(axes, item))
    axes.set_yticks(_round_ticks(*axes.get_ylim(), number=max(int(plot.h / 34), 2), unit=unit))
    axes.yaxis.set_major_formatter(lambda value, _: with_unit(value, unit))
    axes.tick_params(labelsize=_SMALL, colors=MUTED, length=0, pad=5)
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color(_FRAME)


def _ticks(view: View, number: int) -> Iterator[float]:
    for index in range(number):
        yield view.start + (view.end - view.start) * (index + 0.5) / number


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%H:%M:%S")


def _limits(axes: Axes, item: Drawn) -> tuple[float, float]:
    """What the axis shows: the values with a margin, the soft limits, and the hard ones before all."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if not math.isfinite(low):
        low, high = 0.0, 1.0
    margin = (high - low) * 0.05
    soft_min, soft_max = _custom(item).get("axisSoftMin"), _custom(item).get("axisSoftMax")
    low = low - margin if soft_min is None or low < soft_min else float(soft_min)
    high = high + margin if soft_max is None or high > soft_max else float(soft_max)
    low = float(item.field["min"]) if item.field.get("min") is not None else low
    high = float(item.field["max"]) if item.field.get("max") is not None else high
    return low, high if high > low else low + 1


def _round_ticks(low: float, high: float, *, number: int, unit: str) -> list[float]:
    """Round values between low and high: of bytes in powers of 1024, of seconds in minutes and hours."""
    rough = (high - low) / number
    base = 1.0
    if unit == "bytes" and rough > 1:
        base = 1024.0 ** math.floor(math.log(rough, 1024))
    elif unit == "s":
        base = next((size for size in (3600.0, 60.0) if rough > size * 0.5), 1.0)
    power = 10.0 ** math.floor(math.log10(rough / base))
    step = base * power * next(digit for digit in (1, 2, 5, 10) if digit * power >= rough / base * 0.999)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _draw_thresholds(axes: Axes, item: Drawn) -> None:
    if (_custom(item).get("thresholdsStyle") or {}).get("mode") != "dashed":
        return
    low, high = axes.get_ylim()
    for start, color in threshold_steps(item.field):
        if low < start < high:
            axes.axhline(start, color=color, linewidth=1.2, linestyle="--")


def _draw_legend(canvas: Canvas, drawn: Sequence[Drawn], box: Box) -> Box:
    """Write names and last values below the chart; returns what is left for it."""
    lines: list[list[tuple[float, str, str, str]]] = [[]]
    x = 0.0
    for index, item in enumerate(drawn):
        value = shown(item.series.last, item.field)
        value_width = text_width(value, _SMALL, bold=True)
        name = fitted(item.name, _SMALL, box.w - value_width - 26)
        entry_width = text_width(name, _SMALL) + value_width + 44
        if lines[-1] and x + entry_width - 18 > box.w:
            lines.append([])
            x = 0.0
        lines[-1].append((x, _line_color(item, index), name, value))
        x += entry_width
    room = max(int(box.h * 0.4 / _LINE), 1)
    if len(lines) > room:
        rest = sum(len(line) for line in lines[room - 1 :])
        lines = [*lines[: room - 1], [(0.0, "none", f"and {rest} more", "")]]
    top = box.y + box.h - len(lines) * _LINE
    for number, line in enumerate(lines):
        y = top + (number + 0.5) * _LINE
        for x, color, name, value in line:
            canvas.rectangle(Box(box.x + x, y - 2, 14, 4), color)
            canvas.text(box.x + x + 19, y, name, size=_SMALL)
            canvas.text(box.x + x + 24 + text_width(name, _SMALL), y, value, size=_SMALL, bold=True)
    return box.inside(0, 0, 0, len(lines) * _LINE + 4)


def _draw_states(canvas: Canvas, view: View, drawn: Sequence[Drawn], box: Box) -> None:
    label_width = min(max(text_width(item.name, SIZE) for item in drawn) + 10, box.w * 0.3)
    plot = box.inside(label_width, 0, 6, 18)
    scale = plot.w / (view.end - view.start)
    for item, row in zip(drawn, plot.rows(len(drawn)), strict=True):
        canvas.text(box.x, row.y + row.h / 2, item.name, width=label_width - 8)
        for start, end, value in spans_of(item.series, view.step):
            x = row.x + max(start - view.start, 0) * scale
            width = (min(end, view.end) - max(start, view.start)) * scale
            canvas.rectangle(Box(x, row.y + 2, width, row.h - 4), color_of(value, item.field), edge="white", alpha=0.85)
            text = shown(value, item.field)
            if text_width(text, _SMALL) < width - 6:
                canvas.text(x + width / 2, row.y + row.h / 2, text, size=_SMALL, color="white", bold=True, align="center")
    for at in _ticks(view, max(int(plot.w / 160), 2)):
        x = plot.x + (at - view.start) * scale
        canvas.text(x, plot.y + plot.h + 10, _clock(at), size=_SMALL, color=MUTED, align="center")


def spans_of(series: Series, step: float) -> list[tuple[float, float, float]]:
    """(from, to, value) of each stretch of one value without a gap."""
    spans: list[tuple[float, float, float]] = []
    for at, value in series.points:
        if spans and spans[-1][2] == value and at - spans[-1][1] <= step * 0.5:
            spans[-1] = (spans[-1][0], at + step, value)
        else:
            spans.append((at, at + step, value))
    return spans


def _with_gaps(series: Series, step: float) -> tuple[list[float], list[float]]:
    """Times and values, with NaN where points are missing or cannot be drawn, so that no line goes over it."""
    times: list[float] = []
    values: list[float] = []
    for at, value in series.points:
        if times and at - times[-1] > 1.5 * step:
            times.append(times[-1] + step)
            values.append(math.nan)
        times.append(at)
        values.append(value if math.isfinite(value) else math.nan)
    return times, values


def _draw_table(canvas: Canvas, panel: Panel, table: Table, box: Box) -> None:
    if not table.rows:
        _draw_nothing(canvas, panel, box)
        return
    room = int(box.h / 24) - 1
    rows = table.rows[: room if len(table.rows) <= room else room - 1]
    cells = [[_cell(cell, field) for cell, field in zip(row, table.fields, strict=True)] for row in rows]
    wanted = [
        max([text_width(name, SIZE, bold=True), *(text_width(line[index][0], SIZE) for line in cells)]) + 16
        for index, name in enumerate(table.names)
    ]
    scale = box.w / sum(wanted)
    size = SIZE if scale >= 1 else _SMALL
    x = box.x
    for index, name in enumerate(table.names):
        width = wanted[index] * scale
        canvas.text(x + 4, box.y + 12, name, size=size, bold=True, width=width - 12, color=MUTED)
        for number, line in enumerate(cells):
            text, color = line[index]
            y = box.y + (number + 1) * 24
            canvas.text(x + 4, y + 12, text, size=size, color=color, width=width - 12)
        x += width
    for number in range(len(cells)):
        canvas.rectangle(Box(box.x, box.y + (number + 1) * 24, box.w, 1), _GRID)
    if len(rows) < len(table.rows):
        canvas.text(box.x + 4, box.y + (len(rows) + 1) * 24 + 12, f"and {len(table.rows) - len(rows)} more", color=MUTED)


def _cell(cell: float | str | None, field: dict[str, Any]) -> tuple[str, str]:
    if cell is None or cell == "":
        return str(field.get("noValue") or ""), MUTED
    if isinstance(cell, str):
        return cell, TEXT
    colored = (field.get("custom") or {}).get("cellOptions", {}).get("type") == "color-text"
    return shown(cell, field), color_of(cell, field) if colored else TEXT
