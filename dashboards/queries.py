"""What a board asks Prometheus: a classic dashboard JSON -> panels, queries and variables, and their answers.

Queries become PromQL as Grafana makes it: variables are filled in, chained ones after those that they name.
"""

from __future__ import annotations

import copy
import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ALL = "$__all"

Labels = Mapping[str, str]
Point = tuple[float, float]

_REFERENCE = re.compile(r"\$\{(?P<braced>\w+)(?::(?P<format>\w+))?\}|\[\[(?P<square>\w+)\]\]|\$(?P<plain>\w+)")
_LABEL_VALUES = re.compile(r"label_values\((?:(?P<selector>.+),)?\s*(?P<label>\w+)\s*\)", re.DOTALL)
_QUERY_RESULT = re.compile(r"query_result\((?P<expression>.+)\)", re.DOTALL)
_LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True)
class GridPosition:
    """Where a panel is, in 24 columns."""

    x: int
    y: int
    w: int
    h: int


@dataclass(frozen=True)
class Query:
    """One query of a panel; an instant one asks for the end of the time range only."""

    ref_id: str
    expression: str
    instant: bool
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """A panel, or a row. `kind` is Grafana's name of the type.

    `defaults` and `overrides` are fieldConfig, `options` and `transformations` as they stand in the JSON. `repeat` names the
    variable whose values each get a copy of the panel, "" for none.
    """

    title: str
    kind: str
    position: GridPosition
    queries: tuple[Query, ...]
    description: str
    defaults: Mapping[str, Any]
    overrides: tuple[Mapping[str, Any], ...]
    options: Mapping[str, Any]
    transformations: tuple[Mapping[str, Any], ...]
    repeat: str

    def field(self, *names: str, ref_id: str = "") -> dict[str, Any]:
        """The settings for a series or column of these names: the defaults and the overrides that match one of them."""
        field: dict[str, Any] = copy.deepcopy(dict(self.defaults))
        for override in self.overrides:
            if _matches(override["matcher"], names, ref_id):
                for setting in override["properties"]:
                    *path, last = setting["id"].split(".")
                    inner = field
                    for key in path:
                        inner = inner.setdefault(key, {})
                    inner[last] = setting.get("value")
        return field


@dataclass(frozen=True)
class Variable:
    """A template variable. `all_value` is what All stands for, "" for all of its options."""

    name: str
    kind: str
    query: str
    several: bool
    has_all: bool
    all_value: str
    default: tuple[str, ...]


@dataclass(frozen=True)
class Board:
    """A dashboard; `panels` in the order of the JSON, those inside of collapsed rows included, as if these were open.

    `annotations` are range queries: there is something to see on each time series where they have a point.
    """

    title: str
    uid: str
    panels: tuple[Panel, ...]
    variables: tuple[Variable, ...]
    annotations: tuple[Query, ...]


@dataclass(frozen=True)
class Series:
    """One series of an answer: (Unix seconds, value)."""

    labels: Labels
    points: tuple[Point, ...]

    @property
    def last(self) -> float:
        """The newest value that is a number; NaN when there is none."""
        return next((value for _, value in reversed(self.points) if not math.isnan(value)), math.nan)


def read_board(path: Path) -> Board:
    """Read a classic dashboard JSON."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Board(
        title=content["title"],
        uid=content["uid"],
        panels=tuple(_panels(content["panels"])),
        variables=tuple(_variable(variable) for variable in content.get("templating", {}).get("list", [])),
        annotations=tuple(
            Query(annotation["name"], annotation["expr"], instant=False, legend=annotation.get("titleFormat", ""))
            for annotation in content.get("annotations", {}).get("list", [])
            if "expr" in annotation
        ),
    )


def _panels(panels: Sequence[Mapping[str, Any]]) -> Iterator[Panel]:
    """All panels at the places that they have when every collapsed row is opened."""
    moved = 0
    for content in panels:
        panel = _panel(content)
        panel = replace(panel, position=replace(panel.position, y=panel.position.y + moved))
        yield panel
        inner = [_panel(inside) for inside in content.get("panels", [])]
        if inner:
            top = min(inside.position.y for inside in inner)
            for inside in inner:
                yield replace(inside, position=replace(inside.position, y=panel.position.y + 1 + inside.position.y - top))
            moved += max(inside.position.y + inside.position.h for inside in inner) - top


def _panel(panel: Mapping[str, Any]) -> Panel:
    config = panel.get("fieldConfig", {})
    position = panel["gridPos"]
    return Panel(
        title=panel.get("title", ""),
        kind=panel["type"],
        position=GridPosition(position.get("x", 0), position.get("y", 0), position["w"], position["h"]),
        queries=tuple(_query(target) for target in panel.get("targets", []) if not target.get("hide")),
        description=panel.get("description", ""),
        defaults=config.get("defaults", {}),
        overrides=tuple(config.get("overrides", [])),
        options=panel.get("options", {}),
        transformations=tuple(panel.get("transformations", [])),
        repeat=panel.get("repeat", ""),
    )


def _query(target: Mapping[str, Any]) -> Query:
    return Query(target.get("refId", ""), target["expr"], bool(target.get("instant")), target.get("legendFormat", ""))


def _variable(variable: Mapping[str, Any]) -> Variable:
    query = variable.get("query", "")
    current = (variable.get("current") or {}).get("value")
    return Variable(
        name=variable["name"],
        kind=variable["type"],
        query=query["query"] if isinstance(query, dict) else str(query),
        several=bool(variable.get("multi")),
        has_all=bool(variable.get("includeAll")),
        all_value=variable.get("allValue") or "",
        default=tuple(current) if isinstance(current, list) else () if current in (None, "") else (str(current),),
    )


def _matches(matcher: Mapping[str, Any], names: Sequence[str], ref_id: str) -> bool:
    options = matcher.get("options")
    if matcher["id"] == "byName":
        return options in names
    if matcher["id"] == "byFrameRefID":
        return bool(ref_id == options)
    raise ValueError(f"matcher {matcher['id']} is not known here")


def legend_of(query: Query, labels: Labels) -> str:
    """The name of a series in the legend."""
    if query.legend:
        return _LEGEND_LABEL.sub(lambda match: labels.get(match[1], ""), query.legend)
    shown = {name: value for name, value in labels.items() if name != "__name__"}
    return labels.get("__name__", "") + "{" + ", ".join(f'{name}="{value}"' for name, value in sorted(shown.items())) + "}"


class Prometheus:
    """The HTTP API of a Prometheus. Every call raises OSError when it cannot be reached, ValueError when it refuses a query."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def instant(self, expression: str, at: float) -> list[Series]:
        """The series of an instant query at Unix seconds `at`."""
        result = self._get("query", query=expression, time=at)["result"]
        return [Series(series["metric"], (_point(series["value"]),)) for series in result]

    def over(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        """The series of a range query."""
        result = self._get("query_range", query=expression, start=start, end=end, step=step)["result"]
        return [Series(series["metric"], tuple(_point(value) for value in series["values"])) for series in result]

    def label_values(self, label: str, selector: str, start: float, end: float) -> list[str]:
        """Values of a label, of the series that `selector` takes ("" for all)."""
        parameters: dict[str, object] = {"start": start, "end": end}
        if selector:
            parameters["match[]"] = selector
        values: list[str] = self._get(f"label/{label}/values", **parameters)
        return values

    def _get(self, path: str, **parameters: object) -> Any:  # noqa: ANN401  # JSON
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310  # the caller's own Prometheus
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{error.read().decode(errors='replace')} for {parameters}") from error


def _point(pair: Sequence[Any]) -> Point:
    return float(pair[0]), float(pair[1])


@dataclass(frozen=True)
class View:
    """A board as one looks at it: a time range (Unix seconds), the distance of its points, and the chosen variables.

    `scrape_seconds` is the interval that Grafana's data source is set to; `values` has the values of each variable that are
    chosen, ALL alone for all.
    """

    board: Board
    prometheus: Prometheus
    start: float
    end: float
    step: float
    scrape_seconds: float
    options: Mapping[str, Sequence[str]]
    values: Mapping[str, Sequence[str]]

    def text(self, text: str) -> str:
        """The text with each variable filled in; one that is not known stays as it is."""
        return _REFERENCE.sub(self._filled, text)

    def answers(self, query: Query) -> list[Series]:
        """What Prometheus answers to a query of a panel."""
        expression = self.text(query.expression)
        if query.instant:
            return self.prometheus.instant(expression, self.end)
        return self.prometheus.over(expression, self.start, self.end, self.step)

    def choosing(self, **values: Sequence[str]) -> View:
        """The same with other values of some variables."""
        return replace(self, values={**self.values, **values})

    def _filled(self, match: re.Match[str]) -> str:
        name = match["braced"] or match["square"] or match["plain"]
        built_in = self._built_in(name)
        if built_in is not None:
            return built_in
        variable = next((variable for variable in self.board.variables if variable.name == name), None)
        if variable is None:
            return match[0]
        values = self.values.get(name, ())
        if ALL in values:
            if variable.all_value:
                return variable.all_value
            values = self.options.get(name, ())
        return _formatted(values, match["format"] or ("regex" if variable.several or variable.has_all else "raw"))

    def _built_in(self, name: str) -> str | None:
        seconds = {
            "__interval": self.step,
            "__rate_interval": max(self.step + self.scrape_seconds, 4 * self.scrape_seconds),
            "__range": self.end - self.start,
        }.get(name)
        return None if seconds is None else f"{math.ceil(seconds)}s"


def _formatted(values: Sequence[str], form: str) -> str:
    if form == "regex":
        escaped = [re.sub(r"([\\^$*+?.()|{}\[\]/])", r"\\\\\1", value) for value in values]
        return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
    if form == "pipe":
        return "|".join(values)
    if form in ("raw", "text"):
        return ",".join(values)
    raise ValueError(f"format {form} of a variable is not known here")


def open_view(
    board: Board,
    prometheus: Prometheus,
    *,
    start: float,
    end: float,
    step: float,
    scrape_seconds: float,
    chosen: Mapping[str, Sequence[str]] | None = None,
) -> View:
    """Look at a board: each variable is `chosen`, or else what the board says, or the first of its options, as in Grafana."""
    view = View(board, prometheus, start, end, step, scrape_seconds, {}, {})
    for variable in board.variables:
        options = _options(variable, view)
        default = tuple(value for value in variable.default if value == ALL or value in options) or tuple(options[:1])
        values = (chosen or {}).get(variable.name, default)
        view = replace(view, options={**view.options, variable.name: options}, values={**view.values, variable.name: values})
    return view


def _options(variable: Variable, view: View) -> list[str]:
    if variable.kind == "query":
        return _asked(view.text(variable.query), view)
    if variable.kind == "datasource":
        return ["prometheus"]
    if variable.kind == "textbox":
        return [variable.query]
    raise ValueError(f"variables of type {variable.kind} are not known here")


def _asked(query: str, view: View) -> list[str]:
    if (match := _LABEL_VALUES.fullmatch(query.strip())) is not None:
        return view.prometheus.label_values(match["label"], (match["selector"] or "").strip(), view.start, view.end)
    if (match := _QUERY_RESULT.fullmatch(query.strip())) is not None:
        answer = view.prometheus.instant(match["expression"], view.end)
        return [legend_of(Query("", "", instant=True), series.labels) + f" {series.last:g}" for series in answer]
    raise ValueError(f"variable query {query!r} is not known here")
