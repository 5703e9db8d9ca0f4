"""Fixtures and options of the whole suite."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab import Upstream, wait_until

pytest_plugins = ["fake_nvml.plugin"]

CACHE = Path(__file__).parent.parent / ".cache"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden pages anew instead of comparing with them")


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    """A scripted HTTP server on loopback, in the place of a vLLM server."""
    with Upstream() as server:
        yield server


@pytest.fixture
def wait_for_threads() -> Callable[[], None]:
    """Wait until every request that a server here has got in this test is done with, and so has been logged if it failed."""
    strangers = set(_request_threads())
    return lambda: wait_until(lambda: not set(_request_threads()) - strangers)


def _request_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


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
