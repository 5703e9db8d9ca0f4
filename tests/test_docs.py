"""What the documents claim is what the program does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from click import Command, Group

from kvcache_exporter.cli import main
from kvcache_exporter.config import Config, KubernetesConfig, TargetConfig, parse_config
from kvcache_exporter.families import FAMILIES

ROOT = Path(__file__).parent.parent
METRICS = ROOT / "exporter" / "METRICS.md"
README = ROOT / "README.md"
# What is found out of a target in Kubernetes.
NOT_OF_THE_FILE = {"container_id", "has_default_seats", "num_draft_layers", "unknown_arguments"}
BLOCK = re.compile(r"(<!-- reference: [^>]*-->\n).*(<!-- end of reference -->)", re.DOTALL)


def reference() -> str:
    rows = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(rows) + "\n"


def test_metric_reference_is_what_the_collector_serves(request: pytest.FixtureRequest) -> None:
    written = BLOCK.sub(lambda block: f"{block[1]}{reference()}{block[2]}", METRICS.read_text())
    if request.config.getoption("--update-golden"):
        METRICS.write_text(written)
    assert METRICS.read_text() == written


def test_prose_names_only_metrics_that_exist() -> None:
    names = {family.name for family in FAMILIES}
    for document in (METRICS, README):
        for name in re.findall(r"\bkvcache_[a-z_]+[a-z]", document.read_text()):
            assert name in names or name == "kvcache_exporter", f"{document.name} names {name}"


def test_readme_names_every_command_and_option() -> None:
    text = README.read_text()
    assert isinstance(main, Group)
    for name, command in main.commands.items():
        assert f"kvcache-exporter {name}" in text
        assert isinstance(command, Command)


def test_configuration_of_the_readme_is_accepted() -> None:
    (example,) = re.findall(r"```yaml\n(listen_address.*?)```", README.read_text(), re.DOTALL)
    config = parse_config(example.replace("ca_file: /etc/ssl/engine-ca.pem", ""), Path("config.yml"))
    assert config.targets
    assert config.kubernetes
    settings = {setting.name for section in (Config, TargetConfig, KubernetesConfig) for setting in fields(section)}
    for name in settings - NOT_OF_THE_FILE:
        assert re.search(rf"\b{name}:", example), f"the example has no {name}"


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", README.read_text())) <= targets
