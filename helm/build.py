"""Brings the chart up to date with what it repeats: `python helm/build.py`.

Rules and dashboards are copied into it (Helm reads no file outside of a chart, and some tools drop symlinks), and the table of
values in its README is written from the comments in values.yaml.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parent.parent
CHART = ROOT / "helm" / "kvcache-exporter"
TABLE = re.compile(r"(<!-- values -->\n).*(<!-- end of values -->)", re.DOTALL)


class UndocumentedValueError(Exception):
    """A value has no sentence; one line for each such value, with its line in values.yaml."""


class Value(NamedTuple):
    """A row of the table: path of the key, its default as JSON, its sentence."""

    key: str
    default: str
    sentence: str


def copies() -> dict[Path, bytes]:
    """What the chart has to hold of other folders, by its place in the chart."""
    sources = {Path("files/kvcache.rules.yaml"): ROOT / "alerts" / "kvcache.rules.yaml"}
    sources |= {Path("files", board.name): board for board in sorted((ROOT / "dashboards").glob("*.json"))}
    return {place: source.read_bytes() for place, source in sources.items()}


def documented_values(text: str) -> list[Value]:
    """The values of a values.yaml in the order of the file.

    A value's sentence is the comment above it that starts with `# --`. A mapping may have one sentence for all of it, or one for
    each of its keys. Raises UndocumentedValueError.
    """
    lines = text.splitlines()
    problems: list[str] = []
    values = list(_values(yaml.compose(text, Loader=yaml.SafeLoader), "", lines, problems))
    if problems:
        raise UndocumentedValueError("\n".join(problems))
    return values


def readme(text: str, values: list[Value]) -> str:
    """The README with the table of these values in it."""
    rows = ["| value | default | meaning |", "| --- | --- | --- |"]
    for value in values:
        default = f"`{value.default}`".replace("|", "\\|")
        rows.append(f"| `{value.key}` | {default} | {value.sentence} |")
    table = "\n".join(rows) + "\n"
    if not TABLE.search(text):
        raise ValueError("the README has no place for the values: <!-- values --> and <!-- end of values -->")
    return TABLE.sub(lambda place: f"{place[1]}\n{table}\n{place[2]}", text)


def build(chart: Path) -> None:
    """Write the copies and the table into the chart. Raises UndocumentedValueError."""
    values = documented_values((chart / "values.yaml").read_text(encoding="utf-8"))
    for place, content in copies().items():
        (chart / place).parent.mkdir(parents=True, exist_ok=True)
        (chart / place).write_bytes(content)
    page = chart / "README.md"
    page.write_text(readme(page.read_text(encoding="utf-8"), values), encoding="utf-8")


def _values(node: yaml.Node | None, prefix: str, lines: list[str], problems: list[str]) -> Iterator[Value]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        sentence = _sentence(lines, key.start_mark.line)
        parts = isinstance(value, yaml.MappingNode) and bool(value.value)
        if sentence is None and parts:
            yield from _values(value, f"{path}.", lines, problems)
        elif sentence is None:
            problems.append(f"values.yaml:{key.start_mark.line + 1}: {path} has no sentence; write `# -- …` above it")
        elif not sentence.endswith("."):
            problems.append(f"values.yaml:{key.start_mark.line + 1}: what is said of {path} is no sentence: {sentence}")
        else:
            yield Value(path, json.dumps(_plain(value)), sentence)


def _sentence(lines: list[str], line: int) -> str | None:
    """The comment above a line (counted from 0) if it is one for the table."""
    comment: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        comment.insert(0, lines[line].lstrip(" #"))
        if comment[0].startswith("-- "):
            return " ".join(comment).removeprefix("-- ").strip()
    return None


def _plain(node: yaml.Node) -> object:
    return yaml.safe_load(yaml.serialize(node))


if __name__ == "__main__":
    try:
        build(CHART)
    except UndocumentedValueError as error:
        sys.exit(str(error))
