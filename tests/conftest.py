"""Fixtures and options of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import Upstream

pytest_plugins = ["fake_nvml.plugin"]

CACHE = Path(__file__).parent.parent / ".cache"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden pages anew instead of comparing with them")


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    """A scripted HTTP server on loopback, in the place of a vLLM server."""
    with Upstream() as server:
        yield server


@pytest.fixture(scope="session")
def prometheus() -> Path:
    """The folder of the real `prometheus` and `promtool`; `make test` puts them there."""
    return _programs(CACHE / "prometheus" / "bin", "promtool")


@pytest.fixture(scope="session")
def alertmanager() -> Path:
    """The folder of the real `prometheus-alertmanager` and `amtool`; `make test` puts them there."""
    return _programs(CACHE / "alertmanager" / "bin", "amtool")


def _programs(folder: Path, program: str) -> Path:
    if not (folder / program).exists():
        pytest.fail(f"no {program} in {folder}: run `make suite`, which gets it")
    return folder
