"""The kinds of panels, each set up alike on every board."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from dashboards.colors import COMPONENTS, GOOD, GRAY, NEUTRAL
from dashboards.promql import select

DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
NO_DATA = "no data"
SHOWN_SECONDS = 3600
"""Forecasts are drawn up to this: +Inf cannot be drawn, and a gap is for what is not known."""

Steps = Sequence[tuple[float | None, str]]
"""(From which value on, color), rising; the first is from None: from the lowest."""
Shown = tuple[str, str]
"""(Text, color) in the place of a value."""


@dataclass(frozen=True)
class Query:
    """A query and the name of its series; `color` where all of them have one, `dashed` where they are a limit of others."""

    expression: str
    legend: str = ""
    color: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Look:
    """What is said of a panel beside its queries.

    `mappings` are by value, and `series_colors` by the name of a series. The axis of lines spans `at_least` this.
    """

    title: str
    description: str
    unit: str
    decimals: int | None = None
    steps: Steps = ((None, NEUTRAL),)
    mappings: Mapping[str, Shown] | None = None
    series_colors: Mapping[str, str] | None = None
    width: int = 8
    height: int = 8
    minimum: float | None = None
    maximum: float | None = None
    at_least: tuple[float, float | None] = (0, None)
    no_value: str = NO_DATA


@dataclass(frozen=True)
class Column:
    """A column of a table: the label or the query (`Value #A`) that it shows, and how."""

    source: str
    name: str
    unit: str = ""
    decimals: int | None = None
    steps: Steps = ()
    mappings: Mapping[str, Shown] | None = None
    link: tuple[str, str] | None = None


def numbers(look: Look, *queries: Query) -> stat.Panel:
    """Big numbers, of now: an instant query, so that a value that is gone is not shown as if it were there."""
    panel = _set_up(stat.Panel(), look, queries, instant=True)
    panel.color_scheme(_BY_THRESHOLD)
    panel.reduce_options(_NEWEST)
    panel.graph_mode(common_models.BigValueGraphMode("none"))
    panel.color_mode(common_models.BigValueColorMode("value"))
    panel.text_mode(common_models.BigValueTextMode("auto"))
    return panel


def bars(look: Look, *queries: Query) -> bargauge.Panel:
    """Horizontal bars, of now."""
    panel = _set_up(bargauge.Panel(), look, queries, instant=True)
    panel.color_scheme(_BY_THRESHOLD)
    panel.reduce_options(_NEWEST)
    panel.orientation(common_models.VizOrientation("horizontal"))
    panel.display_mode(common_models.BarGaugeDisplayMode("basic"))
    panel.show_unfilled(show_unfilled=True)
    return panel


def lines(look: Look, *queries: Query, stacked: bool = False) -> timeseries.Panel:
    """Lines over time, or areas that add up; where a step begins is a dashed line."""
    panel = _set_up(timeseries.Panel(), look, queries)
    panel.color_scheme(_color_by("palette-classic"))
    panel.legend(_legend("table", ["lastNotNull", "max"], shown=True))
    panel.tooltip(_tooltip("desc"))
    panel.show_points(common_models.VisibilityMode("auto"))
    panel.span_nulls(span_nulls=False)
    panel.line_width(1 if stacked else 2)
    panel.fill_opacity(70 if stacked else 0)
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode("normal")))
    panel.axis_soft_min(look.at_least[0])
    if look.at_least[1] is not None:
        panel.axis_soft_max(look.at_least[1])
    if len(look.steps) > 1:
        panel.thresholds(_thresholds(_limits(look.steps)))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode("dashed")))
    for place, query in enumerate(queries):
        if properties := list(_of_query(query)):
            panel.override_by_query(_ref_id(place), properties)
    for name, color in (look.series_colors or {}).items():
        panel.override_by_name(name, [_fixed(color)])
    return panel


def memory(look: Look, selection: str, only: str = "") -> timeseries.Panel:
    """What GPU memory is made of, stacked below its total; `only` is what PromQL adds to take some of the GPUs."""

    def bytes_of(metric: str, *matchers: str) -> str:
        return f"sum ({select(metric, selection, *matchers)}{only})"

    # A query a component: series are stacked in the order of the queries, and within a query by name.
    parts = [
        Query(bytes_of("kvcache_gpu_memory_component_bytes", f'component="{component}"'), component, color)
        for component, color in COMPONENTS.items()
    ]
    return lines(look, *parts, Query(bytes_of("kvcache_gpu_memory_total_bytes"), "total", GRAY, dashed=True), stacked=True)


def timeline(look: Look, *queries: Query) -> statetimeline.Panel:
    """What was when: a row a series, whose colors and words are the mappings of its values."""
    panel = _set_up(statetimeline.Panel(), look, queries)
    panel.color_scheme(_BY_THRESHOLD)
    panel.show_value(common_models.VisibilityMode("auto"))
    panel.merge_values(merge_values=True)
    panel.row_height(0.8)
    panel.fill_opacity(80)
    panel.span_nulls(span_nulls=False)
    panel.legend(_legend("list", [], shown=False))
    panel.tooltip(_tooltip("none"))
    return panel


def rows(look: Look, columns: Sequence[Column], *queries: Query, sort_by: str) -> table.Panel:
    """A table, of now: only the columns that are named, in their order, rising by one of them."""
    panel = _set_up(table.Panel(), look, queries, instant=True, form="table")
    panel.color_scheme(_BY_THRESHOLD)
    panel.sort_by([common.TableSortByFieldState().display_name(sort_by).desc(desc=False)])
    panel.show_header(show_header=True)
    panel.cell_height(common_models.TableCellHeight("sm"))
    if len(queries) > 1:
        panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    unused = {"Time", "Value"} - {column.source for column in columns}
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": dict.fromkeys(unused, True),
                "indexByName": {column.source: place for place, column in enumerate(columns)},
                "renameByName": {column.source: column.name for column in columns},
            },
        )
    )
    for column in columns:
        if properties := list(_of_column(column)):
            panel.override_by_name(column.name, properties)
    return panel


def value_map(texts: Mapping[str, Shown]) -> models.ValueMap:
    """What stands for values, as (text, color); the key for +Inf is Infinity, as JavaScript writes it."""
    results = {
        value: models.ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(texts.items())
    }
    return models.ValueMap(options=results)


def codes(texts: Iterable[Shown]) -> dict[str, Shown]:
    """Mappings of the places that `promql.coded` makes of label values."""
    return {str(place): text for place, text in enumerate(texts, start=1)}


class _Panel(Protocol):
    """What the builders of all kinds of panels have; each method returns the builder itself."""

    def title(self, title: str) -> object: ...
    def description(self, description: str) -> object: ...
    def datasource(self, datasource: common_models.DataSourceRef) -> object: ...
    def with_target(self, target: Builder[Dataquery]) -> object: ...
    def span(self, w: int) -> object: ...
    def height(self, h: int) -> object: ...
    def unit(self, unit: str) -> object: ...
    def decimals(self, decimals: float) -> object: ...
    def min(self, min_val: float) -> object: ...
    def max(self, max_val: float) -> object: ...
    def mappings(self, mappings: list[models.ValueMapping]) -> object: ...
    def thresholds(self, thresholds: Builder[models.ThresholdsConfig]) -> object: ...
    def no_value(self, no_value: str) -> object: ...


_P = TypeVar("_P", bound=_Panel)


def _set_up(panel: _P, look: Look, queries: Sequence[Query], *, instant: bool = False, form: str = "time_series") -> _P:
    panel.title(look.title)
    panel.description(look.description)
    panel.datasource(DATASOURCE)
    panel.span(look.width)
    panel.height(look.height)
    panel.unit(look.unit)
    panel.no_value(look.no_value)
    panel.thresholds(_thresholds(look.steps))
    if look.decimals is not None:
        panel.decimals(look.decimals)
    if look.minimum is not None:
        panel.min(look.minimum)
    if look.maximum is not None:
        panel.max(look.maximum)
    if look.mappings is not None:
        panel.mappings([value_map(look.mappings)])
    for place, query in enumerate(queries):
        target = prometheus.Dataquery()
        target.datasource(DATASOURCE)
        target.expr(query.expression)
        target.ref_id(_ref_id(place))
        target.format(prometheus_models.PromQueryFormat(form))
        if instant:
            target.instant()
        else:
            target.range()
        if query.legend:
            target.legend_format(query.legend)
        panel.with_target(target)
    return panel


def _of_query(query: Query) -> Iterator[models.DynamicConfigValue]:
    if query.color:
        yield _fixed(query.color)
    if query.dashed:
        yield _property("custom.lineStyle", {"fill": "dash", "dash": [10, 6]})
        yield _property("custom.fillOpacity", 0)
        yield _property("custom.stacking", {"mode": "none", "group": "A"})


def _of_column(column: Column) -> Iterator[models.DynamicConfigValue]:
    if column.unit:
        yield _property("unit", column.unit)
    if column.decimals is not None:
        yield _property("decimals", column.decimals)
    if column.steps:
        steps = [{"value": value, "color": color} for value, color in column.steps]
        yield _property("thresholds", {"mode": "absolute", "steps": steps})
        yield _property("custom.cellOptions", {"type": "color-text"})
    if column.mappings is not None:
        yield _property("mappings", [value_map(column.mappings)])
    if column.link is not None:
        title, url = column.link
        yield _property("links", [{"title": title, "url": url}])


def _ref_id(place: int) -> str:
    return chr(ord("A") + place)


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    config = dashboard.ThresholdsConfig()
    config.mode(models.ThresholdsMode("absolute"))
    config.steps([models.Threshold(value=value, color=color) for value, color in steps])
    return config


def _limits(steps: Steps) -> Steps:
    """The steps with the worse color of both sides at each, since a line has the color of the step that it begins."""
    pairs = pairwise(steps)
    return [steps[0], *((value, below if color == GOOD else color) for (_, below), (value, color) in pairs)]


def _color_by(mode: str) -> dashboard.FieldColor:
    color = dashboard.FieldColor()
    color.mode(models.FieldColorModeId(mode))
    return color


def _legend(mode: str, calculations: list[str], *, shown: bool) -> common.VizLegendOptions:
    legend = common.VizLegendOptions()
    legend.display_mode(common_models.LegendDisplayMode(mode))
    legend.placement(common_models.LegendPlacement("bottom"))
    legend.show_legend(show_legend=shown)
    legend.calcs(calculations)
    return legend


def _tooltip(sort: str) -> common.VizTooltipOptions:
    tooltip = common.VizTooltipOptions()
    tooltip.mode(common_models.TooltipDisplayMode("multi"))
    tooltip.sort(common_models.SortOrder(sort))
    return tooltip


def _fixed(color: str) -> models.DynamicConfigValue:
    return _property("color", {"mode": "fixed", "fixedColor": color})


def _property(name: str, value: object) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val=name, value=value)


_BY_THRESHOLD = _color_by("thresholds")
_NEWEST = common.ReduceDataOptions().calcs(["lastNotNull"]).values(values=False)
