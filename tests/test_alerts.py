"""The rules are valid, fire and stay silent as their scenarios say, name nothing that is not there, and are documented."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from fake_nvml import FakeNvml
from kvcache_exporter.config import TargetConfig
from kvcache_exporter.engine_state import STATES
from kvcache_exporter.families import FAMILIES
from kvcache_exporter.gpu_memory import COMPONENTS
from kvcache_exporter.limits import LIMITS
from kvcache_exporter.sources.nvml import NvmlSource
from lab import LLAMA_8B, Lab, Reply, Upstream, models_answer
from promtool import ROOT, RULES, SCRAPE_SECONDS, Expression, fired, promtool
from test_cases_traffic import traffic_page

ALERTS = ROOT / "alerts"
SCENARIOS = ALERTS / "kvcache.rules.test.yaml"
README = ALERTS / "README.md"
RUNBOOK_URL = "https://github.com/kvcache-exporter/kvcache-exporter/blob/main/alerts/runbooks"

Rule = Mapping[str, Any]

# What the scrape configuration or a cluster puts on series beside the exporter's own labels.
SCRAPE_LABELS = frozenset({"job", "instance", "cluster", "namespace"})
SERVED: Mapping[str, frozenset[str]] = {
    "up": SCRAPE_LABELS,
    **{family.name: SCRAPE_LABELS | set(family.labels) for family in FAMILIES},
}
# Labels whose every value is known.
VALUES: Mapping[str, Sequence[str]] = {
    "limit": LIMITS,
    "state": STATES,
    "component": COMPONENTS,
    "length": ("typical", "p95", "max"),
    "source": ("vllm", "vllm_models", "vllm_version", "model_config", "nvml", "processes", "pod_resources"),
}
# Groups that may add engines up.
FLEET_GROUPS = ("kvcache-fleet-records", "kvcache-fleet")
ONE_ENGINE_OR_GPU = {"instance", "target", "engine", "model_name", "gpu", "uuid", "source"}


def groups(text: str | None = None) -> list[dict[str, Any]]:
    """The groups of the shipped rules, or of others."""
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text() if text is None else text)["groups"]
    return found


def alert_rules() -> dict[str, Rule]:
    return {rule["alert"]: rule for group in groups() for rule in group["rules"] if "alert" in rule}


@cache
def scenarios() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(SCENARIOS.read_text())["tests"]
    return found


def expectations(alert: str) -> dict[str, list[list[dict[str, Any]]]]:
    """By scenario, what is expected of an alert at each moment that the scenario looks at it."""
    return {
        test["name"]: [check["exp_alerts"] for check in test.get("alert_rule_test", ()) if check["alertname"] == alert]
        for test in scenarios()
    }


each_alert = pytest.mark.parametrize("alert", sorted(alert_rules()))
each_alert_that_waits = pytest.mark.parametrize("alert", sorted(name for name, rule in alert_rules().items() if "for" in rule))


def test_rules_are_valid(prometheus: Path) -> None:
    answer = promtool(prometheus, "check", "rules", RULES)
    assert answer.returncode == 0, answer.stdout


def test_scenarios_pass(prometheus: Path, tmp_path: Path) -> None:
    """In two halves at once: promtool takes one scenario after the other, and ten seconds for all."""
    whole = yaml.safe_load(SCENARIOS.read_text())
    assert whole["rule_files"] == [RULES.name]
    halves = [tmp_path / "even.yaml", tmp_path / "odd.yaml"]
    for start, half in enumerate(halves):
        half.write_text(yaml.safe_dump({**whole, "rule_files": [str(RULES)], "tests": whole["tests"][start::2]}))
    with ThreadPoolExecutor() as pool:
        for answer in pool.map(partial(promtool, prometheus, "test", "rules"), halves):
            assert answer.returncode == 0, answer.stdout


def test_scenarios_evaluate_the_groups_in_the_order_of_the_file() -> None:
    """Else promtool takes any order, and records are of now or of the evaluation before."""
    assert yaml.safe_load(SCENARIOS.read_text())["group_eval_order"] == [group["name"] for group in groups()]


def test_scenarios_name_no_alert_that_does_not_exist() -> None:
    """An alert that is misspelled is always silent, and promtool content."""
    named = {check["alertname"] for test in scenarios() for check in test.get("alert_rule_test", ())}
    assert named <= alert_rules().keys()


def test_every_scenario_has_a_name_of_its_own() -> None:
    names = [test["name"] for test in scenarios()]
    assert len(set(names)) == len(names)
    assert [name for name in names if len(name.split()) < 5] == []


@each_alert
def test_alert_fires_in_a_scenario_and_is_silent_in_another(alert: str) -> None:
    looks = expectations(alert).values()
    assert any(any(moments) for moments in looks)
    assert any(moments and not any(moments) for moments in looks)


@each_alert_that_waits
def test_alert_is_silent_just_before_it_fires(alert: str) -> None:
    """In one scenario, so that what differs is the time that it has to wait."""
    assert any(any(moments) and not all(moments) for moments in expectations(alert).values())


@each_alert
def test_scenarios_spell_out_all_that_an_alert_says(alert: str) -> None:
    for expected in (entry for moments in expectations(alert).values() for entries in moments for entry in entries):
        assert expected["exp_annotations"].keys() == alert_rules()[alert]["annotations"].keys()


def test_scenarios_show_only_series_that_the_exporter_has() -> None:
    allowed = SCRAPE_LABELS | {"pod"}
    for test in scenarios():
        for entry in test["input_series"]:
            assert isinstance(entry["values"], str), f"{test['name']}: in YAML a plain 0x20 is 32"
            (series,) = Expression.of(entry["series"]).selectors
            labels = {label for label, _ in series.matchers}
            assert series.metric in SERVED, test["name"]
            assert labels - allowed <= SERVED[series.metric], test["name"]


def test_every_recorded_metric_is_looked_at_in_a_scenario() -> None:
    looked_at = {check["expr"] for test in scenarios() for check in test.get("promql_expr_test", ())}
    assert {rule["record"] for group in groups() for rule in group["rules"] if "record" in rule} <= looked_at


# No dead rule


def labels_of(expression: Expression, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The labels that a result of the expression can have."""
    return frozenset().union(*(s.labels(set(known.get(s.metric, frozenset()))) for s in expression.selectors))


def strangers(name: str, expression: Expression, known: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """A sentence for each name in an expression that nothing has."""
    for selector in expression.selectors:
        metric = selector.metric
        if metric not in known:
            yield f"{name}: nothing shows or records {metric}"
            continue
        for label, value in selector.matchers:
            if label not in known[metric]:
                yield f"{name}: {metric} has no label {label}"
            for one in value.split("|"):
                if label in VALUES and one not in VALUES[label] and "$" not in one:
                    yield f"{name}: {label} of {metric} is never {one}"
        left = set(known[metric])
        for grouping in selector.groupings:
            for label in set(grouping.labels) - left - SCRAPE_LABELS:
                yield f"{name}: {grouping.function} names {label}, which {metric} does not have there"
            left = left & set(grouping.labels) if grouping.keeps else left - set(grouping.labels)
    anywhere = frozenset().union(*(known.get(selector.metric, frozenset()) for selector in expression.selectors))
    for label in set(expression.joined) - anywhere:
        yield f"{name}: no metric of the join has a label {label}"


def recorded(text: str | None = None) -> Mapping[str, frozenset[str]]:
    """Metrics that the exporter serves or the rules record, with their labels."""
    known = dict(SERVED)
    for group in groups(text):
        for rule in group["rules"]:
            if "record" in rule:
                known[rule["record"]] = labels_of(Expression.of(rule["expr"]), known)
    return known


def complaints(text: str | None = None) -> list[str]:
    """What is dead in these rules, or in the shipped ones."""
    known = recorded(text)
    found: list[str] = []
    for group in groups(text):
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            expression = Expression.of(rule["expr"])
            found += strangers(name, expression, known)
            labels = labels_of(expression, known)
            for annotation, template in rule.get("annotations", {}).items():
                found += [
                    f"{name}: {annotation} shows a label {label} that the alert does not have"
                    for label in set(re.findall(r"\$labels\.(\w+)", template)) - labels
                ]
    return found


def test_rules_name_only_metrics_labels_and_values_that_are_there() -> None:
    assert complaints() == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "min_over_time(kvcache_headroom_ratio[2m])",
            "min_over_time(kvcache_room_ratio[2m])",
            "KVCacheHeadroomLow: nothing shows or records kvcache_room_ratio",
        ),
        (
            "rate(kvcache_preemptions_total[5m])",
            "rate(kvcache_preemptions[5m])",
            "KVCachePreemptionStorm: nothing shows or records kvcache_preemptions",
        ),
        (
            "record: model_name:kvcache_engines:count",
            "record: model_name:kvcache_engine:count",
            "model_name:kvcache_busy_engines:sum: nothing shows or records model_name:kvcache_engines:count",
        ),
        (
            'kvcache_requests_waiting{reason="deferred"}',
            'kvcache_requests_waiting{why="deferred"}',
            "KVCacheQueueDeferred: kvcache_requests_waiting has no label why",
        ),
        (
            "sum without (reason)",
            "sum without (why)",
            "kvcache:requests_waiting_for_capacity:sum: sum names why, which kvcache_requests_waiting does not have there",
        ),
        (
            "min by (cluster, namespace, model_name) (kvcache_headroom_ratio)",
            "min by (cluster, namespace, model) (kvcache_headroom_ratio)",
            "model_name:kvcache_headroom_ratio:min: min names model, which kvcache_headroom_ratio does not have there",
        ),
        (
            "and ignoring (component)",
            "and ignoring (part)",
            "KVCacheForeignProcess: no metric of the join has a label part",
        ),
        (
            'kvcache_engine_state{state="frozen"}',
            'kvcache_engine_state{state="stuck"}',
            "KVCacheEngineFrozen: state of kvcache_engine_state is never stuck",
        ),
        (
            "{{ $labels.gpu }} of {{ $labels.instance }} does not answer",
            "{{ $labels.card }} of {{ $labels.instance }} does not answer",
            "KVCacheGpuLost: summary shows a label card that the alert does not have",
        ),
    ],
)
def test_renamed_metric_label_or_value_is_told_by_rule_and_name(old: str, new: str, complaint: str) -> None:
    text = RULES.read_text()
    assert text.count(old) == 1
    assert complaint in complaints(text.replace(old, new))


@pytest.mark.parametrize(
    ("promql", "metrics", "joined"),
    [
        (
            'sum(rate(a_total{x=~"b|c(d)"}[5m:1m] offset 1h)) by (x) / on (x) group_left (y) b{} > bool 1e-3',
            ["a_total", "b"],
            "xy",
        ),
        ("quantile by (x) (0.9, a) unless absent(b) or -inf * c @ start()", ["a", "b", "c"], ""),
        ("a # and b\nand c{q='}'}", ["a", "c"], ""),
        ("histogram_quantile(0.5, sum without (y) (a_bucket)) == NaN", ["a_bucket"], ""),
    ],
)
def test_names_are_found_in_every_corner_of_promql(promql: str, metrics: list[str], joined: str) -> None:
    expression = Expression.of(promql)
    assert [selector.metric for selector in expression.selectors] == metrics
    assert "".join(expression.joined) == joined


def test_groupings_are_found_before_and_behind_what_they_group() -> None:
    before, behind = (Expression.of(promql).selectors[0] for promql in ("sum by (x, y) (max without (z) (a))", "sum(a) by (x)"))
    assert before.labels({"x", "z", "w"}) == {"x"}
    assert behind.labels({"x", "z"}) == {"x"}
    assert Expression.of("sum(a)").selectors[0].labels({"x"}) == set()


def test_nothing_is_averaged_and_only_the_fleet_adds_engines_up() -> None:
    for group in groups():
        for rule in group["rules"]:
            for selector in Expression.of(rule["expr"]).selectors:
                used = {grouping.function for grouping in selector.groupings}
                assert not used & {"avg", "quantile", "stddev"}, rule
                own = ONE_ENGINE_OR_GPU & SERVED.get(selector.metric, frozenset())
                if group["name"] not in FLEET_GROUPS:
                    assert own <= selector.labels(set(own)), f"{rule} loses labels of {selector.metric}"
                    assert not selector.metric.startswith("model_name:"), f"{rule} is about all engines of a model"


# What an alert says


@each_alert
def test_alert_has_all_that_whoever_is_woken_needs(alert: str) -> None:
    rule = alert_rules()[alert]
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url", "dashboard"}
    assert rule["annotations"]["runbook_url"] == f"{RUNBOOK_URL}/{alert}.md"
    assert re.fullmatch(r"/d/kvcache-(engine|node|fleet)(\?var-.*)?", rule["annotations"]["dashboard"])


@each_alert
def test_runbook_has_the_four_headings(alert: str) -> None:
    text = (ALERTS / "runbooks" / f"{alert}.md").read_text()
    assert re.findall(r"^#+ .*", text, re.MULTILINE) == [
        f"# {alert}",
        "## Meaning",
        "## Impact",
        "## Diagnosis",
        "## Mitigation",
    ]


def test_every_runbook_is_of_an_alert() -> None:
    assert {file.stem for file in (ALERTS / "runbooks").iterdir()} == alert_rules().keys()


def queries() -> list[tuple[str, str]]:
    """(runbook, query) of each PromQL block."""
    return [
        (file.name, dedent(block))
        for file in sorted((ALERTS / "runbooks").glob("*.md"))
        for block in re.findall(r"^ *```promql\n(.*?)^ *```$", file.read_text(), re.DOTALL | re.MULTILINE)
    ]


def test_queries_of_runbooks_parse(prometheus: Path, tmp_path: Path) -> None:
    rules = [{"record": f"query:{index}", "expr": query} for index, (_, query) in enumerate(queries())]
    assert len(rules) > len(alert_rules())
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "runbooks", "rules": rules}]}))
    answer = promtool(prometheus, "check", "rules", file)
    assert answer.returncode == 0, answer.stdout


def test_queries_of_runbooks_name_only_metrics_and_labels_that_are_there() -> None:
    known = recorded()
    assert [line for file, query in queries() for line in strangers(file, Expression.of(query), known)] == []


@each_alert
def test_readme_has_severity_duration_and_thresholds_of_the_alert(alert: str) -> None:
    rule = alert_rules()[alert]
    (row,) = re.findall(rf"^\| \[{alert}\]\(runbooks/{alert}\.md\) \| (.*) \|$", README.read_text(), re.MULTILINE)
    severity, _, thresholds, duration, _ = row.split(" | ")
    comparison = r"[<>=!]=?\s*[\d.]+(?:e\d+)?"
    assert severity == rule["labels"]["severity"]
    assert duration == rule.get("for", "none")
    assert set(re.findall(rf"`({comparison})`", thresholds)) == set(re.findall(comparison, rule["expr"]))


def test_readme_tells_how_long_alerts_are_kept() -> None:
    """Whoever waits for an alert to resolve has to know, so all that are kept are named beside their time."""
    (paragraph,) = re.findall(r"\(`keep_firing_for`\): (.*?)\. ", " ".join(README.read_text().split()))
    told = {
        name: duration
        for duration, names in re.findall(r"(\w+) for ([\w,\s]+)", paragraph)
        for name in re.findall(r"KVCache\w+", names)
    }
    assert told == {alert: rule["keep_firing_for"] for alert, rule in alert_rules().items() if "keep_firing_for" in rule}


# From an engine's page to an alert

Page = Callable[[int], bytes]
# Polls after which the alert that waits longest would fire.
HALF_AN_HOUR = 1800 // SCRAPE_SECONDS + 2


def scrapes(
    upstream: Upstream, number: int, pages: Mapping[str, Page], *, nvml: NvmlSource | None = None, **target: Any
) -> list[str]:
    """What the exporter shows of engines with these pages, by the name of their target, at each of so many polls 15 s apart."""
    targets = [
        TargetConfig(**{"name": name, "url": f"{upstream.url}/{name}", "model_config": LLAMA_8B, **target}) for name in pages
    ]
    lab = Lab(*targets, gpus=nvml, poll_interval_seconds=float(SCRAPE_SECONDS))
    shown = []
    for tick in range(number):
        for name, page in pages.items():
            upstream.replies[f"/{name}/metrics"] = Reply(page(tick))
            upstream.replies[f"/{name}/v1/models"] = Reply(models_answer(8192, name="m"), content_type="application/json")
            upstream.replies[f"/{name}/version"] = Reply(b'{"version":"0.32.0"}', content_type="application/json")
        shown.append(lab.poll().text())
    return shown


def with_lines(page: bytes, *lines: str) -> bytes:
    return page + "".join(f"vllm:{line}\n" for line in lines).encode()


def saturated(tick: int) -> bytes:
    """20 requests in 32 % of the cache, and 6 every half minute that the engine has no time for."""
    return traffic_page(used=320, running=20, capacity=3 * tick, finished=20 + 4 * tick, prompt=200)


def test_86_queue_beside_a_third_of_the_cache_is_a_ticket(upstream: Upstream, prometheus: Path) -> None:
    pages = scrapes(upstream, 70, {"t": saturated}, max_num_seqs=256)
    assert 'kvcache_binding_limit{engine="0",limit="compute",model_name="m",target="t"} 1.0' in pages[-1]
    assert 'kvcache_usage_ratio{engine="0",model_name="m",target="t"} 0.32' in pages[-1]
    assert fired(prometheus, pages) == {("KVCacheSaturatedBelowCapacity", "t"), ("KVCacheFleetHeadroomLow", "")}


def test_86_queue_is_a_ticket_where_the_number_of_seats_is_not_known(upstream: Upstream, prometheus: Path) -> None:
    """What the queue waits for cannot be told then, but a third in use says that it is not the cache."""
    pages = scrapes(upstream, 70, {"t": saturated})
    assert "kvcache_binding_limit{" not in pages[-1]
    assert fired(prometheus, pages) == {("KVCacheSaturatedBelowCapacity", "t"), ("KVCacheFleetHeadroomLow", "")}


def test_88_idle_engines_divide_nothing_by_nothing(upstream: Upstream, prometheus: Path) -> None:
    """Nothing comes: one was asked for 400 prompt tokens, had 100 of them, and is asked no more; the other never was."""

    def idle(tick: int) -> bytes:
        labels = '{engine="0",model_name="m"}'
        page = traffic_page(used=0, running=0, finished=20)
        return with_lines(page, f"prefix_cache_queries_total{labels} 400", f"prefix_cache_hits_total{labels} 100")

    pages = scrapes(upstream, HALF_AN_HOUR, {"idle": idle, "fresh": lambda tick: traffic_page(used=0, running=0)})
    assert not [line for page in pages for line in page.splitlines() if line.lower().endswith(" nan")]
    assert 'kvcache_headroom_ratio{engine="0",model_name="m",target="idle"} 1.0' in pages[-1]
    assert 'kvcache_remaining_request_slots{engine="0",length="max",model_name="m",target="fresh"} 1.0' in pages[-1]
    assert fired(prometheus, pages) == set()


def test_89_gpu_memory_that_is_always_full_raises_nothing(upstream: Upstream, fake_nvml: FakeNvml, prometheus: Path) -> None:
    """An idle engine took 90 % of its GPU when it started."""
    total, used = 85_520_809_984, 77_078_724_608
    memory = {"total": total, "reserved": 0, "free": total - used, "used": used}
    fake_nvml.show({"devices": [{"index": 0, "uuid": "GPU-aaaa", "memory_v2": memory}]})

    def idle(tick: int) -> bytes:
        return traffic_page(usable=27_000, used=0, running=0, finished=20)

    pages = scrapes(upstream, HALF_AN_HOUR, {"t": idle}, nvml=NvmlSource(), gpus=("GPU-aaaa",))
    assert 'kvcache_gpu_memory_used_bytes{gpu="0",uuid="GPU-aaaa"} 7.7078724608e+10' in pages[-1]
    assert fired(prometheus, pages) == set()


def storm(preempted: Callable[[int], int] | None) -> Page:
    """97 % of the cache in use, with so many requests preempted by each poll; None: not told."""

    def page(tick: int) -> bytes:
        labels = '{engine="0",model_name="m"}'
        lines = [f"kv_cache_usage_perc{labels} 0.97", f"num_requests_running{labels} 30"]
        lines.append(f"generation_tokens_total{labels} {1000 * tick}")
        if preempted is not None:
            lines.append(f"num_preemptions_total{labels} {preempted(tick)}")
        return with_lines(b"", *lines)

    return page


def test_90_only_the_engine_that_preempts_pages(upstream: Upstream, prometheus: Path) -> None:
    """All are as full. C restarts in the middle, and D has no counter of preemptions."""
    pages = {
        "a": storm(lambda tick: 12),
        "b": storm(lambda tick: 15 * tick // 2),
        "c": storm(lambda tick: 5000 if tick < 40 else 0),
        "d": storm(None),
    }
    shown = scrapes(upstream, 80, pages)
    assert len(re.findall(r"kvcache_usage_ratio\{.*\} 0\.97", shown[-1])) == 4
    assert 'kvcache_preemptions_total{engine="0",model_name="m",target="d"}' not in shown[-1]
    assert fired(prometheus, shown) == {("KVCachePreemptionStorm", "b")}


@pytest.mark.parametrize("used", [900, 970])
def test_90_exporter_that_starts_beside_a_full_and_steady_engine_says_nothing(
    upstream: Upstream, prometheus: Path, used: int
) -> None:
    """As many requests come as go, and nobody waits: also while the ages of those that run are not known yet."""

    def steady(tick: int) -> bytes:
        page = traffic_page(used=used, running=used * 2 // 25, finished=1000 + 4 * tick, made=used * 2 + tick)
        return with_lines(page, 'num_preemptions_total{engine="0",model_name="m"} 12')

    pages = scrapes(upstream, 80, {"t": steady}, max_num_seqs=256)
    assert fired(prometheus, pages) == set()
