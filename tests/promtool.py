"""The real promtool, and what it does not check: the names in an expression.

Expressions are cut into tokens, not parsed: promtool has parsed them before.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

ROOT = Path(__file__).parent.parent
RULES = ROOT / "alerts" / "kvcache.rules.yaml"
SCRAPE_SECONDS = 15
# What Prometheus itself puts on the series of a scrape.
SCRAPED = {"job": "kvcache-exporter", "instance": "node-a:9948"}


def promtool(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the promtool in `folder`; what it says of a failure is in `stdout`, too."""
    command = [folder / "promtool", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def input_series(pages: Sequence[str]) -> list[dict[str, str]]:
    """What scrapes of these pages, 15 s apart, leave in Prometheus, in the notation of `promtool test rules`.

    A series that is on a page no more is marked stale there, as Prometheus does.
    """
    series: dict[str, list[str]] = {}
    for index, page in enumerate(pages):
        shown = {_series("up", {}): "1"}
        for family in text_string_to_metric_families(page):
            shown.update((_series(sample.name, sample.labels), _number(sample.value)) for sample in family.samples)
        for name in shown.keys() | series.keys():
            values = series.setdefault(name, ["_"] * index)
            values.append(shown.get(name, "_" if not values or values[-1] in ("_", "stale") else "stale"))
    return [{"series": name, "values": " ".join(values)} for name, values in series.items()]


def fired(folder: Path, pages: Sequence[str]) -> set[tuple[str, str]]:
    """Which of the shipped alerts are ever firing while these pages are scraped, each with its target ("" where it has none)."""
    seconds = SCRAPE_SECONDS * (len(pages) - 1)
    groups = yaml.safe_load(RULES.read_text())["groups"]
    scenario = {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{SCRAPE_SECONDS}s",
        "group_eval_order": [group["name"] for group in groups],
        "tests": [
            {
                "interval": f"{SCRAPE_SECONDS}s",
                "input_series": input_series(pages),
                "promql_expr_test": [
                    {
                        "expr": f'group by (alertname, target) (last_over_time(ALERTS{{alertstate="firing"}}[{seconds + 1}s]))',
                        "eval_time": f"{seconds}s",
                        "exp_samples": [],
                    }
                ],
            }
        ],
    }
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "scenario.yaml")
        file.write_text(yaml.safe_dump(scenario))
        answer = promtool(folder, "test", "rules", file)
    if answer.returncode == 0:
        return set()
    # Nothing is expected, so that the failure lists all there is.
    _, got, samples = answer.stdout.partition("got: ")
    assert got, answer.stdout
    return set(re.findall(r'\{alertname="(\w+)"(?:, target="([^"]*)")?\}', samples))


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _series(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in sorted({**labels, **SCRAPED}.items()))}}}"


@dataclass(frozen=True)
class Grouping:
    """`by` keeps these labels, `without` drops them; an aggregation without a clause keeps none."""

    function: str
    keeps: bool
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Selector:
    """A metric in an expression: (label, values that it is compared with), and what it is aggregated by, innermost first."""

    metric: str
    matchers: tuple[tuple[str, str], ...] = ()
    groupings: tuple[Grouping, ...] = ()

    def labels(self, of_metric: set[str]) -> set[str]:
        """The labels that are left outside of the aggregations, given those of the metric."""
        left = of_metric
        for grouping in self.groupings:
            left = left & set(grouping.labels) if grouping.keeps else left - set(grouping.labels)
        return left


@dataclass(frozen=True)
class Expression:
    """What an expression names; `joined` are the labels of on, ignoring, group_left and group_right."""

    selectors: tuple[Selector, ...]
    joined: tuple[str, ...]

    @classmethod
    def of(cls, promql: str) -> Expression:
        """Read the names in a valid expression."""
        tokens = [match[0] for match in _TOKEN.finditer(promql) if not match[0].startswith(("#", " ", "\n"))]
        joined: list[str] = []
        return cls(tuple(_selectors(tokens, (), joined)), tuple(joined))


_TOKEN = re.compile(
    r"""\s+ | \#[^\n]* | "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | `[^`]*` | \[[^\]]*\]
    | [a-zA-Z_:][\w:]* | \d[\w.]*(?:(?<=[eE])[+-]\d+)? | [=!]~ | [=!<>]= | .""",
    re.VERBOSE,
)
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")
_AGGREGATIONS = {"sum", "min", "max", "avg", "count", "group", "stddev", "stdvar", "topk", "bottomk", "quantile", "count_values"}
_JOINS = {"on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "atan2", "bool", "offset", "inf", "nan"}


def _selectors(tokens: Sequence[str], groupings: tuple[Grouping, ...], joined: list[str]) -> Iterator[Selector]:
    index = 0
    while index < len(tokens):
        token = tokens[index]
        following = tokens[index + 1] if index + 1 < len(tokens) else ""
        index += 1
        if token in _AGGREGATIONS:
            grouping, start = _clause(tokens, index, token)
            end = _closing(tokens, start)
            after = end + 1
            if grouping is None:
                grouping, after = _clause(tokens, after, token)
            inside = grouping or Grouping(token, keeps=True, labels=())
            yield from _selectors(tokens[start + 1 : end], (inside, *groupings), joined)
            index = after
        elif token in _JOINS and following == "(":
            end = _closing(tokens, index)
            joined.extend(_list(tokens[index + 1 : end]))
            index = end + 1
        elif _NAME.fullmatch(token) and token.lower() not in _WORDS and following != "(":
            matchers: tuple[tuple[str, str], ...] = ()
            if following == "{":
                end = tokens.index("}", index)
                inside_braces = tokens[index + 1 : end]
                matchers = tuple(
                    (inside_braces[at - 1], inside_braces[at + 1][1:-1])
                    for at, operator in enumerate(inside_braces)
                    if operator in ("=", "!=", "=~", "!~")
                )
                index = end + 1
            yield Selector(token, matchers, groupings)


def _clause(tokens: Sequence[str], index: int, function: str) -> tuple[Grouping | None, int]:
    """The `by` or `without` at this place, if any, and where it ends."""
    if index >= len(tokens) or tokens[index] not in ("by", "without"):
        return None, index
    end = _closing(tokens, index + 1)
    return Grouping(function, tokens[index] == "by", _list(tokens[index + 2 : end])), end + 1


def _closing(tokens: Sequence[str], opening: int) -> int:
    """Where the parenthesis that opens at this place is closed."""
    depth = 0
    for index in range(opening, len(tokens)):
        depth += (tokens[index] == "(") - (tokens[index] == ")")
        if depth == 0:
            return index
    raise ValueError(f"no closing parenthesis: {' '.join(tokens)}")


def _list(tokens: Sequence[str]) -> tuple[str, ...]:
    return tuple(token for token in tokens if token != ",")
