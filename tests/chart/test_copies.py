"""What the chart repeats of other files is what they say; `make chart` writes it anew."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_engine import CHART

from kvcache_exporter import __version__
from promtool import ROOT

BUILD: dict[str, Any] = runpy.run_path(str(ROOT / "helm" / "build.py"))


def test_rules_and_dashboards_are_copies() -> None:
    """To the byte, and nothing else lies there."""
    held = {file.relative_to(CHART): file.read_bytes() for file in (CHART / "files").rglob("*") if file.is_file()}
    assert held == BUILD["copies"]()


def test_copies_are_files() -> None:
    """Some tools that take charts out of Git drop symlinks."""
    assert [path for path in CHART.rglob("*") if path.is_symlink()] == []


def test_table_of_values_is_that_of_the_comments() -> None:
    text = (CHART / "README.md").read_text()
    assert text == BUILD["readme"](text, BUILD["documented_values"]((CHART / "values.yaml").read_text()))


def test_version_is_that_of_the_exporter() -> None:
    description = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert description["appVersion"] == __version__


def test_build_writes_copies_and_table(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("# -- Which it is.\nmode: a\n")
    (tmp_path / "README.md").write_text("Before.\n\n<!-- values -->\nold\n<!-- end of values -->\n\nAfter.\n")
    BUILD["build"](tmp_path)
    for place, content in BUILD["copies"]().items():
        assert (tmp_path / place).read_bytes() == content
    table = '| value | default | meaning |\n| --- | --- | --- |\n| `mode` | `"a"` | Which it is. |\n'
    assert (tmp_path / "README.md").read_text() == (f"Before.\n\n<!-- values -->\n\n{table}\n<!-- end of values -->\n\nAfter.\n")


def test_sentence_is_of_a_value_or_of_a_mapping_as_a_whole() -> None:
    text = """
# -- Where it
# comes from.
image: "a|b"
gpu:
  # -- Whether.
  enabled: true

  # no sentence for the table
  # -- Which.
  uuids: [1]
# -- All of it.
securityContext:
  # a remark
  drop: [ALL]
"""
    assert BUILD["documented_values"](text) == [
        ("image", '"a|b"', "Where it comes from."),
        ("gpu.enabled", "true", "Whether."),
        ("gpu.uuids", "[1]", "Which."),
        ("securityContext", '{"drop": ["ALL"]}', "All of it."),
    ]


def test_values_without_a_sentence_are_told_all_at_once() -> None:
    text = "a: 1\n# -- Good.\nb: 2\n# a remark\nc:\n  d: 3\n# -- no full stop\ne: 4\n"
    with pytest.raises(Exception, match="values") as refused:
        BUILD["documented_values"](text)
    assert str(refused.value).splitlines() == [
        "values.yaml:1: a has no sentence; write `# -- …` above it",
        "values.yaml:6: c.d has no sentence; write `# -- …` above it",
        "values.yaml:8: what is said of e is no sentence: no full stop",
    ]


def test_readme_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the values"):
        BUILD["readme"]("# Chart\n", [])
