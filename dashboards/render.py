"""Boards as pictures, with the data of a Prometheus; needs `pip install '.[bench]'`.

    python -m dashboards.render http://127.0.0.1:9090             # all boards, each to a PNG beside its JSON
    python -m dashboards.render http://127.0.0.1:9090 engine      # one board
    python -m dashboards.render --demo                            # with simulated engines, for 5.5 minutes

It is for our own eyes and for the README: it uses each board's queries, titles, units, thresholds and places, and does not look
like Grafana.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dashboards.drawing import ALERT, SIZE, Box, Canvas, Span, draw_panel, spans_of, text_width
from dashboards.queries import ALL, Board, GridPosition, Prometheus, View, legend_of, open_view, read_board
from dashboards.simulated_fleet import simulated_fleet
from dashboards.values import MUTED

FOLDER = Path(__file__).parent
BOARDS = ("engine", "node", "fleet")
_WIDTH, _ROW, _GAP, _HEADER = 1600, 38, 8, 44
_ALERTS_X = 200
_POINTS = 240


def render(board: Board, prometheus: Prometheus, path: Path, *, seconds: float, scrape_seconds: float) -> None:
    """Draw a board with the last `seconds` to a PNG."""
    end = time.time()
    step = max(seconds / _POINTS, scrape_seconds)
    view = open_view(board, prometheus, start=end - seconds, end=end, step=step, scrape_seconds=scrape_seconds)
    bottom = max(panel.position.y + panel.position.h for panel in board.panels)
    canvas = Canvas(_WIDTH, _HEADER + bottom * _ROW + _GAP)
    canvas.text(_GAP + 4, _HEADER / 2, board.title, size=15, bold=True)
    choices = _choices(view)
    canvas.text(_WIDTH - _GAP, _HEADER / 2, choices, color=MUTED, align="right", width=_WIDTH * 0.6)
    alerts = _alerts(view)
    if alerts:
        names = "alerts that fired: " + ", ".join(sorted({alert.name for alert in alerts}))
        room = _WIDTH - _ALERTS_X - min(text_width(choices, SIZE), _WIDTH * 0.6) - 3 * _GAP
        canvas.text(_ALERTS_X, _HEADER / 2, names, color=ALERT, width=room)
    for panel in board.panels:
        values = _values(view, panel.repeat)
        for value, box in zip(values, _boxes(panel.position, len(values)), strict=True):
            draw_panel(canvas, panel, view.choosing(**{panel.repeat: (value,)}) if panel.repeat else view, box, alerts)
    canvas.save(path)


def _values(view: View, variable: str) -> list[str]:
    """Values of the variable that a panel is repeated for; one of no meaning where it is not."""
    chosen = view.values.get(variable, ("",))
    return list(view.options[variable] if ALL in chosen else chosen)


def _choices(view: View) -> str:
    chosen = ((variable.name, view.values[variable.name]) for variable in view.board.variables if variable.kind != "datasource")
    return "    ".join(f"{name}: {'All' if ALL in values else ', '.join(values) or 'none'}" for name, values in chosen)


def _alerts(view: View) -> list[Span]:
    return [
        Span(legend_of(annotation, series.labels), start, end)
        for annotation in view.board.annotations
        for series in view.answers(annotation)
        for start, end, _ in spans_of(series, view.step)
    ]


def _boxes(position: GridPosition, number: int) -> list[Box]:
    """Where a panel is, or its copies beside each other."""
    column = (_WIDTH - _GAP) / 24
    place = Box(_GAP + position.x * column, _HEADER + position.y * _ROW, position.w * column, position.h * _ROW - _GAP)
    return [box.inside(0, 0, _GAP, 0) for box in place.columns(number)]


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", metavar="PROMETHEUS_URL [BOARD...]")
    parser.add_argument("--demo", action="store_true", help="start simulated engines, an exporter and a Prometheus; no URL then")
    parser.add_argument("--seconds", type=float, default=330.0, help="time range of the pictures, and how long the demo runs")
    parser.add_argument("--scrape-seconds", type=float, default=2.0, help="how often the Prometheus scrapes the exporter")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the pictures")
    given = parser.parse_args()
    if given.demo:
        with simulated_fleet(given.scrape_seconds) as url:
            time.sleep(given.seconds)
            draw(url, given.arguments, given)
    elif given.arguments:
        draw(given.arguments[0], given.arguments[1:], given)
    else:
        parser.error("needs the address of a Prometheus, or --demo")


def draw(url: str, names: Sequence[str], given: argparse.Namespace) -> None:
    """Draw some boards, all if none is named, to the output folder."""
    for name in names or BOARDS:
        path = given.output / f"{name}.png"
        board = read_board(FOLDER / f"{name}.json")
        render(board, Prometheus(url), path, seconds=given.seconds, scrape_seconds=given.scrape_seconds)
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
