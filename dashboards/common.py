"""What all boards share: variables, links to each other, and firing alerts on their time series."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from dashboards.colors import VERMILLION
from dashboards.panels import DATASOURCE
from dashboards.promql import SCOPE, select

ENGINE_UID = "kvcache-engine"
NODE_UID = "kvcache-node"
FLEET_UID = "kvcache-fleet"
_TITLES = {ENGINE_UID: "KV cache: engine", NODE_UID: "KV cache: node", FLEET_UID: "KV cache: fleet"}

_ALL = "$__all"
# Options of targets that do not answer come from the target's own series, which every target has.
_ENGINES_AND_TARGETS = '__name__=~"kvcache_engine_info|kvcache_target_info"'
_PAGES = '__name__=~"kvcache_engine_info|kvcache_target_info|kvcache_exporter_build_info"'


@dataclass(frozen=True)
class Row:
    """Panels below a heading; those of the first row of a board have none."""

    panels: Sequence[Builder[models.Panel]]
    title: str = ""


@dataclass(frozen=True)
class Board:
    """A board: what it is called, what it shows, and what its annotations are about."""

    uid: str
    description: str
    since: str
    variables: Sequence[Builder[models.VariableModel]]
    alerts: str
    rows: Sequence[Row]


def shared_variables(*, one_target: bool = False, hidden: Collection[str] = ()) -> list[Builder[models.VariableModel]]:
    """Variables of every board, in one order; `one_target` where a board is about a single target."""
    target_selector = f'{{{_ENGINES_AND_TARGETS}, {SCOPE}, model_name=~"$model"}}'
    of_target = 'target="$target"' if one_target else 'target=~"$target"'
    variables = [
        # `.*` takes series without the label too: not every Prometheus has clusters or namespaces.
        chosen("cluster", "kvcache_exporter_build_info", all_value=".*"),
        chosen("namespace", 'kvcache_exporter_build_info{cluster=~"$cluster"}', all_value=".*"),
        # All stands for the jobs that there are, so that `up` is asked of no other job.
        chosen("job", 'kvcache_exporter_build_info{cluster=~"$cluster", namespace=~"$namespace"}'),
        chosen("model", f"kvcache_engine_info{{{SCOPE}}}", label_name="model_name", all_value=".*"),
        one("target", target_selector) if one_target else chosen("target", target_selector, all_value=".*"),
        chosen("engine", f'kvcache_engine_info{{{SCOPE}, model_name=~"$model", {of_target}}}', all_value=".*"),
    ]
    for variable in variables:
        if variable.build().name in hidden:
            variable.hide(models.VariableHide.HIDE_VARIABLE)
    return [_datasource_variable(), *variables]


def _datasource_variable() -> dashboard.DatasourceVariable:
    variable = dashboard.DatasourceVariable("datasource")
    variable.label("data source")
    variable.type("prometheus")
    return variable


def instance_variable() -> Builder[models.VariableModel]:
    """The exporter whose page is shown, of those that watch the chosen targets."""
    return one("instance", f'{{{_PAGES}, {SCOPE}, target=~"$target"}}')


def length_variable() -> Builder[models.VariableModel]:
    """The length that the what-if asks about."""
    variable = dashboard.TextBoxVariable("length")
    variable.label("length, tokens")
    variable.description("Prompt and output tokens of a request, for the row “What if”.")
    variable.default_value("8192")
    variable.current(models.VariableOption(text="8192", value="8192"))
    variable.options([models.VariableOption(selected=True, text="8192", value="8192")])
    return variable


def one(name: str, selector: str) -> dashboard.QueryVariable:
    """A variable of which one value is chosen, at first the first one."""
    variable = _query_variable(name, f"label_values({selector}, {name})")
    variable.include_all(include_all=False)
    variable.multi(multi=False)
    return variable


def chosen(name: str, selector: str, *, label_name: str = "", all_value: str = "") -> dashboard.QueryVariable:
    """A variable of which several values can be chosen, at first all; `all_value` stands for all, else the list of them."""
    variable = _query_variable(name, f"label_values({selector}, {label_name or name})")
    variable.include_all(include_all=True)
    variable.multi(multi=True)
    variable.current(models.VariableOption(selected=True, text=["All"], value=[_ALL]))
    if all_value:
        variable.all_value(all_value)
    return variable


def repeated(name: str, selector: str) -> dashboard.QueryVariable:
    """A variable that is not shown, for panels that are repeated for each of its values."""
    variable = chosen(name, selector, all_value=".*")
    variable.hide(models.VariableHide.HIDE_VARIABLE)
    return variable


def _query_variable(name: str, query: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name)
    variable.datasource(DATASOURCE)
    variable.query(query)
    variable.definition(query)
    variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable.sort(models.VariableSort.NATURAL_ASC)
    return variable


def url(uid: str, **variables: str) -> str:
    """A link to a board that keeps data source, scope and time; `variables` are set to columns of the row it is in."""
    columns = (f'var-{name}=${{__data.fields["{column}"]:percentencode}}' for name, column in variables.items())
    kept = (f"${{{name}:queryparam}}" for name in ("datasource", "cluster", "namespace", "job"))
    return f"/d/{uid}?{'&'.join((*columns, *kept, '${__url_time_range}'))}"


def firing(selection: str) -> str:
    """The firing alerts of kvcache-exporter that are selected."""
    return select("ALERTS", selection, 'alertname=~"KVCache.*"', 'alertstate="firing"')


def board_json(board: Board) -> str:
    """A board as the text that is committed."""
    builder = dashboard.Dashboard(_TITLES[board.uid])
    builder.uid(board.uid)
    builder.description(board.description)
    builder.tags(["kvcache"])
    builder.readonly()
    builder.tooltip(models.DashboardCursorSync.CROSSHAIR)
    builder.time(board.since, "now")
    builder.timezone("browser")
    builder.refresh("30s")
    builder.variables(list(board.variables))
    builder.annotation(_firing_alerts(board.alerts))
    builder.links([_link(uid) for uid in _TITLES if uid != board.uid])
    for row in board.rows:
        if row.title:
            builder.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            builder.with_panel(panel)
    built: dict[str, Any] = json.loads(json.dumps(builder.build(), cls=JSONEncoder))
    for number, content in enumerate(built["panels"], start=1):
        content["id"] = number
    for shown in (*built["links"], *built["annotations"]["list"]):
        # The SDK knows no other place than a menu of the newest Grafana; without one they are above the panels.
        del shown["placement"]
    return json.dumps(built, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _firing_alerts(expression: str) -> dashboard.AnnotationQuery:
    query = dashboard.AnnotationQuery()
    query.name("firing alerts")
    query.datasource(DATASOURCE)
    query.enable(enable=True)
    query.hide(hide=False)
    query.icon_color(VERMILLION)
    query.expr(expression)
    query.step("30s")
    query.title_format("{{alertname}}")
    query.text_format("{{target}} {{engine}} {{gpu}} {{model_name}}")
    query.tag_keys("severity")
    return query


def _link(uid: str) -> dashboard.DashboardLink:
    link = dashboard.DashboardLink(_TITLES[uid])
    link.type(models.DashboardLinkType("link"))
    link.url(f"/d/{uid}")
    link.icon("dashboard")
    link.include_vars(include_vars=True)
    link.keep_time(keep_time=True)
    return link
