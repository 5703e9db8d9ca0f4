"""The boards are what their builders make, ask for nothing that is not there, and keep the rules for panels."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcache_exporter.engine_state import STATES
from kvcache_exporter.gpu_memory import COMPONENTS
from kvcache_exporter.gpu_reading import THROTTLE_REASONS
from kvcache_exporter.limits import LIMITS
from promtool import ROOT, RULES, Expression, Selector, promtool
from test_alerts import SERVED

DASHBOARDS = ROOT / "dashboards"
BOARDS = ("engine", "node", "fleet")
UIDS = {"engine": "kvcache-engine", "node": "kvcache-node", "fleet": "kvcache-fleet"}
VARIABLES = ("datasource", "cluster", "namespace", "job", "model", "target", "engine", "instance", "gpu", "length")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
OKABE_ITO = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
GRAYS = {"#999999", "#F0F0F0"}
# Base units of Prometheus, and what Grafana calls counts and counts a second.
UNITS = {"none", "bytes", "s", "percentunit", "cps"}
# What the metric of a panel is compared with in an alert is where the panel changes its color.
ALERTS_OF = {
    "kvcache_headroom_ratio": "KVCacheHeadroomLow",
    "model_name:kvcache_headroom_ratio:min": "KVCacheHeadroomLow",
    "model_name:kvcache_headroom_ratio:fleet": "KVCacheFleetHeadroomLow",
    "kvcache_exhaustion_seconds": "KVCacheExhaustionPredicted",
    "model_name:kvcache_exhaustion_seconds:min": "KVCacheExhaustionPredicted",
    "kvcache_preemptions_total": "KVCachePreemptionStorm",
    "kvcache_capacity_mismatch_ratio": "KVCacheCapacityMismatch",
}

Json = Mapping[str, Any]

each_board = pytest.mark.parametrize("name", BOARDS)


def board(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DASHBOARDS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


@dataclass(frozen=True)
class Asked:
    """An expression of a board, as it stands in the JSON: where it is, and what its series are called."""

    place: str
    expression: str
    legend: str = ""

    def selectors(self) -> tuple[Selector, ...]:
        """What it selects; topk and bottomk leave labels as they are."""
        read = Expression.of(self.expression.replace("$length", "8192"))
        return tuple(
            replace(found, groupings=tuple(group for group in found.groupings if group.function not in ("topk", "bottomk")))
            for found in read.selectors
        )


def queries(name: str) -> list[Asked]:
    return [
        Asked(panel["title"], target["expr"], target.get("legendFormat", ""))
        for panel in panels(name)
        for target in panel["targets"]
    ]


def selectors_of_variables(name: str) -> list[Asked]:
    found = []
    for variable in board(name)["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert match, variable["query"]
            found.append(Asked(variable["name"], match[1], f"{{{{{match[2]}}}}}"))
    return found


def alerts_on_graphs(name: str) -> list[Asked]:
    return [Asked(query["name"], query["expr"]) for query in board(name)["annotations"]["list"]]


def rules() -> dict[str, str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule.get("alert") or rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


def labels_of(metric: str) -> set[str]:
    """Labels that series of a metric or record have."""
    if metric == "ALERTS":
        known = {"alertname", "alertstate", "severity"}
        return known.union(
            *(labels_of(selector.metric) for expr in rules().values() for selector in Expression.of(expr).selectors)
        )
    if metric in SERVED:
        return set(SERVED[metric])
    return set().union(*(selector.labels(labels_of(selector.metric)) for selector in Expression.of(rules()[metric]).selectors))


def threshold(alert: str) -> float:
    """What an alert compares its metric with: the first number in it."""
    match = re.search(r"[<>] *(\d[\d.]*(?:e\d+)?)", rules()[alert])
    assert match
    return float(match[1])


def misplaced_datasources(content: Json) -> list[str]:
    """What would keep a board from working on any Grafana but its author's (case 76)."""
    found = [key for key in ("__inputs", "__requires", "__elements") if key in content]
    if content.get("id") is not None:
        found.append("id")
    if not content.get("uid") or len(content["uid"]) > 40:
        found.append("uid")
    if "${DS_" in json.dumps(content):
        found.append("${DS_")
    return found + [f"datasource {used}" for used in _datasources(content) if used != DATASOURCE]


def _datasources(content: object) -> Iterator[object]:
    if isinstance(content, dict):
        if "datasource" in content:
            yield content["datasource"]
        for value in content.values():
            yield from _datasources(value)
    elif isinstance(content, list):
        for value in content:
            yield from _datasources(value)


@pytest.mark.skipif(
    importlib.util.find_spec("grafana_foundation_sdk") is None, reason="the SDK that builds the boards needs Python 3.11"
)
def test_boards_are_what_the_builders_make(tmp_path: Path) -> None:
    """Else: `python -m dashboards.build`."""
    subprocess.run([sys.executable, "-m", "dashboards.build", tmp_path], cwd=ROOT, check=True)
    assert {file.name for file in tmp_path.iterdir()} == {f"{name}.json" for name in BOARDS}
    for name in BOARDS:
        assert (tmp_path / f"{name}.json").read_bytes() == (DASHBOARDS / f"{name}.json").read_bytes()


@each_board
def test_json_is_stable(name: str) -> None:
    text = (DASHBOARDS / f"{name}.json").read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    # A ConfigMap takes no more than 1 MiB.
    assert len(text.encode()) < 2**20


@each_board
def test_board_works_on_any_grafana(name: str) -> None:
    content = board(name)
    assert misplaced_datasources(content) == []
    assert content["schemaVersion"] <= 42
    assert content["uid"] == UIDS[name]
    assert content["editable"] is False
    assert (content["time"]["from"], content["time"]["to"]) == ("now-6h" if name == "fleet" else "now-1h", "now")
    assert content["refresh"] == "30s"


def test_board_of_one_grafana_is_told() -> None:
    """Case 76."""
    bad = {
        "__inputs": [{"name": "DS_PROMETHEUS", "type": "datasource"}],
        "id": 37,
        "uid": None,
        "panels": [{"datasource": "${DS_PROMETHEUS}", "targets": [{"expr": "avg(kv_usage_ratio)"}]}],
    }
    assert misplaced_datasources(bad) == ["__inputs", "id", "uid", "${DS_", "datasource ${DS_PROMETHEUS}"]


@each_board
def test_board_leads_to_the_others(name: str) -> None:
    links = {link["url"]: link for link in board(name)["links"]}
    assert links.keys() == {f"/d/{uid}" for other, uid in UIDS.items() if other != name}
    assert all(link["includeVars"] and link["keepTime"] for link in links.values())


@each_board
def test_variables_are_shared_and_in_one_order(name: str) -> None:
    variables = board(name)["templating"]["list"]
    names = [variable["name"] for variable in variables]
    assert names == [known for known in VARIABLES if known in names]
    assert set(VARIABLES[:7]) <= set(names)
    for place, variable in enumerate(variables):
        assert set(re.findall(r"\$(\w+)", str(variable.get("query", "")))) <= set(names[:place]), variable["name"]
        if variable["name"] in ("cluster", "namespace"):
            # Not every Prometheus has these labels, and `.*` takes a series without one.
            assert (variable["includeAll"], variable["allValue"]) == (True, ".*")
            assert variable["current"]["value"] == ["$__all"]


def test_engine_board_is_about_one_target() -> None:
    (target,) = (variable for variable in board("engine")["templating"]["list"] if variable["name"] == "target")
    assert (target["multi"], target["includeAll"]) == (False, False)


def test_links_of_alerts_lead_to_boards_that_have_their_variables() -> None:
    links = re.findall(r"dashboard: /d/([\w-]+)(?:\?(\S.*))?", RULES.read_text())
    assert links
    for uid, query in links:
        name = next(name for name in BOARDS if UIDS[name] == uid)
        asked = re.findall(r"var-(\w+)=", query)
        assert set(asked) <= {variable["name"] for variable in board(name)["templating"]["list"]}


@each_board
def test_firing_alerts_are_on_the_time_series(name: str) -> None:
    (annotation,) = alerts_on_graphs(name)
    (selector,) = annotation.selectors()
    assert selector.metric == "ALERTS"
    assert {("alertname", "KVCache.*"), ("alertstate", "firing")} <= set(selector.matchers)


@each_board
def test_queries_name_only_what_is_there(name: str) -> None:
    """Metrics that are served or recorded, and labels that these have."""
    recorded = {record for record in rules() if ":" in record}
    # Those of several metrics begin with a brace; the next test is about them.
    variables = [asked for asked in selectors_of_variables(name) if not asked.expression.startswith("{")]
    for asked in (*queries(name), *variables, *alerts_on_graphs(name)):
        for selector in asked.selectors():
            assert selector.metric in SERVED.keys() | recorded | {"ALERTS"}, asked
            assert {label for label, _ in selector.matchers} <= labels_of(selector.metric), asked


def test_a_variable_of_several_metrics_names_only_what_is_there() -> None:
    """Its selector has no name but a matcher for names."""
    for name in BOARDS:
        for asked in selectors_of_variables(name):
            for metrics in re.findall(r'__name__=~"([^"]+)"', asked.expression):
                assert set(metrics.split("|")) <= SERVED.keys()


@each_board
def test_legends_name_labels_that_are_there(name: str) -> None:
    for asked in queries(name):
        there = set().union(*(selector.labels(labels_of(selector.metric)) for selector in asked.selectors()))
        assert set(re.findall(r"{{(\w+)}}", asked.legend)) <= there, asked


@each_board
def test_queries_stay_within_what_is_chosen(name: str) -> None:
    """Records of the fleet are by cluster, namespace and model; all else is also by job, and by what the board is about."""
    chosen = {"cluster": "$cluster", "namespace": "$namespace", "job": "$job"}
    if name == "node":
        chosen["instance"] = "$instance"
    for asked in queries(name):
        for selector in asked.selectors():
            labels = labels_of(selector.metric)
            wanted = {label: value for label, value in chosen.items() if label in labels}
            if name == "engine" and "engine" in labels:
                wanted |= {"target": "$target", "engine": "$engine"}
            if name == "fleet" and "model_name" in labels:
                wanted["model_name"] = "$model"
            assert wanted.items() <= dict(selector.matchers).items(), asked


def test_every_expression_parses(prometheus: Path, tmp_path: Path) -> None:
    values = {"length": "8192"}
    found = [asked for name in BOARDS for asked in (*queries(name), *selectors_of_variables(name), *alerts_on_graphs(name))]
    expressions = {re.sub(r"\$(\w+)", lambda match: values.get(match[1], "a|b"), asked.expression) for asked in found}
    assert not any("$" in expression for expression in expressions)
    file = tmp_path / "queries.yaml"
    rules = [{"record": f"query:{place}", "expr": expression} for place, expression in enumerate(sorted(expressions))]
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    answer = promtool(prometheus, "check", "rules", file)
    assert answer.returncode == 0, answer.stdout


@each_board
def test_panels_say_what_they_answer(name: str) -> None:
    """To a newcomer: the question, when to worry, and what it means that nothing is shown."""
    titles = [panel["title"] for panel in panels(name)]
    assert len(set(titles)) == len(titles)
    for panel in panels(name):
        title, description = panel["title"], panel["description"]
        assert title.endswith("?"), title
        assert len(description) > 60, title
        assert "worry" in description.lower(), title
        assert "No data" in description, title
        assert panel["fieldConfig"]["defaults"]["noValue"] not in ("", "0"), title


@each_board
def test_panels_have_units(name: str) -> None:
    for panel in panels(name):
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in UNITS, panel["title"]
        # A code is shown as words, and a table says it by column.
        assert "decimals" in defaults or "mappings" in defaults or panel["type"] == "table", panel["title"]


@each_board
def test_panels_of_now_ask_for_now(name: str) -> None:
    """A range query would show the last value of a series that is gone."""
    for panel in panels(name):
        is_now = panel["type"] in ("stat", "bargauge", "table")
        assert panel["type"] in ("stat", "bargauge", "table", "timeseries", "state-timeline")
        assert all(target["instant"] is is_now and target["range"] is not is_now for target in panel["targets"]), panel["title"]


@each_board
def test_time_series_can_be_read(name: str) -> None:
    for panel in panels(name):
        if panel["type"] == "timeseries":
            legend, tooltip = panel["options"]["legend"], panel["options"]["tooltip"]
            assert (legend["showLegend"], legend["displayMode"], legend["calcs"]) == (True, "table", ["lastNotNull", "max"])
            assert tooltip["mode"] == "multi"
            assert panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] is False
            assert all(target.get("legendFormat") for target in panel["targets"]), panel["title"]


@each_board
def test_colors_can_be_told_apart(name: str) -> None:
    text = (DASHBOARDS / f"{name}.json").read_text(encoding="utf-8")
    assert set(re.findall(r"#[0-9A-Fa-f]{6}\b", text)) <= OKABE_ITO | GRAYS
    for panel in panels(name):
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert all(step["color"].startswith("#") for step in steps), panel["title"]
        # Grafana's own palette, which is not made for that, is for series of which nobody knows the number.
        if panel["type"] == "timeseries" and name == "engine":
            fixed = [override for override in panel["fieldConfig"]["overrides"] if override["properties"][0]["id"] == "color"]
            assert fixed or "{{reason}}" in panel["targets"][0]["legendFormat"], panel["title"]


@pytest.mark.parametrize("name", ["engine", "node"])
def test_each_part_of_the_memory_has_its_color(name: str) -> None:
    (panel,) = (panel for panel in panels(name) if panel["targets"][0].get("legendFormat") in COMPONENTS)
    parts = {target["refId"]: target["legendFormat"] for target in panel["targets"] if 'component="' in target["expr"]}
    colors = {
        parts[override["matcher"]["options"]]: override["properties"][0]["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"]["options"] in parts
    }
    for target in panel["targets"]:
        assert re.findall(r'component="(\w+)"', target["expr"]) in ([target["legendFormat"]], [])
    assert colors.keys() == set(COMPONENTS)
    assert len(set(colors.values())) == len(colors)


@pytest.mark.parametrize(
    ("metric", "label", "values"),
    [
        ("kvcache_binding_limit", "limit", LIMITS),
        ("kvcache_engine_state", "state", STATES),
        ("kvcache_gpu_throttled", "reason", THROTTLE_REASONS),
    ],
)
def test_each_code_has_its_word(metric: str, label: str, values: Sequence[str]) -> None:
    found = [
        (panel, target["expr"])
        for name in BOARDS
        for panel in panels(name)
        for target in panel["targets"]
        if metric in target["expr"] and " * " in target["expr"]
    ]
    assert found
    for panel, expression in found:
        terms = re.findall(rf'(\d+) \* {metric}{{[^}}]*{label}="(\w+)"}}', expression)
        assert terms == [(str(place), value) for place, value in enumerate((value for _, value in terms), start=1)]
        assert {value for _, value in terms} == set(values)
        start = int(match[1]) if (match := re.match(r"(\d+) \+ ", expression)) else 0
        words = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
        assert {str(start + place) for place in range(1, len(values) + 1)} <= words.keys()
        assert len({word["text"] for word in words.values()}) == len(words)


def test_infinity_is_never() -> None:
    """Where a forecast is a number; on a graph it is cut."""
    shown = {asked.place for name in BOARDS for asked in queries(name) if "kvcache_exhaustion_seconds" in asked.expression}
    for name in BOARDS:
        for panel in panels(name):
            if panel["title"] not in shown:
                continue
            if panel["type"] == "timeseries":
                assert all(target["expr"].startswith("clamp_max(") for target in panel["targets"])
            else:
                assert '"Infinity": {"color": "#009E73", "index": 0, "text": "never"}' in json.dumps(panel, sort_keys=True)


# Where no room is left is told apart from where there is little.
NONE_AT_ALL = 0.01


@each_board
def test_thresholds_are_those_of_the_alerts(name: str) -> None:
    compared = 0
    for panel in panels(name):
        for metric, steps in _steps_by_metric(panel):
            if metric in ALERTS_OF:
                numbers = {abs(step["value"]) for step in steps if step["value"] is not None}
                assert numbers - {NONE_AT_ALL} == {threshold(ALERTS_OF[metric])}, (panel["title"], metric)
                compared += 1
            if metric == "kvcache_gpu_memory_component_bytes" and panel["type"] == "stat":
                assert steps[-1]["value"] == threshold("KVCacheForeignProcess")
    assert compared >= 1


def _steps_by_metric(panel: Json) -> Iterator[tuple[str, Sequence[Json]]]:
    """The first metric of each query of a panel, and the thresholds for it; of a table, those of the column."""
    if panel["type"] != "table":
        for target in panel["targets"]:
            selector = Asked("", target["expr"]).selectors()[0]
            yield selector.metric, panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        return
    (organize,) = (change for change in panel["transformations"] if change["id"] == "organize")
    sources = {name: source for source, name in organize["options"]["renameByName"].items()}
    metrics = {target["refId"]: Asked("", target["expr"]).selectors()[0].metric for target in panel["targets"]}
    for override in panel["fieldConfig"]["overrides"]:
        source = sources[override["matcher"]["options"]]
        steps = [setting["value"]["steps"] for setting in override["properties"] if setting["id"] == "thresholds"]
        if steps and source.startswith("Value"):
            yield metrics[source.partition("#")[2] or "A"], steps[0]


@each_board
def test_tables_show_columns_that_are_there(name: str) -> None:
    for panel in panels(name):
        if panel["type"] == "table":
            (organize,) = (change for change in panel["transformations"] if change["id"] == "organize")
            values = {"Value"} | {f"Value #{target['refId']}" for target in panel["targets"]}
            labels: set[str] = set()
            for target in panel["targets"]:
                read = Asked("", target["expr"]).selectors()
                labels = labels.union(*(selector.labels(labels_of(selector.metric)) for selector in read))
            assert set(organize["options"]["renameByName"]) <= labels | values, panel["title"]


@each_board
def test_panels_fill_the_grid(name: str) -> None:
    taken: dict[int, list[int]] = {}
    for panel in board(name)["panels"]:
        position = panel["gridPos"]
        for y in range(position["y"], position["y"] + position["h"]):
            taken.setdefault(y, []).extend(range(position["x"], position["x"] + position["w"]))
    assert sorted(taken) == list(range(len(taken)))
    assert {y for y, columns in taken.items() if sorted(columns) != list(range(24))} == set()
    ids = [panel["id"] for panel in board(name)["panels"]]
    assert len(set(ids)) == len(ids)


def test_files_for_grafana_agree() -> None:
    """What is mounted exists, and is where the provisioning files look for it."""
    services = yaml.safe_load((DASHBOARDS / "docker-compose.yml").read_text())["services"]
    assert services.keys() == {"exporter", "prometheus", "grafana"}
    mounted: dict[str, set[str]] = {}
    assert (DASHBOARDS / services["exporter"]["build"] / "Dockerfile").exists()
    for name, service in services.items():
        image = service.get("image", "")
        assert re.fullmatch(r"[\w./-]+:v?\d+(\.\d+)+[\w.-]*", image) or (name, image) == ("exporter", ""), image
        for volume in service.get("volumes", []):
            source, inside, mode = volume.split(":")
            assert (DASHBOARDS / source).resolve().exists(), source
            assert mode == "ro"
            mounted.setdefault(name, set()).add(inside)
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])

    (source,) = yaml.safe_load((DASHBOARDS / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    (provider,) = yaml.safe_load((DASHBOARDS / "provisioning/dashboards/kvcache.yml").read_text())["providers"]
    assert {f"{provider['options']['path']}/{name}.json" for name in BOARDS} <= mounted["grafana"]
    scrape = yaml.safe_load((DASHBOARDS / "provisioning/prometheus.yml").read_text())
    assert set(scrape["rule_files"]) <= mounted["prometheus"]
    assert [config["static_configs"] for config in scrape["scrape_configs"]] == [[{"targets": ["exporter:9948"]}]]
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]


def test_configuration_of_prometheus_is_valid(prometheus: Path) -> None:
    answer = promtool(prometheus, "check", "config", "--syntax-only", DASHBOARDS / "provisioning" / "prometheus.yml")
    assert answer.returncode == 0, answer.stdout
